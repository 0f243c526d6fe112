"""`Accelerator`: Hugging Face Accelerate's, whose `prepare` makes sharded models and sharded optimizers.

A script changes one import and says what to shard; `prepare`, `backward`, `accumulate`, `clip_grad_norm_`,
`save_state` and the rest keep their meaning. Accelerate itself trains on one device or on several processes without a
plugin of its own, and sees models that it has nothing to do for.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from gemini.integrations.needed import needed

with needed("accelerate"):
    import accelerate
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DDPCommunicationHookType
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gemini.engine.config import Config
from gemini.engine.initialize import Source, say_model
from gemini.errors import ConfigError, UnsupportedError
from gemini.integrations.shared import (
    MIXED,
    config_of_all_ranks,
    ending_together,
    load_shards,
    mixed_weights,
    refuse_kind,
    refuse_made_elsewhere,
    refuse_unknown_ranks,
    save_shards,
    shard_group_of,
    was_skipped,
    window_of,
    without_effect,
)
from gemini.log import get_dist_logger
from gemini.model.plain import GatheredParameters
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer

# -- Plugins of Accelerate's that shard or move models themselves: they are refused by name.


_PLUGINS = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
PLAIN = (
    "choose Accelerate's plain training on several processes (accelerate launch --multi_gpu, or torchrun), and give "
    "Accelerator(gemini=...) the stage and the budgets"
)
"""What an error says to do instead."""


def refuse_plugins(given: dict[str, Any]) -> None:
    """Raises UnsupportedError for a plugin among the arguments, or one that `accelerate launch` has set. Local."""
    for name, variable in _PLUGINS.items():
        # Of this one the sizes are taken, where the script gives it.
        if given.get(name) is not None and name != "parallelism_config":
            raise UnsupportedError(f"{name}= shards or moves models itself: {PLAIN}")
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(f"{variable}=true, as `accelerate launch` sets it, is for {name}=: {PLAIN}")


# -- `PreparedOptimizer`: a sharded optimizer in Accelerate's hands.


class Whole(Enum):
    """Where `state_dict()` has the whole state."""

    ON_ALL = "on all ranks"
    ON_RANK_0 = "on rank 0, which writes it"
    NOWHERE = "nowhere: each rank writes its part"


class PreparedOptimizer(AcceleratedOptimizer):
    """A `ShardedOptimizer` as Accelerate hands it out: it steps where a window of micro-batches is full."""

    optimizer: ShardedOptimizer
    # This is an attribute because Accelerate calls `state_dict()` without arguments.
    _whole = Whole.ON_ALL

    def state_dict(self) -> dict[str, Any]:
        """See `ShardedOptimizer.state_dict`. Collective. Raises GeminiError inside a forward or backward."""
        if self._whole is Whole.NOWHERE:
            return {}
        return self.optimizer.state_dict(rank0_only=self._whole is Whole.ON_RANK_0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `ShardedOptimizer.load_state_dict`; an empty one stands for a state that ranks have in parts."""
        if state_dict:
            self.optimizer.load_state_dict(state_dict)

    @contextmanager
    def showing(self, whole: Whole) -> Iterator[None]:
        """Inside, `state_dict()` is empty on the other ranks. Local. Raises nothing."""
        self._whole = whole
        try:
            yield
        finally:
            self._whole = Whole.ON_ALL

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, since a gradient was not finite: schedules stay then. Local."""
        # Accelerate's own flag is set by its GradScaler alone, which does not exist here.
        return was_skipped(self.optimizer)


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator`, whose `prepare` shards models and makes sharded optimizers of plain ones.

    Args:
        args: as of `accelerate.Accelerator`.
        gemini: a config, or the path of one, of any dialect that `gemini.initialize` reads: the stage, budgets and all
            else of `ShardedModel`, the loss scale and clipping of `ShardedOptimizer`. None: what
            `gemini.launch_from_torch(config=...)` was given, else all defaults. Optimizers and schedules are the
            script's own.
        save_whole_state: `save_state` writes whole weights and optimizer states as Accelerate itself reads them, which
            rank 0 gathers in host memory. False: each rank writes its part, for any number of ranks to go on from.
        kwargs: as of `accelerate.Accelerator`. `mixed_precision` "bf16" and "fp16" become the dtype of the weights,
            which keep fp32 masters; floating-point inputs of the model are cast to it, outputs back. Of a
            `parallelism_config` the sizes of the data's dimensions, which become `shard_group_size`.

    Collective: every rank makes it alike. Raises ConfigError for a config that is not valid or contradicts the other
    arguments, DivergenceError if the ranks' configs differ, and UnsupportedError for plugins of Accelerate's that shard
    models themselves, and for "fp8".

    Example:
        >>> import torch
        >>> accelerator = Accelerator(cpu=True, gemini={"stage": 3, "device_memory": "1GiB"})
        >>> model = torch.nn.Linear(8, 1)
        >>> model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        >>> accelerator.backward(model(torch.ones(4, 8, device=accelerator.device)).square().mean())
        >>> optimizer.step()
    """

    def __init__(self, *args: Any, gemini: Source = None, save_whole_state: bool = False, **kwargs: Any) -> None:
        # Arguments may stand by position, too, so they are bound to their names.
        given = inspect.signature(accelerate.Accelerator).bind_partial(*args, **kwargs).arguments
        refuse_plugins(given)
        mixed = str(given.pop("mixed_precision", None) or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")).lower()
        if mixed not in MIXED:
            raise UnsupportedError(f"mixed_precision={mixed!r} is not possible with gemini: choose {', '.join(MIXED)}")
        parallelism = given.pop("parallelism_config", None)
        super().__init__(**given, mixed_precision="no")  # ours is a dtype of weights, and no autocast
        refuse_kind(self.distributed_type.value, PLAIN)
        if self.ddp_handler is not None and self.ddp_handler.comm_hook != DDPCommunicationHookType.NO:
            raise UnsupportedError(
                "a comm_hook of DistributedDataParallelKwargs is not called, as no model is in DDP: give "
                "gemini=dict(reduce_dtype='bf16') or 'fp16' for gradients that travel in 16 bits"
            )
        refuse_unknown_ranks(self.num_processes, "Accelerate", "give Accelerator(cpu=True)")
        config = config_of_all_ranks(gemini, {"bf16.enabled": mixed == "bf16", "fp16.enabled": mixed == "fp16"})
        group_size = shard_group_of(parallelism, config, self.num_processes)
        config = config.model_copy(update={"shard_group_size": group_size})
        self.gemini: Config = config
        """The config, with defaults in place of what it does not say."""
        self._weights = mixed_weights(config, MIXED[mixed], f"mixed_precision is {mixed!r}")
        # Scripts read `mixed_precision` to cast what they do not prepare, so a dtype of the config counts too.
        own = next((name for name, dtype in MIXED.items() if config.dtype in (dtype, name)), "no")
        self._mixed_precision = own if mixed == "no" else mixed
        refuse_made_elsewhere(config, "with Accelerate the script makes it and gives it to prepare()")
        # Nodes that have disks of their own have no folder in common, for which parts would be enough.
        self._saves_whole = save_whole_state or self.project_configuration.save_on_each_node
        self._saves_parts = False  # inside a `save_state` that does
        self._in_parts: list[dict[str, Any]] = []  # what stands for a sharded model among the weights meanwhile
        self._saving_parts = self.register_save_state_pre_hook(self._save_parts)
        self.register_load_state_pre_hook(self._load_parts)
        self._take_accumulation(window_of(config, self.num_processes))
        self._say(without_effect(config))

    def _take_accumulation(self, steps: int | None) -> None:
        """Micro-batches are reduced one by one: whole gradients, as in `no_sync()`, take 4 bytes a parameter."""
        if steps is not None and self.gradient_accumulation_steps not in (1, steps):
            raise ConfigError(
                f"gradient_accumulation_steps is {self.gradient_accumulation_steps} in Accelerator(...) and {steps} in "
                "the config, or by its batch sizes: leave one of them out"
            )
        window = steps or self.gradient_accumulation_steps
        self.gradient_state.plugin_kwargs.update(num_steps=window, sync_each_batch=True)

    def _say(self, lines: Iterable[str]) -> None:
        text = "\n".join(lines)
        if text:
            get_dist_logger().info(f"\n{text}", ranks=[0])

    @property
    def mixed_precision(self) -> str:
        """ "bf16" or "fp16" where weights have that dtype, else "no"."""
        return self._mixed_precision

    # -- prepare

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare objects as Accelerate does; every module with parameters becomes a `ShardedModel`. Collective.

        A list of optimizers of one module, `prepare(model, [muon, adam])`, becomes one optimizer, whose step is of all.
        Raises UnsupportedError for an optimizer of parameters of no module that is, or was, prepared, for several of
        one module that are not in a list, and what `ShardedModel` and `ShardedOptimizer` raise.
        """
        self._check_optimizers(args)  # before anything has changed
        args = tuple(self._sharded(each) if isinstance(each, nn.Module) else each for each in args)
        for each in args:
            if isinstance(each, ShardedModel):
                self.prepare_model(each)  # before any optimizer, which may stand before its model
        args = tuple(self._one_of(each) if _are_several(each) else each for each in args)
        return super().prepare(*args, device_placement=device_placement)

    def _check_optimizers(self, args: tuple[Any, ...]) -> None:
        modules = [*self._sharded_models(), *(each for each in args if isinstance(each, nn.Module))]
        optimizer_of: dict[int, Any] = {}  # by the id of the module
        for given in args:
            optimizers = list(given) if _are_several(given) else [given]
            if not all(_is_plain(each) for each in optimizers):
                continue
            module = _module_of(optimizers, modules)
            before = optimizer_of.setdefault(id(module), given)
            if before is not given:
                names = " and ".join(type(each).__name__ for each in (before, given))
                raise UnsupportedError(
                    f"{names} are of one model, and a sharded model has one step: give them as a list, "
                    "'model, optimizer = accelerator.prepare(model, [first, second])', and call step() of the one that "
                    "comes back"
                )

    def _one_of(self, optimizers: Sequence[Optimizer]) -> Any:
        """One optimizer of several, which are of one model. Collective."""
        model = _module_of(optimizers, self._sharded_models())
        options = self.gemini.optimizer_options() | self._scaler_options()
        return ShardedOptimizer(model, optimizers if len(optimizers) > 1 else optimizers[0], **options)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """A `ShardedModel` of `model`, or `model` itself if it is one. Collective. Raises what `prepare` raises.

        A module without parameters is Accelerate's to prepare, whose other arguments these are.
        """
        sharded = self._sharded(model)
        if not isinstance(sharded, ShardedModel):
            return super().prepare_model(sharded, device_placement, evaluation_mode)  # type: ignore[no-any-return]
        # `prepare` comes here twice for each model, and `save_state` writes every entry of this list.
        if sharded not in self._models:
            self._models.append(sharded)
        return sharded

    def _sharded(self, model: nn.Module) -> nn.Module:
        if isinstance(model, ShardedModel) or next(model.parameters(), None) is None:
            return model
        if self.state.dynamo_plugin.backend.value != "NO":
            raise UnsupportedError(
                "Accelerate's dynamo_backend does not compile a sharded model: call compile() of the model or of "
                "modules in it before prepare(), and leave dynamo_backend out"
            )
        device = self.device if self.gemini.device is None else self.gemini.device
        # `_take_accumulation` has put the config's number there, if it has one.
        settings = replace(self.gemini.settings(), gradient_accumulation_steps=self.gradient_accumulation_steps)
        sharded_model = ShardedModel(model, settings=settings, device=device, dtype=self._weights)
        say_model(sharded_model)
        return sharded_model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Optimizer:
        """A plain torch optimizer becomes a `ShardedOptimizer` over the same param groups. Collective.

        Raises UnsupportedError if its parameters are of no model that was prepared, and what `ShardedOptimizer` raises.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)  # type: ignore[no-any-return]
        if not isinstance(optimizer, ShardedOptimizer):
            optimizer = self._one_of([optimizer])
        # With device_placement Accelerate would load the whole state back into the optimizer, on every rank.
        prepared = PreparedOptimizer(optimizer, device_placement=False, scaler=None)
        self._optimizers.append(prepared)
        return prepared

    def _scaler_options(self) -> dict[str, Any]:
        """The loss scale as `GradScalerKwargs` say it."""
        handler = self.scaler_handler
        if handler is None:
            return {}
        if not handler.enabled:
            raise UnsupportedError("GradScalerKwargs(enabled=False): fp16 weights need a loss scale")
        names = {"initial_scale": "init_scale"} | dict.fromkeys(("growth_factor", "backoff_factor", "growth_interval"))
        return {ours: getattr(handler, theirs or ours) for ours, theirs in names.items()}

    def prepare_scheduler(self, scheduler: LRScheduler) -> Any:
        """Prepare a schedule, of the plain or of the prepared optimizer. Local. Raises nothing."""
        for optimizer in self._optimizers:
            # Scripts make the schedule of the plain optimizer, whose param groups are those of the sharded one.
            if any(scheduler.optimizer.param_groups[0] is group for group in optimizer.param_groups):
                break
        else:
            return super().prepare_scheduler(scheduler)
        scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]  # torch warns of a step() it did not see
        prepared = AcceleratedScheduler(
            scheduler,
            optimizer,
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        self._schedulers.append(prepared)
        return prepared

    # -- a step

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of the loss, divided by the micro-batches of a window, and scaled in fp16. Collective.

        kwargs: of `torch.Tensor.backward`. Raises UnsupportedError if several optimizers have loss scales.
        """
        loss = loss / self.gradient_accumulation_steps
        optimizers = self._sharded_optimizers()
        if len(optimizers) > 1 and any(each.scale(loss) is not loss for each in optimizers):
            raise UnsupportedError(
                "accelerator.backward(loss) with several optimizers in fp16, each of which has a loss scale of its "
                "own: call optimizer.optimizer.scale(loss).backward() of the one that this loss trains"
            )
        # No optimizer has a loss scale here, and no single model has a communicator to publish a failure by.
        if len(optimizers) != 1:
            loss.backward(**kwargs)
            return
        manager = optimizers[0].model.chunk_manager
        with manager.step.publishing():
            optimizers[0].scale(loss).backward(**kwargs)

    def clip_grad_norm_(self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2) -> Tensor:
        """Clip the next step's gradients to the global norm; see `ShardedOptimizer.clip_grad_norm_`. Collective.

        parameters: all that one optimizer trains. Returns the norm before clipping. Raises UnsupportedError for a part
        of them, and before the last micro-batch of a window.
        """
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        for optimizer in self._sharded_optimizers():
            its = {parameter for group in optimizer.param_groups for parameter in group["params"]}
            if its.isdisjoint(given):
                continue
            rest = its.symmetric_difference(given)
            # Frozen parameters have no gradients, so it does not matter whether both lists have them.
            if any(parameter.requires_grad for parameter in rest):
                raise UnsupportedError(
                    f"clip_grad_norm_() of {len(given)} parameters, and their optimizer has {len(its)}: give it all of "
                    "one optimizer, and no others, such as model.parameters()"
                )
            if not self.sync_gradients:
                raise UnsupportedError(
                    "clip_grad_norm_() before the last micro-batch of a window, whose sum is not there yet: call it "
                    "under 'if accelerator.sync_gradients:'"
                )
            return optimizer.clip_grad_norm_(max_norm, norm_type)
        # No sharded optimizer trains any of these, such as the parameters of a module that was never prepared.
        return super().clip_grad_norm_(given, max_norm, norm_type)  # type: ignore[no-any-return]

    # -- the state

    def unwrap_model(
        self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> nn.Module:
        """The module that was given to `prepare`. Its weights stay in chunks; its `state_dict()` is whole. Local.

        The other arguments are Accelerate's. Raises nothing.
        """
        unwrapped = model.module if isinstance(model, ShardedModel) else model
        return super().unwrap_model(unwrapped, keep_fp32_wrapper, keep_torch_compile)  # type: ignore[no-any-return]

    @contextmanager
    def gathered_for_generation(self, model: nn.Module) -> Iterator[nn.Module]:
        """Inside, all weights are whole on every rank, so that one rank alone may call the model, as to sample.

        Every rank enters and leaves it: collective. model: as `prepare` returned it, or as it was given. Yields the
        module that was given to `prepare`. Raises SlotError if the weights do not fit together into the model's slots.

        Example:
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(8, 1))
            >>> with accelerator.gathered_for_generation(model) as module, torch.no_grad():
            ...     if accelerator.is_main_process:
            ...         sample = module(torch.ones(1, 8))
        """
        module = model.module if isinstance(model, ShardedModel) else model
        its = next((each for each in self._sharded_models() if each.module is module), None)
        if its is None:
            yield module
            return
        with GatheredParameters(its):
            yield module

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """Whole weights on rank 0, and nothing on the others, as with Accelerate's FSDP. Collective.

        With `ProjectConfiguration(save_on_each_node=True)` they are on every rank. The arguments are Accelerate's.
        Raises GeminiError inside a forward or backward.
        """
        if not isinstance(model, ShardedModel):
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if self._saves_parts:
            # Hooks of the script's count on one entry for each model, and may take it off the list of what is written.
            # `_save_parts`, which comes last, takes off the others.
            self._in_parts.append({})
            return self._in_parts[-1]
        return model.state_dict(rank0_only=not self.project_configuration.save_on_each_node)

    def save_state(
        self, output_dir: str | os.PathLike[str] | None = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Path:
        """Save as Accelerate does, with each rank's part of weights and optimizer states. Collective.

        On return the files are there, on every rank. The arguments are Accelerate's. Raises UnsupportedError if a model
        whose optimizer was prepared was not, and would be left out, and OSError, on the other ranks RemoteRankError, if
        a file cannot be written.
        """
        models = self._sharded_models()
        if any(each.model not in models for each in self._sharded_optimizers()):
            raise UnsupportedError(
                "save_state() would write the state of an optimizer without its model: give the model to prepare() too"
            )
        if not models:
            return super().save_state(output_dir, safe_serialization, **kwargs)  # type: ignore[no-any-return]
        # Rank 0 writes most of the files. The others have to hear of it if it cannot, because they go on to the next
        # collective, of whichever model, where they would wait for rank 0.
        with ending_together(models, "the state is saved"), ExitStack() as writing:
            whole = Whole.NOWHERE if not self._saves_whole else Whole.ON_RANK_0
            if not self.project_configuration.save_on_each_node:
                for each in self._optimizers:
                    if isinstance(each, PreparedOptimizer):
                        writing.enter_context(each.showing(whole))
            self._saves_parts = not self._saves_whole
            self._save_model_state_pre_hook.move_to_end(self._saving_parts.id)
            try:
                folder: Path = super().save_state(output_dir, safe_serialization, **kwargs)
            finally:
                self._saves_parts, self._in_parts = False, []
        return folder

    def _save_parts(self, models: list[Any], weights: list[dict[str, Any]], output_dir: str) -> None:
        """Write sharded models with their optimizers, and take them off the list of what Accelerate writes."""
        if not self._saves_parts:
            return
        weights[:] = [its for its in weights if not any(its is part for part in self._in_parts)]
        for number, model in enumerate(self._sharded_models()):
            save_shards(Path(output_dir, f"gemini_{number}"), model, self._optimizer_of(model))

    def _load_parts(self, models: list[Any], input_dir: str) -> None:
        """Load what `_save_parts` has written, and take it off the list of what Accelerate reads."""
        for number, model in enumerate(self._sharded_models()):
            if load_shards(Path(input_dir, f"gemini_{number}"), model, self._optimizer_of(model)):
                models.remove(model)

    def _optimizer_of(self, model: ShardedModel) -> ShardedOptimizer | None:
        return next((each for each in self._sharded_optimizers() if each.model is model), None)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, load_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Load as Accelerate does. Every rank reads the files. Collective.

        The arguments are Accelerate's. Raises what a missing or wrong file raises, on the other ranks RemoteRankError;
        parts of the state may have been loaded then.
        """
        # Weights and optimizer states are loaded together. The other ranks have to hear of one that cannot read a
        # file of its own, also of a schedule or of the script's objects: they would go on from another state.
        with ending_together(self._sharded_models(), "the state is loaded"):
            super().load_state(input_dir, load_kwargs, **kwargs)

    def _sharded_models(self) -> list[ShardedModel]:
        return [each for each in self._models if isinstance(each, ShardedModel)]

    def _sharded_optimizers(self) -> list[ShardedOptimizer]:
        return [each.optimizer for each in self._optimizers if isinstance(each, PreparedOptimizer)]


def _is_plain(given: Any) -> bool:
    return isinstance(given, Optimizer) and not isinstance(given, (ShardedOptimizer, AcceleratedOptimizer))


def _are_several(given: Any) -> bool:
    """Whether it is a list of plain optimizers."""
    return isinstance(given, (list, tuple)) and len(given) > 0 and all(map(_is_plain, given))


def _module_of(optimizers: Sequence[Optimizer], modules: list[Any]) -> Any:
    """The module whose parameters the optimizers have. Raises UnsupportedError if there is none."""
    its = {parameter for each in optimizers for group in each.param_groups for parameter in group["params"]}
    for module in modules:
        if its.issubset(module.parameters()):
            return module
    names = " and ".join(type(each).__name__ for each in optimizers)
    raise UnsupportedError(
        f"the parameters of {names} are not all of one model that prepare() was given: make one optimizer, or one list "
        "of them, for each model, and give prepare() the model together with it, or before it"
    )
