"""`Config`: every field of a training's config, with its unit and default.

A frozen value, made by `load_config`. Fields of the model are the arguments of `ShardedModel`, under the same names and
with the same checks; the others say what an engine does with it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from pydantic.fields import FieldInfo

from gemini.engine.config.batch import BatchSizes, batch_sizes
from gemini.engine.config.key import Number, Whole
from gemini.engine.config.named import OptimizerConfig, SchedulerConfig
from gemini.engine.config.setting import Setting
from gemini.optimizer.loss_scale import LossScale
from gemini.placement.policy import PlacementPolicy
from gemini.settings import Device, Settings, Strategy, Weights

Positive = Annotated[Whole, Field(gt=0)]
SETTINGS = tuple(each.name for each in dataclasses.fields(Settings))


class _Part(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        # pydantic would convert otherwise: "yes" to True, "2" to 2.
        strict=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        # The string below a field is its description, which docs/config.md prints.
        use_attribute_docstrings=True,
    )


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of the section that a field is, None for a plain value."""
    # A section may be optional: `X | None` has its members in `__args__`.
    kinds = (field.annotation, *getattr(field.annotation, "__args__", ()))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


class LossScaleConfig(_Part):
    """How losses are scaled where trainable weights are fp16: the arguments of `ShardedOptimizer`."""

    initial_scale: Number = 2.0**16
    """Factor of the first step."""
    min_scale: Number = 1.0
    """The factor never falls below it."""
    growth_factor: Number = 2.0
    """What the factor is multiplied by after `growth_interval` steps without a non-finite gradient."""
    backoff_factor: Number = 0.5
    """What the factor is multiplied by after steps that were skipped."""
    growth_interval: Whole = 1000
    """Optimizer steps."""
    hysteresis: Whole = 2
    """Steps that are skipped before the factor falls."""
    max_scale: Number = 2.0**32
    """The factor never rises above it."""

    @property
    def is_static(self) -> bool:
        """Whether the factor cannot move: this is what DeepSpeed's `fp16.loss_scale` becomes."""
        return self.min_scale == self.max_scale

    @model_validator(mode="after")
    def _check(self) -> Self:
        # The checks are in its constructor. The object is not needed.
        LossScale(**self.model_dump())
        return self


class MonitorConfig(_Part):
    """Where one kind of log is written, by rank 0."""

    output_path: str = ""
    """A folder. "": the one that the script was started in."""
    job_name: str = "gemini"
    """A folder or file name inside it."""


class MonitorsConfig(_Part):
    """Which files loss, learning rate, speed and memory are written to."""

    tensorboard: MonitorConfig | None = None
    """TensorBoard's event files; needs the package tensorboard. None: none are written."""
    json_lines: MonitorConfig | None = None
    """One line of JSON per optimizer step. None: none are written."""


class Config(_Part):
    """Everything that a config file can say about a training. Every field has a default.

    Raises ValueError where fields contradict each other; `load_config` makes a ConfigError of it.
    """

    # the model: arguments of ShardedModel
    stage: Annotated[int, Setting] = 3
    """What is divided over ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too."""
    shard_strategy: Annotated[Strategy, Setting] = None
    """What is cut into one shard per rank: a "tensor", a "bucket" (an operator's tensors), a "chunk". None: "chunk"."""
    tensor_placement_policy: Annotated[str | PlacementPolicy, Setting] = "auto"
    """Where states rest: "auto" (the device, as far as it goes), "cpu", "cuda", "static"; in Python an object too."""
    shard_param_frac: Annotated[float | None, Setting] = None
    """With "static": of the parameters, given up between uses, at stage 3 on several ranks. None: 1.0."""
    offload_optim_frac: Annotated[float | None, Setting] = None
    """With "static": of optimizer state, masters and gradients, on the host, where the update runs. None: 0.0."""
    offload_param_frac: Annotated[float | None, Setting] = None
    """With "static": of the parameters, on the host. None: 0.0."""
    gpu_margin_mem_ratio: Annotated[float | None, Setting] = None
    """With "auto": of what parameters, gradients and slots leave of the device, for optimizer state. None: all."""
    param_persistence_threshold: Annotated[int, Setting] = 0
    """Parameters of fewer elements stay whole on the device of every rank, whatever the policy."""
    model_persistence_threshold: Annotated[int | None, Setting] = None
    """Elements that such parameters have in all, at most. None: no bound."""
    max_live_parameters: Annotated[int | None, Setting] = None
    """Elements that are gathered, or fetched from the host, at any instant, at most. None: the budget decides."""
    max_prefetch: Annotated[int, Setting] = 1
    """Payloads that several ranks may gather at once before they are asked for. 0: none."""
    ignored_parameters: Annotated[Collection[str], Setting] = ()
    """Names of parameters, as "head.*", that are left alone: in no chunk, not reduced; their optimizer is another."""
    dtype: Annotated[Weights, Setting] = None
    """Dtype of weights: "fp32", "fp16", "bf16", "fp64", or a mapping from modules to these. None: the module's own."""
    reduce_dtype: Annotated[torch.dtype | None, Setting] = None
    """Dtype in which gradients travel between ranks. None: their own."""
    accumulate_dtype: Annotated[torch.dtype | None, Setting] = None
    """Dtype in which gradients rest and are added. None: their own, and fp32 from the second micro-batch on."""
    reuse_fp16_shard: Annotated[bool, Setting] = False
    """Whether gradients are stored in the memory of 16-bit parameters, which saves 2 bytes per parameter in fp16."""
    chunk_size: Annotated[int | None, Setting] = None
    """Elements of a chunk. None: the cheapest size that the budgets allow."""
    device: Annotated[Device, Setting] = None
    """"cuda:0", "emulated", a number. None: the current accelerator, else emulated."""
    device_memory: Annotated[int | str | None, Setting] = None
    """Bytes, or "20GiB": what this process may hold on its device, activations included. None: what is free."""
    model_data_memory: Annotated[int | str | None, Setting] = None
    """Bytes of `device_memory` that chunks may take. None: what activations leave."""
    host_memory: Annotated[int | str | None, Setting] = None
    """Bytes that chunks may take in host memory. None: what is free."""
    rank_timeout: Annotated[float, Setting] = 600.0
    """Seconds after which a rank that does not answer counts as lost."""
    ignore_unused_parameters: Annotated[bool, Setting] = True
    """False: a step raises if a trainable parameter got no gradient on any rank, and names all that did not."""

    # the step
    optimizer: OptimizerConfig | None = None
    """`type` and `params`. None: the optimizer is given to `initialize`."""
    scheduler: SchedulerConfig | None = None
    """`type` and `params`; moves once per optimizer step. None: the learning rate stays, or a scheduler is given."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Global L2 norm over all ranks that gradients are clipped to. None: no clipping."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling, which begins where trainable weights are fp16."""
    elementwise: bool = False
    """True: accept an optimizer that is not known to treat each element by itself; the user is responsible for it."""
    cast_inputs: bool = False
    """True: floating-point inputs of the model are cast to `dtype`."""

    # batches
    train_batch_size: Positive | None = None
    """Samples that make one optimizer step, over all ranks. None: computed from the two below."""
    train_micro_batch_size_per_gpu: Positive | None = None
    """Samples of one forward on one rank. None: computed, or the data loader decides."""
    gradient_accumulation_steps: Positive | None = None
    """Micro-batches of one optimizer step. None: computed, else 1."""
    drop_last: bool = False
    """Whether loaders that the engine makes leave out a last batch that is not full."""

    # logs
    steps_per_print: Positive | None = None
    """Optimizer steps between two lines of progress. None: none are printed."""
    monitors: MonitorsConfig = MonitorsConfig()
    """Files that metrics are written to."""

    _ignored: tuple[tuple[str, str], ...] = PrivateAttr(default=())
    _constants: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _check(self) -> Self:
        # Both check what concerns several fields together.
        self.settings()
        self.batch_sizes(None)
        return self

    @property
    def ignored(self) -> tuple[tuple[str, str], ...]:
        """Keys without effect, and what happens instead: the file's in its order, then what arguments replace."""
        return self._ignored

    @property
    def constants(self) -> Mapping[str, Any]:
        """Values in capitals of a Python config, such as BATCH_SIZE, which are the script's own."""
        return self._constants

    def with_notes(self, ignored: list[tuple[str, str]], constants: Mapping[str, Any]) -> Config:
        """This config, knowing of which keys it did not use."""
        # Notes are private attributes, so they are in no dump and no comparison of ranks. A frozen model lets only
        # these be set.
        noted = self.model_copy()
        noted._ignored, noted._constants = tuple(dict.fromkeys(ignored)), dict(constants)
        return noted

    def without(self, section: str, instead: str) -> Config:
        """This config with the default of a section, which is one more key without effect if the section is there."""
        # Nothing was asked for, so nothing is without effect.
        if getattr(self, section) == type(self).model_fields[section].get_default():
            return self
        ignored = [*self._ignored, (section, instead)]
        return self.model_copy(update={section: None}).with_notes(ignored, self._constants)

    def settings(self) -> Settings:
        """The fields of the model. Raises TypeError or ValueError as `Settings` does."""
        return Settings(**{name: getattr(self, name) for name in SETTINGS})

    def optimizer_options(self) -> dict[str, Any]:
        """Keyword arguments for `ShardedOptimizer`."""
        # `gpu_margin_mem_ratio` is not here: without it the optimizer follows the model's settings, which have it.
        options = {"clip_grad_norm": self.clip_grad_norm, "elementwise": self.elementwise}
        return {**self.loss_scale.model_dump(), **options}

    def batch_sizes(self, world_size: int | None) -> BatchSizes:
        """The three batch sizes on so many ranks, None where nobody knows yet. Raises ValueError if they do not fit."""
        return batch_sizes(
            self.train_batch_size,
            self.train_micro_batch_size_per_gpu,
            self.gradient_accumulation_steps,
            world_size,
        )

    def canonical(self) -> str:
        """The fields that all ranks must have in common, as JSON: equal texts mean equal configs."""
        # `shared` leaves out what may differ between ranks, such as their device.
        fields = self.model_dump(exclude=set(SETTINGS))
        return json.dumps({"model": self.settings().shared(), **fields}, sort_keys=True, default=repr)
