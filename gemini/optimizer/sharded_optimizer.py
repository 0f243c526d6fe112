"""`ShardedOptimizer`, the states that it shows, and what it refuses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemini.access.link import link_of
from gemini.errors import GeminiError, UnsupportedError, of_closed_optimizer
from gemini.memory.modes import methods_never_traced
from gemini.model.operators import original_of
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.averages import AVERAGE, AveragedWeights, Averages, Ema, checked_ema
from gemini.optimizer.chunk_states import ChunkStates, making_optimizer, take_states
from gemini.optimizer.given import ShownGroups, drop_states, refuse_taken, take_over
from gemini.optimizer.several import (
    WHOSE,
    SeveralUpdates,
    label_groups,
    names_of,
    refuse_shared_parameters,
    resolve_rules,
)
from gemini.optimizer.state_dict import (
    check_optimizer_state,
    load_optimizer_state,
    loads_with_hooks,
    saves_with_hooks,
    whole_optimizer_state,
)
from gemini.optimizer.state_view import StateView
from gemini.optimizer.step import (
    ChunkOptimizer,
    LossScale,
    OptimizerStep,
    ParamGroups,
    Scaling,
    StepReport,
    agreed_groups,
    frozen_among,
)
from gemini.optimizer.update import SCALES_LOSSES
from gemini.optimizer.whole_updates import UPDATES_WHOLE
from gemini.placement.policies import MARGIN
from gemini.ranks.parts import local_of
from gemini.runtime.grads import Becomes
from gemini.settings import Settings
from optim import prepare
from optim.adam import ON_DISK, refuse_unknown_arguments

# -- Checks of the arguments of `ShardedOptimizer` and of its clipping, before anything has changed.


def checked_model(model: nn.Module) -> ShardedModel:
    """The sharded model: `model` itself, or the one inside `torch.compile(model)`. Raises TypeError for others."""
    if not isinstance(model := original_of(model), ShardedModel):
        raise TypeError(f"model must be a ShardedModel, found {type(model).__name__}")
    return model


def check_inner(optimizer: torch.optim.Optimizer, sharded: type[torch.optim.Optimizer], model: ShardedModel) -> None:
    """Check that `optimizer` is a plain torch optimizer that has not stepped, and is the model's first.

    sharded: the type that is not plain. Raises TypeError or UnsupportedError.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, sharded):
        raise TypeError(f"optimizer must be a plain torch optimizer, found {type(optimizer).__name__}")
    model.chunk_manager.refuse_second()
    refuse_taken(optimizer)
    # State of a stepped optimizer would be lost. Adagrad has state with step 0 from the start. An entry without a step
    # count, such as that of SGD with momentum, comes from a step.
    if any(int(entry.get("step", 1)) for entry in optimizer.state.values()):
        raise UnsupportedError("the optimizer has stepped before: make a new one for the sharded model")


def as_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    """One optimizer, or several of one model, as a list. Raises ValueError for an empty one."""
    if not isinstance(optimizer, (list, tuple)):
        return [optimizer]
    if not optimizer:
        raise ValueError("optimizer=[] is no optimizer: give one, or a list of those of the model's parts")
    return list(optimizer)


def settings_with(optimizers: Sequence[torch.optim.Optimizer], margin: float | None, model: ShardedModel) -> Settings:
    """The model's settings with those that come with the optimizers. Local.

    margin: `gpu_margin_mem_ratio`. A HybridAdam may ask for more on the disk than the model has there so far. Raises
    ValueError if the model has its disk in another folder, or does not use `margin`.
    """
    settings = model.settings
    if margin is not None:
        settings = replace(settings, gpu_margin_mem_ratio=margin)
    for optimizer in optimizers:
        fraction, folder = (getattr(optimizer, name, None) for name in ON_DISK)
        if folder is not None and fraction and fraction > settings.disk_fraction:
            settings = _with_disk(settings, fraction, folder)
    return settings


def _with_disk(settings: Settings, fraction: float, folder: Any) -> Settings:
    """Settings with more on the disk than they have there. Raises ValueError for another folder than theirs."""
    has = settings.disk_fraction
    if settings.disk_path is None:
        return replace(settings, disk_path=folder, disk_optim_frac=fraction)
    if Path(settings.disk_path).resolve() != Path(folder).resolve():
        raise ValueError(
            f"nvme_offload_fraction={fraction:g} asks for more on the disk than the model has there, {has:g}, and "
            f"nvme_offload_dir={str(folder)!r} is not the model's folder, {str(settings.disk_path)!r}: name that one, "
            f"or give ShardedModel disk_optim_frac={fraction:g} and leave both out"
        )
    return replace(settings, disk_optim_frac=fraction)


def check_max_norm(name: str, value: float | None) -> float | None:
    """`value` as a float, None for None. Raises ValueError for anything that is not above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be a number above 0 or None, found {value!r}")
    return float(value)


def refuse_clipping(model: ShardedModel, what: str) -> None:
    """Raises ValueError for `what`, which clips every step, where the model's backwards update weights. Local."""
    if model.settings.frees_gradients(model.world_size):
        raise ValueError(
            f"{what} needs all gradients before the first update, and the model's update_in_backward=True updates "
            "while they come: leave one of the two out"
        )


def check_clipping(max_norm: float, norm_type: float) -> float:
    """`max_norm` as a float. Raises ValueError for one that is not above 0, and for a norm other than 2 or inf."""
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, found {norm_type!r}")
    checked = check_max_norm("max_norm", max_norm)
    if checked is None:
        raise ValueError("max_norm must be a number, found None")
    return checked


def embeddings_of(model: ShardedModel) -> frozenset[int]:
    """Indices of the parameters that are the weight of an embedding, also where another module shares them. Local."""
    tables = (module for module in model.module.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
    links = (link_of(table.weight) for table in tables)
    return frozenset(link.managed.index for link in links if link is not None)


_ADD_ALIKE = "All ranks must add the same param group at the same step"


# -- `ShardedOptimizer`: a torch optimizer over a `ShardedModel`'s chunks.
#
# It is what users call. A step is in step.py: one all-reduce summarises all gradients (norm, non-finite
# elements, which parameters have one), then each chunk is updated where its state rests, in order of first use.


@methods_never_traced("gradients and states move in it", "backward", "scale", "clip_grad_norm_", "step", "zero_grad")
class ShardedOptimizer(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that updates a `ShardedModel` chunk by chunk, where each chunk's state rests.

    It wraps an ordinary optimizer, which defines the update. Learning rate schedulers act on its `param_groups`.
    With trainable fp16 weights it scales losses dynamically: call `backward(loss)` or `scale(loss).backward()` then.
    Without them `loss.backward()` is the same. Collective: every rank creates, steps, saves and loads it alike.

    Args:
        model: the `ShardedModel` whose parameters `optimizer` was made with, or `torch.compile` of it.
        optimizer: `HybridAdam(model.parameters(), ...)`, a torch optimizer that works element by element, or one that
            treats each tensor by itself, such as `torch.optim.Muon` (see `per_tensor`). Or a list of such optimizers,
            each of a part of the model's parameters: they are one optimizer then, with one norm, clip, loss scale and
            step, and each of `param_groups` says by its "optimizer" whose it is. Their `param_groups` and hooks become
            this optimizer's, and their methods then act on this one. A HybridAdam with `nvme_offload_fraction` gives
            the model its disk, as `disk_path` and `disk_optim_frac` of `Settings` do.
        initial_scale: the loss scale of the first step.
        min_scale: the loss scale never falls below it.
        growth_factor: factor of the loss scale after `growth_interval` steps without a non-finite gradient.
        backoff_factor: factor of the loss scale after a skipped step.
        growth_interval: number of good steps in a row after which the loss scale grows.
        hysteresis: number of skipped steps with which the loss scale begins to fall.
        max_scale: the loss scale never rises above it.
        clip_grad_norm: every step clips gradients to this global L2 norm over all ranks. None: no clipping.
        elementwise: True accepts an optimizer that is not on the tested list. It must update every element alike and
            independently of all others, or the result depends on how parameters are cut into chunks.
        gpu_margin_mem_ratio: with the policy "auto", the fraction that masters and optimizer state may take of what
            parameters, gradients and slots leave of the device's budget. None: as in the model's settings.
        ema: the decay of an exponential moving average of the weights, such as 0.999, or an `Ema` with more settings;
            None: there is none. See `optimizer.ema`. It takes as much memory as the masters, 4 bytes a parameter over
            all ranks, and rests where the moments do.

    Raises TypeError or ValueError for arguments that are not valid, UnsupportedError for an optimizer that is not known
    to treat each element or each tensor by itself, has stepped before, or is the model's second, and BudgetError if its
    state does not fit.

    Example:
        >>> optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3), clip_grad_norm=1.0)
        >>> optimizer.backward(model(torch.ones(2, 8, device=current_device())).sum())
        >>> optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        initial_scale: float = 2.0**16,
        min_scale: float = 1.0,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 1000,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        clip_grad_norm: float | None = None,
        elementwise: bool = False,
        gpu_margin_mem_ratio: float | None = None,
        ema: float | Ema | None = None,
        **unknown: Any,
    ) -> None:
        self.model = model = checked_model(model)
        self._manager = manager = model.chunk_manager
        with making_optimizer(manager.step):
            valid = [name for name in inspect.signature(ShardedOptimizer).parameters if name != "unknown"]
            refuse_unknown_arguments("ShardedOptimizer", unknown, valid)
            optimizers = as_optimizers(optimizer)
            for each in optimizers:
                check_inner(each, ShardedOptimizer, model)
            scale = LossScale(
                initial_scale, min_scale, growth_factor, backoff_factor, growth_interval, hysteresis, max_scale
            )
            frees_gradients = model.settings.frees_gradients(manager.communicator.world_size)
            if frees_gradients and any(c.trainable and c.dtype is torch.float16 for c in manager.chunks):
                raise UnsupportedError(SCALES_LOSSES)
            settings = settings_with(optimizers, gpu_margin_mem_ratio, model)
            update = resolve_rules(optimizers, elementwise)
            if frees_gradients and isinstance(update, SeveralUpdates) and update.steps_whole:
                raise UnsupportedError(UPDATES_WHOLE)
            ema = checked_ema(ema)
            max_norm = check_max_norm("clip_grad_norm", clip_grad_norm)
            if max_norm is not None:
                refuse_clipping(model, f"clip_grad_norm={max_norm:g}")
            # Not the folder: ranks may have folders of other names.
            words = f"{MARGIN}={settings.gpu_margin_mem_ratio}", f"{ON_DISK[0]}={settings.disk_fraction:g}"
            names = names_of(optimizers)
            groups = [group for each in optimizers for group in each.param_groups]
            for group in groups:  # an optimizer from before the wrap may have `DTensor`s
                for place, parameter in enumerate(group["params"]):
                    group["params"][place] = local_of(parameter)
            refuse_shared_parameters(names, optimizers)
            what = words if ema is None else (*words, f"{ema}")
            group_of = agreed_groups(manager.step, " + ".join(names), groups, what)
            model.trainability.change_settings(settings, ", ".join(words))
            for each in optimizers:
                drop_states(each)
            # Several have no defaults in common: a group that is added says whose it is, and has those of that one.
            self._defaults_of = {name: each.defaults for name, each in zip(names, optimizers, strict=True)}
            label_groups(names, optimizers)
            self.shown_groups = ShownGroups()
            super().__init__(groups, {} if len(optimizers) > 1 else optimizers[0].defaults)
            # What is in force, until a step has seen what the script makes of the groups that are shown.
            in_force = [*self.param_groups]
            self._averages = None if ema is None else Averages(ema)
            its = update, in_force, group_of, self._averages, embeddings_of(model)
            self._chunk_states = ChunkStates(manager.params, *its)
            self._state_view = StateView(model, self._chunk_states)
            self._scaling = Scaling(manager.grads, self._chunk_states, scale)
            prepare(manager.memory.device.device)
            take_states(model, self._chunk_states)
            # What the next step will apply.
            self._next = ChunkOptimizer(manager.grads, self._chunk_states, self._scaling, " + ".join(names))
            self._groups = ParamGroups(model, self._chunk_states, self.shown_groups, in_force)
            how = self._chunk_states, update, in_force, self._scaling, self._next, max_norm, self._groups
            self._optimizer_step = OptimizerStep(model, *how)
            self._ema = None
            if self._averages is not None:
                self._ema = AveragedWeights(self._averages, self._optimizer_step.exchange_averages)
            manager.attach(self._next)
            for each in optimizers:
                take_over(each, self, is_one_of=len(optimizers))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The param groups, as in torch: edits count from the next step on, on all ranks alike."""
        return self.shown_groups.groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.shown_groups.show(groups)

    @property
    def state(self) -> Any:
        """The states by parameter, as in torch. Reading a tensor is collective; edits are, and count."""
        return self._state_view

    @state.setter
    def state(self, states: Mapping[Any, Any]) -> None:
        # torch's constructor sets an empty one.
        if hasattr(self, "_state_view"):
            self._state_view.replace(states)

    @property
    def is_closed(self) -> bool:
        """Whether `close()` was called, so that the model is another optimizer's or nobody's."""
        return self._manager.optimizer is not self._next

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """`scale(loss).backward()`, for a loss of one element. Collective.

        retain_graph: whether another backward of the same graph follows, as for `torch.Tensor.backward`.

        Raises what backward raises; the other ranks then raise RemoteRankError.
        """
        with self._manager.step.publishing():
            try:
                self.scale(loss).backward(retain_graph=retain_graph)
            except RuntimeError as error:
                cause = self._manager.communicator.cause_of(error)
                if cause is None:
                    raise
                raise cause from error

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, in fp32, for loops that call `backward()` themselves. Local.

        Without loss scaling it is `loss` itself. Use it as in `accelerator.backward(optimizer.scale(loss))`. Raises
        nothing of its own.
        """
        self._refuse_closed("backward() or scale()")
        return self._scaling.of(loss)

    @property
    def loss_scale(self) -> float:
        """The factor by which `backward()` multiplies the loss now; 1 without loss scaling."""
        return self._scaling.value

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of the last gradients that were stepped or clipped, before clipping, 0-dim; None before that."""
        return self._optimizer_step.grad_norm

    @property
    def ema(self) -> AveragedWeights | None:
        """The exponential moving average of the weights; None without the argument `ema`."""
        return self._ema

    @property
    def last_step(self) -> StepReport | None:
        """The outcome of the last step; None before the first one."""
        return self._optimizer_step.last

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the next step's gradients, all groups together, to `max_norm`. Collective.

        Args:
            max_norm: the largest norm, above 0.
            norm_type: 2 or inf. The 2-norm is exact: it does not depend on chunks, ranks or the order of sums.

        Returns the norm before clipping, a 0-dim tensor; 0 if there is no gradient. With `update_in_backward` only the
        2-norm can be asked for, with `max_norm=math.inf`. Raises ValueError for other arguments, and GeminiError inside
        a forward or backward.
        """
        checked = check_clipping(max_norm, norm_type)
        self._check_between_steps("clip_grad_norm_()")
        self.refuse_exchanged("clip_grad_norm_()")
        return self._optimizer_step.request_clip(checked, norm_type)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights of all param groups with the gradients since the last step. Collective.

        Gradients are None afterwards, except for those of parameters in no group. If any rank has a non-finite
        gradient, no rank changes anything, the gradients are dropped with a warning, and `last_step.skipped` names the
        first such parameter. Without any gradient only `last_step` changes. A `closure` is called first, with gradients
        enabled, and its result is returned.

        Raises GeminiError inside a forward or backward, after a backward that followed `clip_grad_norm_()`, if the
        ranks' hyperparameters differ, or if parameters were added or replaced; nothing has changed then. Raises
        GeminiError, too, after many steps that were skipped in a row, the last ones at the least loss scale.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_between_steps("step()")
        if self._averages is not None:
            self._averages.refuse_exchanged("optimizer.step()")
        self._next.before_step()
        self.model.check_parameters()
        with self._manager.step.publishing():
            self._manager.background.raise_failure()
            self._optimizer_step.run()
            self._manager.step.end_update()
        # This comes after `publishing()`: the step is over on every rank, and each raises by itself.
        self._scaling.refuse_endless_skips(self.last_step)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the gradients of all param groups. Local, alike on every rank. After a step there are none.

        set_to_none: False sets gradients to zero instead, also those that a step has used since they were last None.
            A step then moves parameters without a new gradient by their moments.

        Raises UpdatedInBackwardError if the backward has updated weights (`update_in_backward`) and no step has
        followed, and GeminiError if that backward has failed.
        """
        self._refuse_closed("zero_grad()")
        self._manager.grads.refuse_discard()
        with self._manager.step.publishing():
            self._manager.grads.end_step(Becomes.of(set_to_none), self._groups.ungrouped())
            self._next.reset_clipping()

    def refuse_exchanged(self, what: str) -> None:
        """Raises GeminiError inside `optimizer.ema.weights()`. what: is called. Local."""
        if self._averages is not None:
            self._averages.refuse_exchanged(what)

    def _refuse_closed(self, what: str) -> None:
        if self.is_closed:
            raise of_closed_optimizer(what)

    def _check_between_steps(self, what: str) -> None:
        self._refuse_closed(what)
        self._manager.step.check_idle(what, after_updates=True)
        if self._manager.is_in_use:
            raise GeminiError(f"{what} inside GatheredParameters(...) is not possible: leave it first")

    @saves_with_hooks
    def state_dict(self, *, rank0_only: bool = False) -> dict[str, Any]:
        """The state in torch.optim's format, whole, in host memory. Collective.

        Beside "state" and "param_groups" it has "masters", the fp32 weights by parameter number, and "loss_scale". With
        `ema` the entries of "state" have an "ema", and "ema" at the top has the numbers of steps and averagings, and
        the averages of parameters without an entry: by their number, or by name if they are in no param group.

        Args:
            rank0_only: True leaves the dict empty on all ranks but rank 0, and saves their host memory.

        Raises GeminiError inside a forward or backward.
        """
        self._refuse_closed("state_dict()")
        self.refuse_exchanged("optimizer.state_dict()")
        with self._manager.step.publishing():
            state = whole_optimizer_state(self.model, self._chunk_states, self.param_groups, rank0_only)
        if state and self._scaling.active is not None:
            state["loss_scale"] = self._scaling.active.state_dict()
        return state

    @loads_with_hooks
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set all state from `state_dict`, one of this method's own or of the plain optimizer's. Collective.

        Raises ValueError, KeyError or TypeError, which names the entry that is wrong; nothing has changed then.
        """
        self._refuse_closed("load_state_dict()")
        self.refuse_exchanged("optimizer.load_state_dict()")
        with self._manager.step.publishing():
            scale = self._scaling.active
            if scale is not None and "loss_scale" in state_dict:
                scale.check_state(state_dict["loss_scale"])
            self._manager.step.check_idle("optimizer.load_state_dict()")
            self._optimizer_step.follow_groups()
            checked = check_optimizer_state(self.model, self._chunk_states, self.param_groups, state_dict)
            load_optimizer_state(self.model, self._chunk_states, self.param_groups, checked)
            if self._averages is not None:
                self._averages.count_from(state_dict.get(AVERAGE))
            if scale is not None and "loss_scale" in state_dict:
                scale.load_state_dict(state_dict["loss_scale"])

    def discard_state(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Free the moments, step counts and fp32 masters of frozen parameters. Collective.

        Without this call frozen parameters keep them, as in plain PyTorch. After it they start again from their weights
        when they are unfrozen. A chunk's memory is freed once all of its parameters are frozen and none keeps state.

        parameters: frozen parameters. None: all frozen parameters of the model.

        Raises ValueError for a parameter that is not frozen or not this model's, and GeminiError between backward and
        step; nothing has changed then.
        """
        self._refuse_closed("discard_state()")
        self.refuse_exchanged("discard_state()")
        step, trainability = self._manager.step, self.model.trainability
        step.check_idle("discard_state()")
        with step.publishing(), torch.inference_mode(False), torch.no_grad():
            trainability.apply_flags()
            trainability.discard_state(frozen_among(self.model, parameters))

    def follow_param_groups(self) -> None:
        """Put edits of `param_groups` in force now, as every step does. Collective, between steps.

        With `update_in_backward` edits need this call, since a backward updates before there is a step.

        Raises ValueError for a parameter that is not the model's or is in two groups, BudgetError if the states do not
        fit, and DivergenceError if ranks have edited otherwise; nothing has changed then.
        """
        # Without an edit nothing moves, also where a backward has updated weights and its step is still to come.
        self._refuse_closed("follow_param_groups()")
        has_edits = self._optimizer_step.has_edited_groups
        self.refuse_exchanged("follow_param_groups()")
        self._manager.step.check_idle("follow_param_groups()", after_updates=not has_edits)
        with self._manager.step.publishing():
            self._optimizer_step.follow_groups()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters of the model that are in no group yet, as in torch. Collective, between steps.

        `param_group` has "params" and any hyperparameters of its own. Of several optimizers it has "optimizer", too,
        which names the one that it is added to. Raises ValueError or TypeError for parameters that are not this model's
        or in a group already, and BudgetError if their state does not fit; nothing has changed then.
        """
        # torch's constructor calls this for the groups that it was given, before `__init__` here has gone on.
        if not hasattr(self, "_chunk_states"):
            super().add_param_group(param_group)
            return
        step = self._manager.step
        self._refuse_closed("add_param_group()")
        self.refuse_exchanged("add_param_group()")
        step.check_idle("add_param_group()")
        with step.publishing():
            if len(self._defaults_of) > 1:
                whose = param_group.get(WHOSE)
                if whose not in self._defaults_of:
                    raise ValueError(
                        f"a param group of several optimizers says by {WHOSE!r} whose it is, one of "
                        f"{', '.join(self._defaults_of)}: found {whose!r}"
                    )
                param_group = {**self._defaults_of[whose], **param_group}
            super().add_param_group(param_group)
            try:
                self._optimizer_step.follow_groups("new param group", _ADD_ALIKE)
            except BaseException:
                self.param_groups.pop()
                raise

    def close(self) -> None:
        """Free the states and drop gradients: the model may get another optimizer. Collective. Masters stay.

        Closing it again does nothing. Raises GeminiError inside a forward or backward.
        """
        if self.is_closed:
            return
        self.refuse_exchanged("optimizer.close()")
        self._manager.step.check_idle("close()")
        with self._manager.step.publishing():
            self._manager.grads.discard_all()
            self._optimizer_step.give_back()
            self._chunk_states.drop_all()
            self._manager.detach()

    @property
    def chunk_optimizer(self) -> ChunkOptimizer:
        """What checkpoints save and load: the states by chunk, the loss scale, and the number of steps."""
        return self._next

    @property
    def _step_supports_amp_scaling(self) -> bool:  # torch.amp.GradScaler.step() asks
        raise UnsupportedError(
            "torch.amp.GradScaler cannot scale a ShardedOptimizer: train without it. dtype=torch.bfloat16 needs no "
            "loss scale, and for torch.float16 optimizer.backward(loss) has one"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a ShardedOptimizer cannot be pickled or copied: use state_dict()")
