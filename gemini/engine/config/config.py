"""A config that is checked: batch sizes, an optimizer, schedules, settings."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, TypeVar

import torch
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from torch import Tensor, nn
from torch.optim import lr_scheduler

from gemini.engine.config.key import Number, Whole, dtype_named, setting
from gemini.engine.config.muon import muon_beside_adam
from gemini.engine.config.read import nearest, problems_of
from gemini.engine.config.schedules import SCHEDULES
from gemini.optimizer.averages import Ema, checked_ema
from gemini.optimizer.elementwise import TESTED
from gemini.optimizer.step import LossScale
from gemini.settings import SettingFields, Settings
from optim import CPUAdam, HybridAdam

# -- The three batch sizes of a run, of which any two give the third.
#
# train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * number of ranks


@dataclass(frozen=True)
class BatchSizes:
    """Samples that make an optimizer step, over all ranks; samples of a forward on one rank; forwards a step.

    None: nobody has said how large batches are; the user's loader decides.
    """

    train: int | None
    micro: int | None
    accumulation: int


def batch_sizes(train: int | None, micro: int | None, accumulation: int | None, world_size: int | None) -> BatchSizes:
    """Compute all three from those that were given. Raises ValueError where no whole numbers fit together.

    world_size: the number of ranks. None: not known yet, so that only what is wrong for any number is found.
    """
    is_open = micro is None or accumulation is None or world_size is None
    world_size = world_size or 1
    if train is None:
        steps = accumulation or 1
        return BatchSizes(None if micro is None else micro * steps * world_size, micro, steps)
    given = (micro or 1) * (accumulation or 1) * world_size
    # A factor that is not known yet may be any number, so the known ones need only divide the total.
    if train % given if is_open else train != given:
        factors = [
            f"train_micro_batch_size_per_gpu={micro}" if micro is not None else "",
            f"gradient_accumulation_steps={accumulation}" if accumulation is not None else "",
            f"{world_size} ranks" if world_size > 1 else "",
        ]
        product = " * ".join(filter(None, factors))
        total = f" = {given}" if "*" in product else ""
        verb = "is not a multiple of" if is_open else "is not"
        raise ValueError(f"train_batch_size={train} {verb} {product}{total}: change one of them")
    if accumulation is None:
        # `train_batch_size` alone does not say how a rank divides its samples, so a forward takes all of them.
        accumulation = 1 if micro is None else train // given
    # The division leaves no rest: the check above has made sure that what is known divides the total.
    return BatchSizes(train, micro or train // (accumulation * world_size), accumulation)


# -- An optimizer or a schedule as a config says it: a name and arguments, tried on a parameter of one element.


T = TypeVar("T")
_KINDS: tuple[type[torch.optim.Optimizer], ...] = (HybridAdam, CPUAdam, *TESTED, torch.optim.Adafactor)
OPTIMIZERS = {each.__name__.lower(): each for each in _KINDS}
_ONE_BIT = "its exchange of 1-bit gradients does not exist here: HybridAdam with communication in 16 bits is nearest"
_NOT_HERE = {
    "onebitadam": _ONE_BIT,
    "zerooneadam": _ONE_BIT,
    "onebitlamb": _ONE_BIT,
    "lamb": "PyTorch has none: give initialize() gemini.per_tensor(optimizer) of a class of your own",
    "muadam": "its learning rates by shape are not here: give param groups of HybridAdam",
    "muadamw": "its learning rates by shape are not here: give param groups of HybridAdam",
    "musgd": "its learning rates by shape are not here: give param groups of SGD",
    "lion": "PyTorch has none: give initialize() an optimizer of your own",
}
# DeepSpeed has these under names of its own.
_SAME_AS = {"fusedadam": "HybridAdam", "deepspeedcpuadam": "CPUAdam"}


class Named(BaseModel):
    """A name and arguments."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    type: str
    params: dict[str, Any] = Field(default_factory=dict)


class OptimizerConfig(Named):
    """The optimizer."""

    # The fields stand here and below once more for their descriptions, which docs/config.md prints.
    type: str
    """HybridAdam, CPUAdam, one of torch.optim that is elementwise, Adafactor, or Muon, which has Adam beside it."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments besides the parameters."""

    @model_validator(mode="after")
    def _try(self) -> Self:
        # Wrong arguments are found when the config is read, on all ranks and before the model is wrapped.
        self.make([_one_element(), nn.Parameter(torch.zeros(1, 1, device="cpu"))])
        return self

    @property
    def is_muon(self) -> bool:
        """Whether it is two optimizers: Muon for hidden matrices, and Adam for all other parameters."""
        return self.type.lower() == "muon"

    def make(
        self,
        parameters: Iterable[Any],
        names: Mapping[Tensor, str] | None = None,
        among: Collection[Tensor] | None = None,
    ) -> torch.optim.Optimizer | list[torch.optim.Optimizer]:
        """The optimizer of these parameters or param groups; of Muon a list of two. Raises ValueError for arguments.

        names: of the parameters in the model, by which Muon's are told from those of the Adam beside it. among: those
            that Muon may update; None: all.
        """
        if self.is_muon:
            for name, value in self.params.items():
                _refuse_text(name, value)
            try:
                return muon_beside_adam(parameters, self.params, names or {}, among)
            except (TypeError, ValueError) as error:
                raise ValueError(f"params are not valid for Muon: {error}") from error
        # Case does not count, as for DeepSpeed's own optimizers.
        name = _SAME_AS.get(self.type.lower(), self.type).lower()
        if name in _NOT_HERE:
            raise ValueError(f"type={self.type!r} is refused: {_NOT_HERE[name]}")
        if name not in OPTIMIZERS:
            raise ValueError(_not_a_name(self.type, [each.__name__ for each in OPTIMIZERS.values()]))
        return _called(OPTIMIZERS[name], parameters, self.params)


class SchedulerConfig(Named):
    """The learning rate schedule, which moves once per optimizer step."""

    type: str
    """WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest, or one of torch.optim.lr_scheduler."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Its arguments besides the optimizer."""

    @model_validator(mode="after")
    def _try(self) -> Self:
        # DeepSpeed's schedules have a model of their arguments. torch's are tried on an optimizer.
        if self.type in SCHEDULES:
            try:
                SCHEDULES[self.type].model_validate(self.params)
            except ValidationError as error:
                found = problems_of(error, SCHEDULES[self.type].model_fields, ("params",))
                raise ValueError("; ".join(map(str, found))) from error
        elif self.type not in TORCH_SCHEDULES:
            raise ValueError(_not_a_name(self.type, [*SCHEDULES, *TORCH_SCHEDULES]))
        else:
            # CyclicLR and OneCycleLR refuse an optimizer that has neither `momentum` nor `betas` among its defaults.
            # SGD has the first one.
            optimizer = torch.optim.SGD([_one_element()], lr=1.0)
            _called(TORCH_SCHEDULES[self.type], optimizer, self.params)
        return self


# These take numbers only. Functions and other schedules, which some of torch's take, cannot be written into a file.
TORCH_SCHEDULES: dict[str, type[lr_scheduler.LRScheduler]] = {
    name: getattr(lr_scheduler, name)
    for name in (
        "ConstantLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "CyclicLR",
        "ExponentialLR",
        "LinearLR",
        "MultiStepLR",
        "OneCycleLR",
        "PolynomialLR",
        "StepLR",
    )
}


def _one_element() -> nn.Parameter:
    # The device is named because a script may have set another default device, which a config must not allocate on.
    return nn.Parameter(torch.zeros(1, device="cpu"))


def _not_a_name(found: str, names: list[str]) -> str:
    return f"type={found!r} is not known{_nearest(found, names)} (valid: {', '.join(names)})"


def _nearest(found: str, names: list[str]) -> str:
    meant = nearest(found, names)
    return "" if meant is None else f"; the nearest is {meant!r}"


def _called(made: Callable[..., T], first: Any, arguments: Mapping[str, Any]) -> T:
    """`made(first, **arguments)`. Raises ValueError for what it does not take, in its own words."""
    # The first is what the caller gives itself; `unknown` and `kwargs` are names of ** parameters.
    _, *valid = [name for name in inspect.signature(made).parameters if name not in ("unknown", "kwargs")]
    # The names are checked before the call: Python's own error has no nearest name, and ours take unknown ones in `**`.
    for name in arguments:
        if name not in valid:
            raise ValueError(
                f"params.{name} is not an argument of {made.__qualname__}{_nearest(name, valid)} "
                f"(valid: {', '.join(valid)})"
            )
        _refuse_text(name, arguments[name])
    try:
        # The call itself is the check of the values. Optimizers and schedules raise for a negative rate or a missing
        # argument.
        return made(first, **arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"params are not valid for {made.__qualname__}: {error}") from error


def _refuse_text(name: str, value: Any) -> None:
    """Raises ValueError for a number in quotes, which torch would compare as a string, and for "auto"."""
    if value == "auto":
        raise ValueError(f'params.{name} is "auto", which nothing decides here: write the value')
    try:
        number = float(value) if isinstance(value, str) else None
    except ValueError:
        return
    if number is not None:
        raise ValueError(
            f"params.{name}={value!r} is a string: write the number {number:g} without quotes, in YAML with a point, "
            "as in 1.0e-3"
        )


# -- `Config`: every field of a training's config, with its unit and default.
#
# A frozen value, made by `load_config`. Fields of the model are those of `Settings`, with the same checks; the others
# say what an engine does with it.


Positive = Annotated[Whole, Field(gt=0)]
SETTINGS = tuple(each.name for each in dataclasses.fields(SettingFields))


class _ConfigPart(BaseModel):
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


class LossScaleConfig(_ConfigPart):
    """How losses are scaled where trainable weights are fp16: the arguments of `ShardedOptimizer`."""

    initial_scale: Number = LossScale.initial_scale
    """Factor of the first step."""
    min_scale: Number = LossScale.min_scale
    """The factor never falls below it."""
    growth_factor: Number = LossScale.growth_factor
    """What the factor is multiplied by after `growth_interval` steps without a non-finite gradient."""
    backoff_factor: Number = LossScale.backoff_factor
    """What the factor is multiplied by after steps that were skipped."""
    growth_interval: Whole = LossScale.growth_interval
    """Optimizer steps."""
    hysteresis: Whole = LossScale.hysteresis
    """Steps that are skipped before the factor falls."""
    max_scale: Number = LossScale.max_scale
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


class MonitorConfig(_ConfigPart):
    """Where one kind of log is written, by rank 0."""

    output_path: str = ""
    """A folder. "": the one that the script was started in."""
    job_name: str = "gemini"
    """A folder or file name inside it."""


class MonitorsConfig(_ConfigPart):
    """Which files loss, learning rate, speed and memory are written to."""

    tensorboard: MonitorConfig | None = None
    """TensorBoard's event files; needs the package tensorboard. None: none are written."""
    json_lines: MonitorConfig | None = None
    """One line of JSON per optimizer step. None: none are written."""
    wandb: dict[str, Any] | None = None
    """Arguments of `wandb.init`, to whose run metrics go; a warning says if there is none. None: nothing is sent."""
    comet: dict[str, Any] | None = None
    """Arguments of `comet_ml.start`, likewise."""
    trackio: dict[str, Any] | None = None
    """Arguments of `trackio.init`, likewise."""
    mlflow: dict[str, Any] | None = None
    """Arguments of `mlflow.start_run`, and `experiment_name` and `tracking_uri`, likewise."""


# mypy does not see that `model_config` makes a model frozen, as the fields of settings are.
class Config(_ConfigPart, SettingFields):  # type: ignore[misc]
    """Everything that a config file can say about a training: the arguments of `ShardedModel`, and what an engine does.

    Every field has a default.

    Raises ValueError where fields contradict each other; `load_config` makes a ConfigError of it.
    """

    # the step
    optimizer: OptimizerConfig | None = None
    """`type` and `params`. None: the optimizer is given to `initialize`."""
    scheduler: SchedulerConfig | None = None
    """`type` and `params`; moves once per optimizer step. None: the learning rate stays, or a scheduler is given."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Global L2 norm over all ranks that gradients are clipped to. None: no clipping."""
    ema: Annotated[Ema | None, BeforeValidator(checked_ema)] = None
    """Decay of an exponential moving average of the weights, as 0.999, or a table of `Ema`. None: there is none."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Dynamic loss scaling, which begins where trainable weights are fp16."""
    elementwise: bool = False
    """True: accept an optimizer that is not known to treat each element by itself; the user is responsible for it."""
    load_from_fp32_weights: bool = True
    """False: `load_checkpoint` makes fp32 masters of the 16-bit weights again, and leaves those of the files."""
    cast_inputs: bool = False
    """True: floating-point inputs of the model are cast to `dtype`."""
    autocast: Annotated[torch.dtype | None, BeforeValidator(dtype_named)] = None
    """The engine runs the forward under `torch.autocast` with this dtype; weights keep theirs. None: without."""

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

    # One that a config knows more of has a type of its own above.
    _as_setting = field_validator(*(name for name in SETTINGS if name != "gradient_accumulation_steps"), mode="plain")(
        setting
    )

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
        options = {"clip_grad_norm": self.clip_grad_norm, "elementwise": self.elementwise, "ema": self.ema}
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
