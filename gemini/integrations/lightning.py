"""`GeminiStrategy`: Lightning's Trainer over a sharded model, with its own loops, callbacks and checkpoints.

A LightningModule stays as it is: the strategy wraps it in a `ShardedModel`, runs its steps in the model's forward, and
makes a `ShardedOptimizer` of what `configure_optimizers` returns.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch

from gemini.integrations.needed import needed

with needed("lightning"):
    import lightning.pytorch as pl
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.core.optimizer import (
    LightningOptimizer,
    _configure_optimizers,
    _configure_schedulers_automatic_opt,
    _validate_optimizers_attached,
    _validate_scheduler_api,
)
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric

from gemini.access.link import Link
from gemini.access.parameter_link import any_link_of
from gemini.building.zero_init import ZeroInitContext
from gemini.engine.config import Config, load_config
from gemini.engine.initialize import Source, say_model
from gemini.errors import ConfigError, UnsupportedError
from gemini.integrations.shared import (
    config_of_all_ranks,
    ending_together,
    load_shards,
    mixed_weights,
    refuse_made_elsewhere,
    save_shards,
    window_of,
    without_effect,
)
from gemini.launch import launched_config
from gemini.model.operators import cast_tensors
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.averages import AveragedWeights
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.settings import CASTABLE_DTYPES, Weights

# -- A user's LightningModule under the strategy: whether it is sharded already, and what it knows of its device.


def tell_device(module: nn.Module, device: torch.device) -> None:
    """Do what `module.to(device)` does beside moving parameters, each of which would be fetched for it. Local."""
    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)  # its state is neither parameter nor buffer
        elif isinstance(each, pl.LightningModule):
            each._device = device


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter is in chunks of a `ShardedModel`, and not of a model under construction."""
    return any(isinstance(any_link_of(parameter), Link) for parameter in module.parameters())


# -- `GeminiPrecision`: what `Trainer(precision=...)` means for a sharded model, and loss scaling and clipping by ours.


_DTYPES = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


class GeminiPrecision(Precision):
    """Precision of a model whose weights are sharded, and which keep fp32 masters where they have 16 bits.

    "bf16-mixed" and "16-mixed" cast at the border of each module of the LightningModule that has weights, so that its
    steps compute losses in fp32, as with Lightning's autocast. "bf16-true" and "16-true" cast the batch, and the step
    computes in 16 bits. In fp16 losses are scaled.

    Raises UnsupportedError for a precision plugin of another kind.
    """

    def __init__(self, plugin: Precision | None) -> None:
        # Every plugin is a subclass of `Precision`, so `isinstance` would accept any, such as `DoublePrecision`.
        if plugin is not None and type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
            raise UnsupportedError(
                f"{type(plugin).__name__} converts a model itself: with GeminiStrategy choose precision= "
                f"{', '.join(map(repr, _DTYPES))}"
            )
        self.precision = "32-true" if plugin is None else plugin.precision
        self._optimizers: list[Optimizer] = []

    @property
    def auto(self) -> dict[str, Any]:
        """Values for keys of DeepSpeed's that say "auto"."""
        dtype = _DTYPES[self.precision]
        return {"bf16.enabled": dtype is torch.bfloat16, "fp16.enabled": dtype is torch.float16}

    def weights(self, config: Config, module: nn.Module) -> Weights:
        """`dtype=` of `ShardedModel`. Local. Raises ConfigError if the config names another dtype."""
        dtype = _DTYPES[self.precision]
        if dtype is None or self.precision.endswith("true"):
            return mixed_weights(config, dtype, f"precision is {self.precision!r}")
        if config.dtype not in (None, dtype):
            raise ConfigError(
                f"precision is {self.precision!r}, and the config says dtype={config.dtype}: leave one of them out"
            )
        # What is in none of these modules, such as a parameter of the LightningModule itself, stays in fp32.
        by_name: dict[type[nn.Module] | str, torch.dtype | None] = dict.fromkeys(_borders(module), dtype)
        return by_name | {"*": torch.float32}

    def cast(self, data: Any) -> Any:
        """Cast a batch to 16 bits if the step computes in them outside the model's forward. Local. Raises nothing."""
        dtype = _DTYPES[self.precision] if self.precision.endswith("true") else None
        return data if dtype is None else cast_tensors(data, CASTABLE_DTYPES, dtype)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Lightning shows the optimizers. Local. Raises nothing."""
        self._optimizers = optimizers
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss in fp16. Local. Raises what the module's hooks raise."""
        # At most one of them is sharded, so the loss is scaled once. Like Lightning's `MixedPrecision`, scale before
        # `super()` runs the hooks: `on_before_backward` sees the loss that backward gets.
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                tensor = optimizer.scale(tensor)
        return super().pre_backward(tensor, module)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the exact norm over all ranks. Collective. Raises what `ShardedOptimizer.clip_grad_norm_` raises."""
        plain_optimizer = plain_of(optimizer)
        if isinstance(plain_optimizer, ShardedOptimizer):
            plain_optimizer.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)


def plain_of(optimizer: Any) -> Any:
    """The optimizer that Lightning's wrapper is around, whose class pretends to be that of the optimizer."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _borders(module: nn.Module, above: str = "") -> list[str]:
    """Names of the modules with weights that the steps of `module` call: lists and dicts are looked into."""
    found = []
    for name, child in module.named_children():
        # These have no forward of their own, so casts around them would never run.
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _borders(child, f"{above}{name}.")
        elif next(child.parameters(), None) is not None:
            found.append(f"{above}{name}")
    return found


_TIMEOUT = timedelta(minutes=30)
_REST = "lightning.ckpt"  # beside the parts: all else that Lightning saves
_IN_PARTS = "gemini_parts"  # the key of a checkpoint whose weights and states are in parts


class GeminiStrategy(DDPStrategy):
    """Trains a LightningModule sharded, under budgets: `Trainer(strategy=GeminiStrategy(stage=3, device_memory=...))`.

    Args:
        config: a config, or the path of one, of any dialect that `gemini.initialize` reads. None: `fields`, or what
            `gemini.launch_from_torch(config=...)` was given, else all defaults.
        accelerator: as of Lightning's `DDPStrategy`, like the next four.
        parallel_devices: the devices of this machine's ranks.
        cluster_environment: who starts the ranks.
        checkpoint_io: how checkpoints are written and read.
        process_group_backend: "nccl", "gloo". None: by device.
        timeout: of the process group.
        state_dict_type: "full": a checkpoint is one file as Lightning writes it, which `load_from_checkpoint` reads;
            rank 0 gathers what is in it. "sharded": it is a folder in which each rank writes its part, for any number
            of ranks to go on from; `gemini checkpoint export` makes whole weights of it.
        fields: fields of the config, in place of `config`.

    Local. Raises ConfigError for a config that is not valid, or that has an optimizer or a scheduler, which the
    LightningModule makes.

    Example:
        >>> strategy = GeminiStrategy(stage=3, device_memory="1GiB")
        >>> trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, logger=False, barebones=True)
    """

    def __init__(
        self,
        config: Source = None,
        *,
        accelerator: Accelerator | None = None,
        parallel_devices: list[Any] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _TIMEOUT,
        state_dict_type: Literal["full", "sharded"] = "full",
        **fields: Any,
    ) -> None:
        if state_dict_type not in ("full", "sharded"):
            raise ConfigError(f"state_dict_type must be 'full' or 'sharded', found {state_dict_type!r}")
        self._saves_parts = state_dict_type == "sharded"
        if config is not None and fields:
            raise ConfigError(f"GeminiStrategy takes a config or its fields, found both: {', '.join(fields)}")
        self._precision = GeminiPrecision(None)
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        # There is no process group yet, so ranks agree on the config in `_wrap`, where what says "auto" is known too.
        # The config is also read here so that a mistake is told before the Trainer starts.
        self._source = fields or (launched_config() if config is None else config)
        self.config = load_config(self._source)
        """What to shard and where, with defaults in place of what the config does not say."""
        refuse_made_elsewhere(self.config, "with Lightning configure_optimizers() makes it")
        self._sharded: ShardedModel | None = None
        self._fitted: ShardedOptimizer | None = None  # of the last fit

    @property
    def ema(self) -> AveragedWeights | None:
        """The averages of the weights of the last fit, see `ShardedOptimizer.ema`; None without the field `ema`."""
        return None if self._fitted is None or self._fitted.is_closed else self._fitted.ema

    # -- precision

    def __repr__(self) -> str:
        # Fabric refuses every strategy of the Trainer's, and shows this text.
        return (
            "GeminiStrategy, which is for lightning.pytorch.Trainer. A script for Fabric leaves strategy= out and "
            "takes gemini.ShardedModel and gemini.ShardedOptimizer, or gemini.initialize(), in place of fabric.setup()"
        )

    @property
    def precision_plugin(self) -> Precision:
        """A `GeminiPrecision`, made of what the Trainer chose. Raises UnsupportedError for other kinds."""
        return self._precision

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision = GeminiPrecision(plugin)

    # -- set up

    def setup_distributed(self) -> None:
        """Set up the process group as for DDP; one rank needs none. Collective. Raises what torch raises."""
        if self.num_nodes * self.num_processes > 1:
            super().setup_distributed()
        else:
            # `super()` does this too. It sets `rank_zero_only.rank`, by which Lightning knows the rank that logs.
            self.set_world_ranks()

    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """A context for `configure_model`: what it builds is never whole on any rank. See `ZeroInitContext`."""
        with ZeroInitContext(self.root_device):
            yield

    def setup(self, trainer: Any) -> None:
        """Wrap the LightningModule, and its optimizer when it is to be fitted. Collective.

        Raises UnsupportedError for what cannot be sharded, before the module is touched, and what `ShardedModel` and
        `ShardedOptimizer` raise.
        """
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module, fits = self.lightning_module, trainer.state.fn == TrainerFn.FITTING
        assert module is not None
        # `DDPStrategy.setup` would convert the layers and its `teardown` convert them back. Ours replace both, so the
        # conversion would silently not happen.
        if self._layer_sync is not None:
            raise UnsupportedError(
                "Trainer(sync_batchnorm=True) with GeminiStrategy: call "
                "torch.nn.SyncBatchNorm.convert_sync_batchnorm(module) yourself, before the module is fitted"
            )
        if module._compiler_ctx is not None:
            raise UnsupportedError("a compiled LightningModule with GeminiStrategy: compile modules in it instead")
        if fits:
            self._refuse_foreign_fit(module)
            window = window_of(self.config, self.num_nodes * self.num_processes)
            if window not in (None, trainer.accumulate_grad_batches):
                raise ConfigError(
                    f"Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), and by the config {window} "
                    "micro-batches make a step: leave gradient_accumulation_steps and batch sizes out of the config"
                )
            # Optimizers come before the wrap, so that what cannot be sharded is refused while the module is plain.
            self.setup_optimizers(trainer)
            _check_optimizers(self.optimizers, module)
        self.model = self._wrap(module, trainer.accumulate_grad_batches if fits else None)
        tell_device(module, self.root_device)
        if fits:
            self.optimizers = [self._shard([plain_of(each) for each in self.optimizers])]
        # The precision plugin scales losses by the optimizers that it is shown here, so they must be sharded by now.
        self.setup_precision_plugin()
        self.barrier()

    def setup_optimizers(self, trainer: Any) -> None:
        """Call `configure_optimizers`, which may return several optimizers for one step of all. Collective.

        Raises what Lightning raises for what it returns.
        """
        module = self.lightning_module
        assert module is not None
        made = call._call_lightning_module_hook(trainer, "configure_optimizers", pl_module=module)
        optimizers, schedules, monitor = ([], [], None) if made is None else _configure_optimizers(made)
        if not module.automatic_optimization or len(optimizers) < 2:
            with _returning(module, "configure_optimizers", made):  # it is called once, as by any strategy
                super().setup_optimizers(trainer)
            return
        # Lightning refuses several optimizers, because it would not know when to step which. Here they step together.
        configs = _configure_schedulers_automatic_opt(schedules, monitor)
        _validate_optimizers_attached(optimizers, configs)
        _validate_scheduler_api(configs, module)
        self.optimizers, self.lr_scheduler_configs = optimizers, configs

    def _refuse_foreign_fit(self, module: nn.Module) -> None:
        """Of a module that another Trainer has sharded, the `ShardedModel` is not at hand."""
        known = self._sharded if self._sharded is not None and self._sharded.module is module else None
        if is_sharded(module) and known is None:
            raise UnsupportedError(
                "this LightningModule has been sharded by another Trainer: make a new one, load_state_dict() of this "
                "one's state_dict(), or continue with trainer.fit(new_module, ckpt_path=...)"
            )

    def _wrap(self, module: Any, window: int | None) -> nn.Module:
        """The `ShardedModel` of `module`; the module itself if another Trainer has sharded it, for evaluation.

        window: micro-batches of a step, as far as the Trainer knows. A callback may change the number in a later epoch.
        """
        if self._sharded is not None and self._sharded.module is module:
            return self._sharded
        if is_sharded(module):
            return module  # type: ignore[no-any-return]
        config = config_of_all_ranks(self._source, self._precision.auto)
        weights = self._precision.weights(config, module)
        device = self.root_device if config.device is None else config.device
        settings = config.settings()
        # With several micro-batches 16-bit gradients have fp32 sums, for which the plan has room only if it knows.
        if window is not None:
            settings = replace(settings, gradient_accumulation_steps=window)
        self._sharded = ShardedModel(module, settings=settings, device=device, dtype=weights)
        say_model(self._sharded, without_effect(config))
        return self._sharded

    def _shard(self, given: list[Any]) -> Optimizer:
        """One optimizer of all that were given."""
        first: Optimizer = given[0]
        # Lightning's stand-in for a module without an optimizer has no param groups.
        if self._sharded is None or isinstance(first, ShardedOptimizer) or not any(its.param_groups for its in given):
            return first
        # A model has one optimizer at a time. `Tuner.lr_find()` has fitted it before, with an optimizer of its own.
        if self._fitted is not None:
            self._fitted.close()
        for each in self.lr_scheduler_configs:
            # The schedule watches `step()` of the plain optimizer, which nobody calls: torch would warn of it.
            each.scheduler.optimizer._opt_called = True  # type: ignore[attr-defined]
        plain = given if len(given) > 1 else first
        self._fitted = ShardedOptimizer(self._sharded, plain, **self.config.optimizer_options())
        return self._fitted

    def teardown(self) -> None:
        """The model stays sharded: it can be called, evaluated and saved. Local. Raises nothing of its own."""
        # Lightning's own would also move the module and the optimizers' states to the CPU, out of their chunks.
        assert self.accelerator is not None and self.cluster_environment is not None
        self.cluster_environment.teardown()
        self._precision.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- a step

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in the model's forward, or by itself where it calls backward and step. Collective.

        Raises what it raises.
        """
        module = self.lightning_module
        assert module is not None
        with self._precision.train_step_context():
            if not module.automatic_optimization:
                # The module calls `optimizer.step()`, which is refused inside the model's forward. Outside of the
                # forward the root's casts do not run, so the batch is cast here.
                args, kwargs = self._precision.cast((args, kwargs))
                return module.training_step(*args, **kwargs)
            return self._in_forward("training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in the model's forward. Collective. Raises what it raises."""
        with self._precision.val_step_context():
            return self._in_forward("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in the model's forward. Collective. Raises what it raises."""
        with self._precision.test_step_context():
            return self._in_forward("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step in the model's forward. Collective. Raises what it raises."""
        with self._precision.predict_step_context():
            return self._in_forward("predict_step", *args, **kwargs)

    def _in_forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Hooks of the root begin and end a forward: the step takes the place of `forward` for this one call."""
        module, model = self.lightning_module, self.model
        assert module is not None and model is not None
        # A user may have set `forward` on the instance; otherwise the class's one is visible again after the removal.
        own = vars(module).get("forward")

        def restore() -> None:
            vars(module).pop("forward", None)
            if own is not None:
                module.forward = own  # type: ignore[method-assign]

        def step(*args: Any, **kwargs: Any) -> Any:
            restore()  # the step itself may call the module
            return getattr(module, name)(*args, **kwargs)

        module.forward = step  # type: ignore[method-assign]
        # An exception before the step begins must not leave the step in the place of `forward`.
        try:
            return model(*args, **kwargs)
        finally:
            restore()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do nothing: every micro-batch is reduced, since sums of whole gradients take 4 bytes a parameter and rank."""
        yield

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: weights go where they are sharded."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights on rank 0, which writes them, and nothing on the others. Collective.

        Raises GeminiError inside a forward or backward.
        """
        assert self.lightning_module is not None
        if self._writes_parts:
            return {}
        # A module that overrides `state_dict` decides itself what is saved.
        own = type(self.lightning_module).state_dict is not nn.Module.state_dict
        if isinstance(self.model, ShardedModel) and not own:
            return self.model.state_dict(rank0_only=True)
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The whole state on rank 0, and nothing on the others. Collective. Raises as `ShardedOptimizer.state_dict`."""
        plain = plain_of(optimizer)
        if self._writes_parts and isinstance(plain, ShardedOptimizer):
            return {}
        return plain.state_dict(rank0_only=True) if isinstance(plain, ShardedOptimizer) else plain.state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Every rank gives the whole state. Collective. Raises what the optimizer raises."""
        # Lightning's own method moves all states to the device afterwards, which would undo where the plan put them.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            if state:  # else `load_checkpoint` has loaded it
                optimizer.load_state_dict(state)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Every rank gives whole weights. Collective. Raises what the module raises."""
        if _IN_PARTS not in checkpoint:  # else `load_checkpoint` has loaded them
            super().load_model_state_dict(checkpoint, strict)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Rank 0 writes, or each rank its part; then all is there on all ranks. Collective.

        Raises as `load_checkpoint` does.
        """
        folder, parts = Path(filepath), self._sharded if self._writes_parts else None
        with ending_together(self._models, "the checkpoint is saved"):
            if parts is None:
                super().save_checkpoint(checkpoint, filepath, storage_options)
            elif self.is_global_zero:
                folder.mkdir(parents=True, exist_ok=True)
                # Beside, and renamed: the file of a checkpoint that is overwritten stays whole.
                super().save_checkpoint({**checkpoint, _IN_PARTS: True}, folder / f"{_REST}.new", storage_options)
                (folder / f"{_REST}.new").replace(folder / _REST)
        if parts is not None:
            save_shards(folder, parts, self._fitted)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Every rank reads the file, or its part. Collective. Raises what reading raises, or RemoteRankError."""
        path, is_folder = Path(checkpoint_path), Path(checkpoint_path).is_dir()
        # All have read it before one loads it: a module's `load_state_dict` takes what it hears of other ranks for
        # errors of single parameters, and goes on with the next one.
        with ending_together(self._models, "the checkpoint is read"):
            file = path / _REST if is_folder else checkpoint_path
            checkpoint: dict[str, Any] = super().load_checkpoint(file, weights_only)
        if _IN_PARTS in checkpoint:
            if self._sharded is None:
                raise UnsupportedError(f"{path} has weights in parts, and the model is not sharded yet: fit or test it")
            is_fit = self.lightning_module is not None and self.lightning_module.trainer.state.fn == TrainerFn.FITTING
            load_shards(path, self._sharded, self._fitted if is_fit else None)
        return checkpoint

    @property
    def _writes_parts(self) -> bool:
        return self._saves_parts and self._sharded is not None

    @property
    def _models(self) -> list[ShardedModel]:
        return [] if self._sharded is None else [self._sharded]


# -- `ShardedWeightAveraging`: evaluation with the averages of the weights, and their place in checkpoints.


class ShardedWeightAveraging(pl.Callback):
    """Evaluates with the averages of the weights, and saves them: `Trainer(callbacks=[ShardedWeightAveraging()])`.

    The averages are those of the strategy: `GeminiStrategy(ema=0.999)`. Before the first averaging, and in `validate`,
    `test` and `predict` with a `ckpt_path`, whose weights are asked for, the weights are evaluated.

    Args:
        evaluates: validation, also inside `fit`, test and prediction have the averages in the place of the weights.
        saves: a checkpoint of one file has the averages as "ema_state_dict", in the names of "state_dict". One in parts
            has them in any case: `gemini checkpoint export --ema` makes whole weights of it.

    Local. `fit` raises UnsupportedError without averages, and with another strategy.

    Example:
        >>> strategy = GeminiStrategy(ema=0.999)
        >>> trainer = pl.Trainer(strategy=strategy, callbacks=[ShardedWeightAveraging()], barebones=False)
    """

    def __init__(self, *, evaluates: bool = True, saves: bool = True) -> None:
        self._evaluates = evaluates
        self._saves = saves
        self._inside: AbstractContextManager[None] | None = None

    def on_fit_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """Raises UnsupportedError where there are no averages. Local."""
        if not isinstance(trainer.strategy, GeminiStrategy):
            raise UnsupportedError("ShardedWeightAveraging is for Trainer(strategy=GeminiStrategy(ema=0.999))")
        if trainer.strategy.ema is None:
            raise UnsupportedError("ShardedWeightAveraging without averages: give GeminiStrategy(ema=0.999)")

    def on_validation_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """The averages come into the place of the weights. Collective."""
        self._enter(trainer)

    def on_validation_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """The weights come back, before a `ModelCheckpoint` saves. Collective."""
        self._leave()

    def on_test_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """See `on_validation_start`."""
        self._enter(trainer)

    def on_test_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """See `on_validation_end`."""
        self._leave()

    def on_predict_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """See `on_validation_start`."""
        self._enter(trainer)

    def on_predict_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        """See `on_validation_end`."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The weights come back, also after Ctrl-C. Collective."""
        self._leave()

    def on_save_checkpoint(self, trainer: Any, pl_module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put whole averages into the checkpoint on rank 0, which writes it. Collective."""
        ema = _ema_of(trainer)
        if self._saves and ema is not None and checkpoint.get("optimizer_states"):
            with ema.weights():
                averages = trainer.strategy.lightning_module_state_dict()
            if averages:
                checkpoint["ema_state_dict"] = averages

    def _enter(self, trainer: Any) -> None:
        ema = _ema_of(trainer)
        if not self._evaluates or ema is None:
            return
        if trainer.state.fn != TrainerFn.FITTING and trainer.ckpt_path is not None:
            return
        self._inside = ema.weights()
        self._inside.__enter__()

    def _leave(self) -> None:
        inside, self._inside = self._inside, None
        if inside is not None:
            inside.__exit__(None, None, None)


def _ema_of(trainer: Any) -> AveragedWeights | None:
    """The averages, if there are any by now."""
    ema = trainer.strategy.ema if isinstance(trainer.strategy, GeminiStrategy) else None
    return None if ema is None or ema.num_averaged == 0 else ema


# Whoever has imported this module may write `Trainer(strategy="gemini")`, and a config of Lightning's command line too.
StrategyRegistry.register("gemini", GeminiStrategy, description="ZeRO in chunks, under memory budgets", override=True)


@contextmanager
def _returning(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    """Inside, the module's method of this name returns `value`."""
    own = vars(module).get(name)
    setattr(module, name, lambda: value)
    try:
        yield
    finally:
        delattr(module, name)
        if own is not None:
            setattr(module, name, own)


def _check_optimizers(optimizers: list[Any], module: pl.LightningModule) -> None:
    sharding = [plain for plain in map(plain_of, optimizers) if plain.param_groups]
    if len(sharding) > 1 and not module.automatic_optimization:
        raise UnsupportedError(
            f"configure_optimizers() returns {len(sharding)} optimizers with automatic_optimization=False, and a "
            "sharded model has one step: leave automatic_optimization True, and they step together, with one norm and "
            "one clip; or return one optimizer with several param groups"
        )
    already = [each for each in sharding if isinstance(each, ShardedOptimizer)]
    if len(sharding) > 1 and already:
        raise UnsupportedError(
            "configure_optimizers() returns a ShardedOptimizer beside others: return the plain optimizers, which the "
            "strategy makes one of"
        )
