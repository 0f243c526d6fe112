"""`deepspeed.initialize` and the options that its scripts add: DeepSpeed's call form."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

from gemini.checkpoint.directory import Directory
from gemini.deepspeed.comm import get_local_rank, init_distributed
from gemini.deepspeed.parameters import mark
from gemini.deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum, kinds_of
from gemini.deepspeed.utils import RepeatingLoader
from gemini.elsewhere import instead_of, missing
from gemini.engine.config import load_config
from gemini.engine.engine import Engine, save_weights
from gemini.engine.initialize import OptimizerLike, SchedulerLike, Source, agreed, assemble, loader_of, say
from gemini.engine.step_log import StepLog
from gemini.engine.trainer.hooks import forward, loss_in, moved
from gemini.errors import ConfigError, GeminiError, UnsupportedError
from gemini.log import warn_at_script

# -- `DeepSpeedEngine`: an `Engine` with the methods that loops for DeepSpeed call.


class Monitor:
    """`engine.monitor`: the files of metrics that the config names, for values of the script's own."""

    def __init__(self, log: StepLog) -> None:
        self._log = log

    @property
    def enabled(self) -> bool:
        """Whether this rank writes files: rank 0 does, if the config names some."""
        return self._log.has_files

    def write_events(self, event_list: Iterable[tuple[str, float, int]], flush: bool = True) -> None:
        """Write (name, value, step) on rank 0. Local; raises OSError on a full disk.

        flush: has no effect: lines of JSON are in their file when the call returns.
        """
        for name, value, step in event_list:
            self._log.write("event", step, {name: float(value)})


class ThroughputTimer:
    """`engine.tput_timer`, which scripts tell of their epochs. It measures nothing."""

    def update_epoch_count(self) -> None:
        """Does nothing. Local; raises nothing."""

    def __getattr__(self, name: str) -> Any:
        raise missing("engine.tput_timer", name)


class DeepSpeedEngine(Engine):
    """See `Engine`. Questions are methods here, as they are in DeepSpeed.

    A name of DeepSpeed's engine that is not here is an AttributeError that says what to use.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._was_step_applied = False
        self._boundary: bool | None = None
        self._is_coalescing = False
        self._batches: Iterator[Any] | None = None  # of `train_batch()`
        self._collate_fn: Callable[..., Any] | None = None
        self.training_dataloader: DataLoader[Any] | None = None
        """The loader of `initialize(training_data=...)`; None without one."""
        self.monitor = Monitor(self._log)
        self.tput_timer = ThroughputTimer()

    # -- a step

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """`engine(...)`. Collective."""
        return self(*args, **kwargs)

    def backward(
        self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, *, divide: bool = True
    ) -> Tensor:
        """See `Engine.backward`. Collective.

        scale_wrt_gas: DeepSpeed's name of `divide`: False leaves the loss as it is.
        """
        return super().backward(loss, retain_graph, divide=divide and scale_wrt_gas)

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale. See `ShardedOptimizer.scale`. Local."""
        return self._needs_optimizer("scale()").scale(loss)

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say whether the next `step()` updates, until this is called again. Local, alike on every rank.

        is_boundary: True: with the micro-batches so far, one or many. As in DeepSpeed every loss is divided by
            `gradient_accumulation_steps()` all the same: an update before that many of them has smaller gradients than
            their mean. False: it does not, however many there are. None: when the window is full, as at first.
        """
        self._boundary = is_boundary

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the `step()` that ends the present micro-batch updates. Raises nothing. Local.

        It may be asked before the micro-batch's forward, as in DeepSpeed: the next micro-batch begins after a `step()`.
        """
        is_full = self._is_full()
        return is_full or (self._boundary is None and self._window.current >= self.batch_sizes.accumulation)

    def _is_full(self) -> bool:
        is_full = super()._is_full()
        return is_full if self._boundary is None or self._window.is_complete else self._boundary

    @contextmanager
    def coalesce_grad_reduction(self) -> Iterator[None]:
        """Reduce the gradients of all backwards inside at once, for the `step()` after it. Collective.

        That step updates, however many backwards there were. Gradients are added up as under `no_sync()`. Raises
        GeminiError inside another one.
        """
        self._needs_optimizer("coalesce_grad_reduction()")
        if self._is_coalescing:
            raise GeminiError("coalesce_grad_reduction() inside another one: leave that first")
        self._is_coalescing = True
        try:
            with self.no_sync():
                yield
        finally:
            self._is_coalescing = False
        self._window.complete()

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Does nothing: gradients are reduced chunk by chunk while backward runs. bucket_size: has no effect. Local."""

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> Tensor:
        """Run forward and backward of all micro-batches of a window, and the step. Collective.

        data_iter: gives micro-batches: a mapping is given to the model by keyword, a tuple or list by position. None:
            those of `training_dataloader`, again and again.

        Returns the mean of their losses over all ranks. Raises TypeError if the model does not return its loss, alone,
        first or as `loss`, ValueError without micro-batches, GeminiError while a window is open, StopIteration if
        `data_iter` ends before the window is full, and what `backward` and `step` raise.
        """
        if self.is_window_open():
            raise GeminiError("train_batch() inside a window: call it right after a step() that updates")
        if data_iter is None:
            if self._batches is None:
                if self.training_dataloader is None:
                    raise ValueError(
                        "train_batch() needs micro-batches: give data_iter=, or initialize(training_data=)"
                    )
                self._batches = RepeatingLoader(self.training_dataloader)
            data_iter = self._batches
        losses = []
        for _ in range(self.batch_sizes.accumulation):
            loss = self._loss_of(next(data_iter))
            self.backward(loss)
            losses.append(loss.detach().float())
        self.step(last=True)
        mean = torch.stack(losses).mean()
        self.communicator.all_reduce_sum_(mean, "the mean loss")
        return mean / self.communicator.world_size

    def _loss_of(self, batch: Any) -> Tensor:
        output = forward(self, moved(batch, self.device))
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        loss = first if isinstance(first, Tensor) else loss_in(output)
        if loss is None:
            raise TypeError(f"train_batch() needs a model that returns its loss, found {type(output).__name__}")
        return loss

    def step(self, *, last: bool = False) -> None:
        """See `Engine.step`. Collective. Raises GeminiError inside `coalesce_grad_reduction()`."""
        if self._is_coalescing:
            raise GeminiError("step() inside coalesce_grad_reduction(): call it after the block")
        before = self._num_applied
        try:
            super().step(last=last)
        finally:
            # Also if `step` raises: the update may be over by then, and the answer must not be that of the step before.
            self._was_step_applied = self._num_applied > before

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the weights: the window was full, and every gradient finite. Local."""
        return self._was_step_applied

    @property
    def _num_applied(self) -> int:
        """Optimizer steps that updated the weights."""
        return self.global_steps - self.skipped_steps

    def train_batch_size(self) -> int | None:
        """Samples of an optimizer step, over all ranks; None where the loader decides."""
        return self.batch_sizes.train

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Change how many samples make an optimizer step, by the number of micro-batches. Local, alike on every rank.

        Raises ValueError if they are not a whole number of micro-batches on every rank, or if the loader decides how
        large these are, and GeminiError while a window is open, whose losses were divided by the present number.
        """
        micro, ranks = self.batch_sizes.micro, self.model.world_size
        if micro is None:
            raise ValueError("set_train_batch_size() needs the config's 'train_micro_batch_size_per_gpu'")
        # The loader goes on with micro-batches of the same size, so only their number can follow.
        accumulation, rest = divmod(train_batch_size, micro * ranks)
        if rest or accumulation < 1:
            raise ValueError(
                f"set_train_batch_size({train_batch_size}): give a multiple of {micro * ranks}, which is "
                f"train_micro_batch_size_per_gpu={micro} * {ranks} ranks"
            )
        self._accumulate(accumulation, "set_train_batch_size()")

    def train_micro_batch_size_per_gpu(self) -> int | None:
        """Samples of a forward on one rank; None where the loader decides."""
        return self.batch_sizes.micro

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches of an optimizer step."""
        return self.batch_sizes.accumulation

    def set_gradient_accumulation_steps(self, steps: int) -> None:
        """Change how many micro-batches make an optimizer step, and with it the batch. Local, alike on every rank.

        Raises ValueError for less than 1, and GeminiError while a window is open.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"set_gradient_accumulation_steps() takes an integer of at least 1, found {steps!r}")
        self._accumulate(steps, "set_gradient_accumulation_steps()")

    def _accumulate(self, steps: int, what: str) -> None:
        if self.is_window_open():
            raise GeminiError(f"{what} inside a window: call it right after a step() that updates")
        micro = self.batch_sizes.micro
        train = None if micro is None else micro * steps * self.model.world_size
        self.batch_sizes = replace(self.batch_sizes, train=train, accumulation=steps)

    def get_batch_info(self) -> tuple[int | None, int | None, int]:
        """Samples of an optimizer step, samples of a forward on one rank, and forwards of an optimizer step."""
        return self.batch_sizes.train, self.batch_sizes.micro, self.batch_sizes.accumulation

    def steps_per_print(self) -> int | None:
        """Optimizer steps between two lines of progress; None where none are printed."""
        return self.config.steps_per_print

    def zero_optimization(self) -> bool:
        """Whether anything is divided over the ranks: the stage is not 0."""
        return self.zero_optimization_stage() > 0

    def zero_optimization_stage(self) -> int:
        """The stage, 0 to 3."""
        return self.model.settings.stage

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are divided over the ranks: the stage is 2 or 3."""
        return self.zero_optimization_stage() >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are divided over the ranks: the stage is 3."""
        return self.zero_optimization_stage() >= 3

    def get_global_grad_norm(self) -> float | None:
        """See `Engine.grad_norm`."""
        return self.grad_norm

    def get_lr(self) -> list[float]:
        """The learning rate of every param group."""
        return [group["lr"] for group in self._needs_optimizer("get_lr()").param_groups]

    def set_lr(self, lr: float) -> None:
        """Give every param group this learning rate. Local, alike on every rank. A schedule overwrites it."""
        for group in self._needs_optimizer("set_lr()").param_groups:
            group["lr"] = lr

    def get_mom(self) -> list[Any]:
        """The `betas` of every param group, or its `momentum`; None where the optimizer has neither."""
        groups = self._needs_optimizer("get_mom()").param_groups
        return [group.get("betas", group.get("momentum")) for group in groups]

    def gradient_clipping(self) -> float:
        """The global L2 norm that gradients are clipped to; 0 without clipping."""
        return self.config.clip_grad_norm or 0.0

    def module_state_dict(self) -> dict[str, Any]:
        """The module's whole state dict. Collective. Raises what `ShardedModel.state_dict` raises."""
        return self.model.state_dict()

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load a whole state dict into the module. Collective. Raises what `ShardedModel.load_state_dict` raises."""
        self.model.load_state_dict(state_dict, strict=strict)

    def fp16_enabled(self) -> bool:
        """Whether the config casts weights to fp16, and inputs should be fp16."""
        return self.config.dtype is torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether the config casts weights to bf16, and inputs should be bf16."""
        return self.config.dtype is torch.bfloat16

    @property
    def cur_scale(self) -> float:
        """See `Engine.loss_scale`."""
        return self.loss_scale

    def dynamic_loss_scale(self) -> bool:
        """Whether losses are scaled by a factor that moves."""
        return self.fp16_enabled() and not self.config.loss_scale.is_static

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that share the model; None for one rank without a process group."""
        return self.communicator.users_group

    @property
    def local_rank(self) -> int:
        """This rank among those of its machine, as the launcher counts them; 0 without one."""
        return get_local_rank()

    @property
    def world_size(self) -> int:
        """Ranks that share the model."""
        return self.model.world_size

    @property
    def dp_world_size(self) -> int:
        """Ranks that share the model."""
        return self.model.world_size

    @property
    def global_rank(self) -> int:
        """This rank in the model's process group."""
        return self.model.rank

    @property
    def global_samples(self) -> int | None:
        """Samples of all backwards on all ranks; None where the loader decides how many."""
        micro = self.batch_sizes.micro
        return None if micro is None else micro * self.micro_steps * self.model.world_size

    # -- data and files

    def set_training_data(self, dataset: Any, collate_fn: Callable[..., Any] | None) -> DataLoader[Any] | None:
        """Let `training_dataloader` be a loader of this dataset; none for None. Local, for `initialize`."""
        self._collate_fn = collate_fn
        self.training_dataloader = None if dataset is None else self.deepspeed_io(dataset, pin_memory=False)
        return self.training_dataloader

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[..., Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """A loader that gives each rank its part of a dataset, shuffled, in micro-batches. Local, alike on every rank.

        Args:
            dataset: a dataset of torch's, which an iterable one divides over the ranks by itself.
            batch_size: samples of a batch on one rank. None: the config's `train_micro_batch_size_per_gpu`.
            route: has no effect: "train", "eval" and "predict" give the same loader.
            pin_memory: page-locked batches, where there is an accelerator.
            data_sampler: which samples this rank gets. None: its part.
            collate_fn: makes a batch of samples. None: the one that `initialize` was given.
            num_local_io_workers: processes that load. None: this one.

        Raises ConfigError without a batch size.
        """
        return loader_of(
            dataset,
            self.config,
            self.model.rank,
            self.model.world_size,
            self._collate_fn if collate_fn is None else collate_fn,
            batch_size=batch_size,
            sampler=data_sampler,
            pin_memory=pin_memory and torch.accelerator.is_available(),
            num_workers=num_local_io_workers or 0,
        )

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """The whole weights, in their own dtype, on rank 0, and None on the others. Collective.

        exclude_frozen_parameters: leaves out those that are not trained. Raises what `ShardedModel.state_dict` raises.
        """
        state = self.model.state_dict(rank0_only=True)
        if self.global_rank > 0:
            return None
        frozen = {name for name, each in self.module.named_parameters() if not each.requires_grad}
        return {name: value for name, value in state.items() if not (exclude_frozen_parameters and name in frozen)}

    def save_16bit_model(self, save_dir: str | Path, save_filename: str = "pytorch_model.bin") -> bool:
        """Write the whole weights, in their own dtype, as one file of rank 0's; True. Collective.

        The end of the name says the format: .safetensors, else torch's. Raises OSError on every rank if it cannot be
        written; a file that was there before is as it was then.
        """
        save_weights(self.model, Path(save_dir) / save_filename)
        return True

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        data: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """`Engine.load_checkpoint`, which returns (None, {}) with a warning where there is none yet. Collective.

        Arguments and errors are those of `Engine.load_checkpoint`.
        """
        if tag is None and not Directory(load_dir).has_any():
            warn_at_script(f"load_checkpoint(): there is no checkpoint in {str(load_dir)!r}; training begins anew")
            return None, {}
        how = load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only
        return super().load_checkpoint(load_dir, tag, *how, data=data)

    def offload_states(
        self,
        include: Container[OffloadStateTypeEnum | str] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to the host between steps. Collective. See `ShardedModel.offload_states`.

        Args:
            include: members of `OffloadStateTypeEnum`. None: all.
            device: "cpu"; "none" does nothing.
            pin_memory: has no effect: host memory is page-locked wherever there is a CUDA device.
            non_blocking: has no effect: the memory is free when the call returns.

        Raises UnsupportedError for "nvme", ValueError for other names, and what `ShardedModel.offload_states` raises.
        """
        if OffloadDeviceEnum(device) is OffloadDeviceEnum.nvme:
            raise UnsupportedError("offload_states(device='nvme'): states do not leave for the disk; use device='cpu'")
        if OffloadDeviceEnum(device) is OffloadDeviceEnum.cpu:
            self.model.offload_states(kinds_of(include))

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move them back; the next forward does so by itself. Collective. See `ShardedModel.reload_states`.

        non_blocking: has no effect.
        """
        self.model.reload_states()

    def destroy(self) -> None:
        """Give memory and process group back. Collective."""
        self.close()

    def __getattr__(self, name: str) -> Any:
        """See `Engine.__getattr__`. What neither has is told what to use, if DeepSpeed's engine has it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if instead_of(name) is None:
                raise
        raise missing(type(self).__name__, name)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add `--deepspeed`, `--deepspeed_config PATH` and `--local_rank N`, for `initialize(args=...)`. Local."""
    group = parser.add_argument_group("DeepSpeed", "the names of DeepSpeed's options; gemini trains")
    group.add_argument("--deepspeed", action="store_true", help="accepted; training is always sharded")
    group.add_argument("--deepspeed_config", metavar="PATH", help="a config in DeepSpeed's keys: JSON, YAML or TOML")
    # Scripts for DeepSpeed's launcher often define it themselves, and argparse refuses a second definition.
    if "--local_rank" not in parser._option_string_actions:
        group.add_argument("--local_rank", type=int, default=-1, help="accepted; the launcher's environment says it")
    return parser


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: OptimizerLike = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: SchedulerLike = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Source = None,
    mesh_param: Any = None,
    config_params: Source = None,
) -> tuple[DeepSpeedEngine, Any, DataLoader[Any] | None, Any]:
    """An engine that trains the model sharded, as a DeepSpeed config says. Collective: every rank calls it alike.

    Args:
        args: with `deepspeed_config`, the path of a config, where `config` is None. Or the model, if `model` is None:
            DeepSpeed's page gives it as the first argument.
        model: any module, also one from `zero.Init`.
        optimizer: over the model's parameters, or a callable that makes one of them. None: the config's.
        model_parameters: parameters or param groups for the config's optimizer. None: all of the model.
        training_data: a dataset, of which a loader gives each rank its part, in micro-batches of the config's size.
        lr_scheduler: of the optimizer, or a callable that makes one of it. The engine moves it.
        distributed_port: has no effect: the launcher chooses it.
        mpu: an object whose `get_data_parallel_group()` gives the ranks. None: all of them.
        dist_init_required: False: a process group exists already. Otherwise it is made if there is none.
        collate_fn: for the loader.
        config: a dict, or the path of a JSON file, in DeepSpeed's keys or gemini's.
        mesh_param: (ranks, 1), or None. gemini.initialize() takes a `device_mesh`, which names what its dimensions
            divide.
        config_params: an older name of `config`.

    Returns the engine, its optimizer, the loader and the schedule. Raises ConfigError without a config or for one that
    is not valid, DivergenceError if the ranks' configs differ, and what `ShardedModel` and `ShardedOptimizer` raise.
    """
    if model is None and isinstance(args, nn.Module):
        args, model = None, args
    init_distributed(dist_init_required=dist_init_required)
    group = mpu.get_data_parallel_group() if mpu is not None else None
    # To `agreed` None means this rank alone.
    ranks = dist.group.WORLD if group is None and dist.is_initialized() else group
    sources = config, config_params, getattr(args, "deepspeed_config", None)
    # Some keys are DeepSpeed's and ours, with other meanings: "Adam" is AdamW there.
    agreed_config = agreed(
        lambda size: load_config(_only(sources, mesh_param), prefers="deepspeed", world_size=size), ranks
    )
    # Checked only here: a rank that raised before would leave the others waiting in the agreement.
    if model is None:
        raise TypeError("initialize(model=...) needs a module")
    engine = assemble(DeepSpeedEngine, agreed_config, model, optimizer, model_parameters, None, lr_scheduler, group)
    assert isinstance(engine, DeepSpeedEngine)
    mark(engine.module.parameters())
    say(engine)
    loader = engine.set_training_data(training_data, collate_fn)
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _only(sources: Iterable[Source], mesh_param: Any) -> Source:
    """The config among the places where it may be given. A rank that raises tells the others."""
    given = [each for each in sources if each is not None]
    if len(given) != 1:
        raise ConfigError(
            f"initialize() needs one config, as config=, config_params= or args.deepspeed_config, found {len(given)}"
        )
    if mesh_param is not None and tuple(mesh_param)[1:] != (1,):  # of data alone it says nothing
        raise ConfigError(
            "mesh_param: leave it out for data and sequence ranks, which share shards all together. Gradients are "
            "means over all of them, where DeepSpeed has sums over a sequence's ranks: multiply the loss by their "
            "number, and give batch sizes as if each rank had sequences of its own. For another mesh "
            "call gemini.initialize(device_mesh=init_device_mesh(..., mesh_dim_names=('dp_replicate', 'dp_shard'))): "
            "docs/parallelism.md"
        )
    return given[0]
