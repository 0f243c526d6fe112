"""One optimizer step: its groups, the loss scale that all ranks share, and what it reports."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gemini.access.link import link_of
from gemini.errors import GeminiError, UnsupportedError, closed, of_closed_optimizer
from gemini.log import warn_at_script
from gemini.memory.modes import A_HOOK, never_traced
from gemini.memory.transfer import Region
from gemini.model.sharded_model import ShardedModel
from gemini.observe import Stepped
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.elementwise import group_in_words
from gemini.optimizer.given import GroupEdits, ShownGroups
from gemini.optimizer.several import SeveralUpdates, UpdateRule
from gemini.optimizer.shards import GradientFactors
from gemini.optimizer.summary import GradientSummary, SumsAhead, compare_settings, settings_of_step, summarize
from gemini.optimizer.update import BackwardUpdates, ChunkUpdates
from gemini.optimizer.whole_updates import WholeChunkUpdates
from gemini.runtime.chunk import Chunk, ManagedParameter
from gemini.runtime.grads import Becomes, GradStore
from gemini.runtime.step import Step
from optim import clip_coefficient

# -- `StepReport`: the outcome of a step, which `optimizer.last_step` has.


@dataclass(frozen=True)
class StepReport:
    """The outcome of a step. Equal on all ranks, but for the times and bytes, which are this rank's."""

    number: int  # of the step, from 1. Skipped steps and those without a gradient count
    grad_norm: float  # L2, or the norm that clip_grad_norm_() requested, before clipping and without the loss scale
    clip: float  # the factor by which gradients were clipped
    skipped: str | None  # the first parameter with a non-finite gradient, for which nothing was updated
    loss_scale: float  # the loss scale of the step's backwards; 1 without one
    # Since the step before:
    moved_bytes: Mapping[str, int] = field(default_factory=dict, compare=False)  # by link, as "host->device"
    update_ms: float = field(default=0.0, compare=False)  # of a thread that updates and sums up, see `deferred_update`
    exposed_ms: float = field(default=0.0, compare=False)  # that training has waited for this thread


# -- The dynamic loss scale of fp16 training (Micikevicius et al. 2018, section 3.2), with hysteresis.
#
# A step with a non-finite gradient is skipped. The first `hysteresis` - 1 skipped steps leave the scale as it is, and
# every further one multiplies it by `backoff_factor`. `growth_interval` good steps in a row multiply it by
# `growth_factor` and reset the count of skipped steps; nothing else resets it (as in Megatron and Colossal-AI). Numbers
# only.


MAX_SKIPPED = 20
# A state dict has only what steps change: bounds and factors are those of the optimizer that loads it.
_STATE = ("scale", "num_good", "num_bad", "num_skipped")


@dataclass
class LossScale:
    """The loss scale with its bounds, factors and counters. All of them are equal on all ranks."""

    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    scale: float = 0.0
    num_good: int = 0  # steps since the last growth or skip
    num_bad: int = 0  # skips since the last growth
    num_skipped: int = 0  # in a row

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "max_scale"):
            value = getattr(self, name)
            # In Python a bool is an int: True would pass for 1.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, found {value!r}")
            setattr(self, name, float(value))
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, found {value!r}")
        if self.growth_factor < 1 or self.backoff_factor >= 1:
            raise ValueError(
                f"growth_factor must be at least 1 and backoff_factor below 1, found {self.growth_factor} and "
                f"{self.backoff_factor}"
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale={self.initial_scale} must lie between min_scale={self.min_scale} and "
                f"max_scale={self.max_scale}"
            )
        # 0 is the default of the field, which is no valid scale: it stands for one that nobody has set.
        self.scale = self.scale or self.initial_scale

    def update(self, skipped: bool) -> None:
        """Adjust the scale after a step. skipped: the step had a non-finite gradient and changed nothing."""
        if skipped:
            self.num_good = 0
            self.num_skipped += 1
            self.num_bad += 1
            if self.num_bad >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.num_skipped = 0
        self.num_good += 1
        if self.num_good >= self.growth_interval:  # more, if it was loaded with a longer interval
            self.num_good = self.num_bad = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def refuse_endless_skips(self, parameter: str, scale: float) -> None:
        """Raises GeminiError after MAX_SKIPPED skipped steps in a row, once the scale cannot fall any more.

        scale: of the last of these steps. A lower one, which no step has tried yet, may still help.
        """
        if self.num_skipped >= MAX_SKIPPED and scale <= self.min_scale:
            raise GeminiError(
                f"{self.num_skipped} steps in a row were skipped: the gradient of {parameter!r} is not finite at the "
                f"least loss scale, {scale:g}, either. Training has diverged, or computes something that fp16 cannot "
                "hold: lower the learning rate, or use dtype=torch.bfloat16"
            )

    def state_dict(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if name in _STATE}

    @staticmethod
    def check_state(state: dict[str, Any]) -> None:
        """Raises ValueError for a state that `load_state_dict` would refuse."""
        if not isinstance(state, dict) or sorted(state) != sorted(_STATE):
            raise ValueError(f"a loss scale's state has {', '.join(_STATE)}, found {state!r}")
        for name, value in state.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name} of a loss scale must be a number, found {value!r}")
        # With a scale of 0 every gradient would be 0, and the step divides by the scale.
        if not state["scale"]:
            raise ValueError("scale of a loss scale must be more than 0, found 0")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the scale, within the bounds of this one, and the counters. Raises what `check_state` raises."""
        self.check_state(state)
        self.scale = min(max(float(state["scale"]), self.min_scale), self.max_scale)
        self.num_good, self.num_bad, self.num_skipped = (int(state[name]) for name in _STATE[1:])


# -- Applies the loss scale to losses, and tells backwards of scaled losses from others, which are refused.


class Scaling:
    """The loss scale of one optimizer. It is active while fp16 weights are trained."""

    def __init__(self, gradients: GradStore, states: ChunkStates, scale: LossScale) -> None:
        self._gradients = gradients
        self._states = states
        self._scale = scale

    @property
    def active(self) -> LossScale | None:
        return self._scale if self._states.trains_fp16 else None

    @property
    def value(self) -> float:
        """The factor of losses; 1 without loss scaling."""
        return 1.0 if self.active is None else self._scale.scale

    def of(self, loss: Tensor) -> Tensor:
        """The scaled loss. A hook on it marks the backward that passes through it."""
        if self.active is None:
            return loss
        # In fp32: a loss in fp16 would overflow at most scales.
        scaled = loss.float() * self._scale.scale
        # A loss without a graph takes no hook. Its backward raises torch's own error, as for a plain module.
        if scaled.requires_grad:
            scaled.register_hook(self._on_scaled_loss)
        return scaled

    @never_traced(A_HOOK)
    def _on_scaled_loss(self, grad: Tensor) -> None:
        self._gradients.begin_scaled_loss()
        # `end_backward()` resets the mark too, but does not run if this backward reaches nothing of the model.
        torch.autograd.Variable._execution_engine.queue_callback(self._gradients.end_scaled_loss)

    def after_step(self, skipped: str | None) -> None:
        """Adjust the scale. skipped: the parameter whose gradient was not finite, so that nothing was updated."""
        scale = self.active
        if scale is None:
            return
        before = scale.scale
        scale.update(skipped is not None)
        # Gradients that a step left (parameters in no group) still have the old scale.
        if scale.scale != before:
            self._gradients.leftovers.rescale(scale.scale / before)

    def refuse_endless_skips(self, report: StepReport | None) -> None:
        """Raises GeminiError if the last step was one of many that were skipped in a row, at the least scale."""
        if self.active is not None and report is not None and report.skipped is not None:
            self._scale.refuse_endless_skips(report.skipped, report.loss_scale)


# -- Param groups of parameters in chunks: their members, and groups that are added later.


def managed_of(step: Step, parameter: object) -> ManagedParameter | None:
    """The managed parameter of this model that belongs to `parameter`. None if it is not a parameter of the model."""
    link = link_of(parameter) if isinstance(parameter, Tensor) else None
    # A parameter of another `ShardedModel` has a link, too, to the step of that model.
    return link.managed if link is not None and link.step is step else None


def members_of(step: Step, owner: str, number: int, group: dict[str, Any]) -> list[ManagedParameter]:
    """The parameters of a param group of `owner`.

    Raises ValueError if one is not this model's, or there twice, and UnsupportedError for one that is complex.
    """
    members: dict[int, ManagedParameter] = {}
    for parameter in group["params"]:
        managed = managed_of(step, parameter)
        if managed is None:
            raise ValueError(
                f"param group {number} of {owner} has a parameter of shape {tuple(parameter.shape)} that is not this "
                "model's: take model.parameters() of the wrapped model, without those of ignored_parameters=, which "
                "an optimizer of their own trains. What an adapter or a criterion brings is in the module before it is "
                "wrapped"
            )
        # A frozen complex parameter is never updated. `model.parameters()` may bring it into a group.
        if managed.dtype.is_complex and parameter.requires_grad:
            raise UnsupportedError(
                f"{managed.name!r} is {managed.dtype}, and updates are of real numbers. Keep it as a real parameter of "
                "two numbers each, for torch.view_as_complex() in forward; or name it in ignored_parameters= and train "
                "it with an optimizer of its own"
            )
        if managed.index in members:
            raise ValueError(f"param group {number} of {owner} has {managed.name!r} twice")
        members[managed.index] = managed
    return list(members.values())


def agreed_groups(
    step: Step, owner: str, groups: Sequence[dict[str, Any]], settings: Sequence[str] = ()
) -> dict[int, int]:
    """The param group of each member of one of `groups`, by parameter index, the same on all ranks. Collective.

    owner: the name of their optimizer.
    settings: those of the model that come with the optimizer, in words: a rank without them would make no other plan.
    Each rank updates a part of every parameter: with another learning rate than other ranks use for theirs, if it had
    the parameter in another group. Raises DivergenceError then, and what `members_of` raises.
    """
    members = [members_of(step, owner, number, group) for number, group in enumerate(groups)]
    words = [
        group_in_words(number, its, group) for number, (its, group) in enumerate(zip(members, groups, strict=True))
    ]
    remedy = "All ranks must make the same optimizer, with the same parameters in the same order"
    step.communicator.agree("\n".join([owner, *settings, *words]).encode(), "choice of optimizer", remedy=remedy)
    return {managed.index: number for number, its in enumerate(members) for managed in its}


class ParamGroups:
    """The param groups that are in force, beside those that the optimizer shows.

    A script may edit the shown ones: move a parameter to another group, take it out, replace a group, or all of them.
    What a step uses, the group of each parameter and its states, has to follow on all ranks together.
    """

    def __init__(
        self, model: ShardedModel, states: ChunkStates, shown: ShownGroups, in_force: list[dict[str, Any]]
    ) -> None:
        """in_force: the list that `states` and the step read."""
        self._model = model
        self._states = states
        self._shown = shown
        self.edits = GroupEdits(shown, in_force)

    def ungrouped(self) -> dict[int, list[bool]]:
        """`ChunkStates.ungrouped` of the groups that are shown. Local."""
        if not self.edits.are_any():
            return self._states.ungrouped()
        step = self._model.chunk_manager.step
        found = (managed_of(step, each) for group in self._shown.groups for each in group["params"])
        members = {managed.index for managed in found if managed is not None}
        flags = {
            index: [managed.index not in members for managed in state.chunk.parameters]
            for index, state in self._states.by_chunk.items()
        }
        return {index: its for index, its in flags.items() if any(its)}

    def follow(self, what: str = "edited param groups", remedy: str = "All ranks must edit param groups alike") -> None:
        """Put the shown groups in force, with memory for the states that they need. Collective if they are edited.

        Raises ValueError for members that are not allowed, BudgetError if there is no room for the state, and
        DivergenceError if ranks edit otherwise; nothing has changed then.
        """
        if not self.edits.are_any():
            return
        step, groups = self._model.chunk_manager.step, self._shown.groups
        members = [members_of(step, "ShardedOptimizer", number, group) for number, group in enumerate(groups)]
        group_of: dict[int, int] = {}
        for number, its in enumerate(members):
            for managed in its:
                if managed.index in group_of:
                    raise ValueError(
                        f"{managed.name!r} is in param groups {group_of[managed.index]} and {number}: take it out of "
                        "one of them"
                    )
                group_of[managed.index] = number
        for group in groups:
            self._states.check_group(group)  # before any memory is allocated
        words = [
            group_in_words(number, its, group) for number, (its, group) in enumerate(zip(members, groups, strict=True))
        ]
        with self._states.regrouping(groups, group_of):
            # Compared inside the block, so that groups in which ranks differ are undone on all of them.
            step.communicator.agree("\n".join(words).encode(), what, remedy=remedy)
            # The plan follows before the state takes memory: what it does not count would rest on the host of a model
            # with a device budget.
            self._model.trainability.follow_optimizer(f"{what}: {len(group_of)} parameters in {len(groups)}")
            self._states.allocate_all()
        self.edits.note_followed()


# -- Refuses, before a step changes anything, parameters that the user expects to be trained and that would not be.


def refuse_ungrouped(model: ShardedModel, states: ChunkStates) -> None:
    """Raises GeminiError if an unfrozen parameter is in no param group."""
    # Only parameters that were frozen before are looked at. Others in no group may have an optimizer of their own, as
    # in plain PyTorch.
    if not model.trainability.unfrozen:
        return
    unfrozen = [each for each in model.chunk_manager.parameters if each.index in model.trainability.unfrozen]
    names = [each.name for each in unfrozen if states.group(each) is None]
    if names:
        raise GeminiError(
            f"{', '.join(names)}: unfrozen, but in no param group of the optimizer, so nothing would train it. Call "
            'optimizer.add_param_group({"params": [...]}), or freeze it again'
        )


def refuse_idle(model: ShardedModel, summary: GradientSummary) -> None:
    """Raises GeminiError on all ranks if a trained parameter has no gradient, unless the settings ignore that."""
    if model.settings.ignore_unused_parameters:
        return
    # The managed flag is that of the last forward: a parameter that was frozen since then is not missed.
    trained = [each for each in model.chunk_manager.parameters if each.requires_grad and each.parameter.requires_grad]
    # A gradient on any rank counts: an expert that only another rank's batch has used is no idle parameter.
    names = [each.name for each in trained if not summary.has_gradient[each.index]]
    if names:
        raise GeminiError(
            f"no rank has a gradient of {', '.join(names)}: no loss since the last step depends on them. Freeze them, "
            "or wrap with ignore_unused_parameters=True"
        )


def frozen_among(model: ShardedModel, parameters: Iterable[Tensor] | None) -> list[ManagedParameter]:
    """The given frozen parameters, or all of the model. Raises ValueError if one is trained or not the model's."""
    if parameters is None:
        return [managed for managed in model.chunk_manager.parameters if not managed.requires_grad]
    # A tensor is iterable, so its rows would pass for parameters.
    if isinstance(parameters, Tensor):
        raise TypeError("discard_state() takes several parameters, found a tensor: put it into a list")
    found: dict[int, ManagedParameter] = {}
    for parameter in parameters:
        managed = managed_of(model.chunk_manager.step, parameter)
        if managed is None:
            raise ValueError(
                f"discard_state() takes parameters of the wrapped model, found {type(parameter).__name__} of shape "
                f"{tuple(getattr(parameter, 'shape', ()))}"
            )
        if managed.requires_grad:
            raise ValueError(f"discard_state() of {managed.name!r}, which is trained: freeze it first")
        found[managed.index] = managed
    return list(found.values())


# -- The part of an optimizer that chunks and their parameters refer to (`OptimizerPart`).
#
# It has the states, and the factors that the next step applies to gradients: the loss scale, and the clip that
# `optimizer.clip_grad_norm_()` requested. The clip is applied inside the update, which saves a pass over all gradients.
# If the user changes a gradient by hand before the step, it must be a clipped one, as in plain PyTorch. So the clip is
# applied at that moment, and the norm that was computed is no longer that of the gradients.


class ChunkOptimizer:
    """The states of one optimizer, and what is known about the gradients of its next step."""

    def __init__(self, gradients: GradStore, states: ChunkStates, scaling: Scaling, kind: str) -> None:
        """kind: the name of the user's optimizer."""
        self.states = states
        self.scaling = scaling
        self.kind = kind
        self.num_steps = 0  # with skipped ones, and those before a checkpoint that was loaded
        # The step uses the summary of `clip_grad_norm_()` again, because another one would take a second pass over all
        # gradients and a second all-reduce.
        self.summary: GradientSummary | None = None
        self.requested: tuple[float, float] | None = None  # (max_norm, norm type) of `clip_grad_norm_()`
        self._gradients = gradients
        self._seen = 0, 0  # `_now()` when `summary` was computed

    def count_step(self) -> int:
        """Count a step. Returns its number, from 1."""
        self.num_steps += 1
        return self.num_steps

    def count_from(self, num_steps: int) -> None:
        """There were this many steps before, in another process."""
        self.num_steps = num_steps

    def saw(self, summary: GradientSummary) -> None:
        """Keep a summary of the present gradients for the step."""
        self.summary, self._seen = summary, self._now()

    def before_step(self) -> None:
        """Raises GeminiError if gradients came after the clip, which would be clipped by a norm without them."""
        # The gradients that were summarised have been discarded, so the request is void.
        if self._seen[0] != self._now()[0]:
            self.reset_clipping()
        if self.summary is not None and self._seen != self._now():
            raise GeminiError("backward() after clip_grad_norm_(): clip again, after the last backward of the step")

    def reset_clipping(self) -> None:
        """Forget summary and clip, because the step used the gradients, or they were discarded."""
        self.summary = self.requested = None

    def factors_to_come(self, managed: ManagedParameter) -> tuple[float, float]:
        """The factors that the next step applies to `managed`'s gradient: 1 / loss scale, and the clip."""
        # A clip changes the gradients of this optimizer's groups only.
        is_ours = self.states.group(managed) is not None
        return 1.0 / self.scaling.value, self._coefficient() if is_ours else 1.0

    def before_gradient_write(self) -> None:
        """Apply a requested clip to all gradients and forget their norm, before one is changed by hand. Local."""
        if self.summary is None:
            return
        coefficient = self._coefficient()
        if coefficient != 1.0:
            self._gradients.leftovers.multiply(coefficient, self.states.ungrouped())
        # The gradients are clipped. An infinite bound keeps the step from clipping them again: without a request it
        # would clip to the bound that the optimizer was made with.
        if self.requested is not None:
            self.requested = math.inf, self.requested[1]
        self.summary = None

    def _coefficient(self) -> float:
        """The clip of the next step. 1 if there is none, or if a non-finite gradient will skip the step."""
        if self.summary is None or self.requested is None or self._seen != self._now():
            return 1.0
        # The norm is infinite or NaN here. A clip by it would make every gradient 0 or NaN.
        if not self.summary.is_finite:
            return 1.0
        # The gradients were summarised with the loss scale in them, and the bound is one of gradients without it.
        return clip_coefficient(self.summary.norm / self.scaling.value, self.requested[0])

    def _now(self) -> tuple[int, int]:
        return self._gradients.num_forgotten, self._gradients.num_backwards


# -- `OptimizerStep`: what all ranks agree on before an update, the update itself, and what follows from it.
#
# Everything that a rank may refuse comes before the step's one all-reduce: a rank that fails there fails while no rank
# has changed anything. After it every rank does the same, by the same summary of the gradients.


class OptimizerStep:
    """Carries out the steps of one optimizer, and knows how the last one ended."""

    def __init__(
        self,
        model: ShardedModel,
        states: ChunkStates,
        update: UpdateRule,
        param_groups: list[dict[str, Any]],
        scaling: Scaling,
        factors: ChunkOptimizer,
        max_norm: float | None,
        groups: ParamGroups,
    ) -> None:
        """max_norm: every step clips to it for which no other clip is requested. None: no clipping."""
        self.grad_norm: Tensor | None = None
        self.last: StepReport | None = None
        self._model = model
        self._manager = manager = model.chunk_manager
        self._states = states
        self._param_groups = param_groups
        self._groups = groups
        self._scaling = scaling
        self._next = factors  # what the next step will apply
        self._max_norm = max_norm
        self._device = manager.memory.device.device
        defers = model.settings.defers_update
        step = manager.step
        parts = step.params, step.grads, step.failures
        self._averages = states.averages
        if isinstance(update, SeveralUpdates) and update.steps_whole:
            averages = states.averages
            self._updates: ChunkUpdates = WholeChunkUpdates(*parts, states.by_chunk, update, param_groups, averages)
        else:
            self._updates = ChunkUpdates(*parts, states.by_chunk, update, param_groups, defers, states.averages)
        self._transfer, self._work = manager.memory.transfer, manager.memory.work
        self._in_backward = None
        if model.settings.frees_gradients(manager.communicator.world_size):
            self._in_backward = BackwardUpdates(self._updates, states.by_chunk, param_groups, groups.edits)
        self._ahead = SumsAhead(self._work) if defers else None
        self._reductions = step.reductions
        self._reductions.serve(self._in_backward, self._ahead)
        self._moved_before = Counter(self._transfer.bytes_by_link)

    def request_clip(self, max_norm: float, norm_type: float) -> Tensor:
        """Let the next step clip its gradients so. Returns their norm before that, 0-dim. Collective.

        Raises GeminiError where backwards update weights, unless only the norm is asked for.
        """
        asks_only = self._in_backward is not None and math.isinf(max_norm)
        if self._in_backward is not None and not (asks_only and norm_type == 2.0):
            raise GeminiError(
                f"clip_grad_norm_({max_norm:g}, norm_type={norm_type:g}) needs all gradients before the first update, "
                "and update_in_backward=True updates while they come: wrap the model without it, or do not clip. "
                "clip_grad_norm_(math.inf) returns their 2-norm"
            )
        with self._manager.step.publishing():
            self.follow_groups()
            # The backward has updated as without clipping, which is the same: nothing is requested.
            self._next.requested = None if asks_only else (max_norm, norm_type)
            self._collect()
            summary = self._summarize(self._resting(), norm_type)
            self._next.saw(summary)
        self.grad_norm = torch.tensor(self._true_norm(summary), dtype=torch.float32, device=self._device)
        return self.grad_norm

    def run(self) -> None:
        """Agree on the step in its last all-reduce before the update. A rank that cannot update fails before that.

        Raises GeminiError for a closed model, and what the checks before the all-reduce raise.
        """
        step = self._manager.step
        if step.failures.is_closed:
            raise closed("a step needs memory that was given back with it")
        if self._in_backward is None:
            self._updates.finish()
        self._times_ms = tuple(1e3 * seconds for seconds in self._work.pop_times())
        # Everything that may be refused is checked first, while no rank has changed anything.
        if self._in_backward is not None and step.grads.are_used:
            self._in_backward.refuse_other_settings()
            self._in_backward.refuse_edits(step)
        self.follow_groups()
        self._updates.refuse_bad_hyperparameters()
        refuse_ungrouped(self._model, self._states)
        step.before_update()
        self._collect()
        # What the backward has not used is updated now, with the buffers that its thread uses.
        if self._in_backward is not None and any(step.grads.of(chunk).is_reduced for chunk in self._left()):
            self._updates.finish()
        step.grads.leftovers.leave_homes(self._states.ungrouped())
        grad_norm = torch.empty((), dtype=torch.float32, device=self._device)
        resting = self._resting()
        with self._updates.room(resting, step.payloads):
            max_norm, norm_type = self._next.requested or (self._max_norm, 2.0)
            if self._next.summary is not None:  # a learning rate may have been set since
                compare_settings(step, self._settings())
            summary = self._next.summary or self._summarize(resting, norm_type)
            refuse_idle(self._model, summary)
            self._next.reset_clipping()
            self._manager.micro_batches.note_step(summary.num_backwards)
            norm = self._true_norm(summary)
            self.grad_norm = grad_norm.fill_(norm)
            self._update_all(resting, summary, norm, max_norm)

    def exchange_averages(self, what: str) -> None:
        """Have the weights' averages in their place, or the weights again. what: is called. Collective.

        Raises GeminiError inside a forward or backward, and for a closed optimizer; nothing has changed then.
        """
        step = self._manager.step
        if self._averages is None:
            return
        if step.failures.is_closed or self._manager.optimizer is not self._next:
            # At the end of a block in which the model was closed there is nothing to bring back.
            if self._averages.are_exchanged:
                self._averages.note_exchange()
                return
            raise closed(what) if step.failures.is_closed else of_closed_optimizer(what)
        step.check_idle(what)
        with step.publishing():
            self._updates.finish()
            step.before_update()
            self._updates.exchange_averages(step.payloads)
            step.end_update()

    @property
    def has_edited_groups(self) -> bool:
        """The script has edited the param groups since they came in force."""
        return self._groups.edits.are_any()

    def follow_groups(self, *words: str) -> None:
        """Put edits of the param groups in force, see `ParamGroups.follow`. Collective."""
        if self.has_edited_groups:
            # States may move, and the thread may still update what they are of.
            self._updates.finish()
            self._groups.follow(*words)

    def give_back(self) -> None:
        """The optimizer is closed: backwards use no gradient any more. Local."""
        self._reductions.serve(None, None)
        self._updates.give_back()

    def _collect(self) -> None:
        """Complete the gradients, and release payloads that an update would make stale. Collective."""
        for chunk in self._left():
            self._manager.params.make_stale(chunk)
        self._reductions.catch_up()

    def _left(self) -> list[Chunk]:
        """The chunks that the backward has not updated."""
        if self._in_backward is None:
            return self._states.trained
        return [chunk for chunk in self._states.trained if not self._manager.grads.is_used(chunk)]

    def _resting(self) -> dict[Chunk, Region | None]:
        """The reduced gradient of each chunk that is trained; None where none has come."""
        gradients = [self._manager.grads.of(chunk) for chunk in self._states.trained]
        return {each.chunk: each.reduced() if each.is_reduced else None for each in gradients}

    def _summarize(self, resting: Mapping[Chunk, Region | None], norm_type: float) -> GradientSummary:
        """Find out what all ranks must know of the gradients."""
        ungrouped = self._states.ungrouped()
        live = self._manager.live if self._model.settings.model_data_memory is None else None
        step, num_parameters = self._manager.step, len(self._manager.parameters)
        used = None if self._in_backward is None else self._in_backward.sums
        return summarize(step, resting, ungrouped, num_parameters, norm_type, self._settings(), live, self._ahead, used)

    def _update_all(
        self,
        resting: Mapping[Chunk, Region | None],
        summary: GradientSummary,
        norm: float,
        max_norm: float | None,
    ) -> None:
        """Do what all ranks have agreed on. Nothing in here may fail on one rank alone."""
        step = self._manager.step
        number = self._next.count_step()
        ungrouped, states, scale = self._states.ungrouped(), self._states, self._scaling.value
        updated = {chunk: its for chunk in resting if any(its := self._updates.steps(chunk, summary))}
        left = {chunk: (updated[chunk], resting[chunk]) for chunk in self._left() if chunk in updated}
        # A non-finite gradient on any rank skips the step on all ranks, because all have the same summary.
        skipped = None
        factors = GradientFactors(1.0 / scale)
        bad = None if summary.non_finite is None else self._manager.parameters[summary.non_finite].name
        if bad is None and not summary.is_finite:
            bad = "a parameter that other ranks have a part of"
        was_used = step.grads.are_used
        if bad is not None and was_used:
            warn_at_script(
                f"step {number}: the gradient of {bad!r} is not finite, and with update_in_backward=True it has "
                "changed weights already, as in plain PyTorch. Load a checkpoint"
            )
        if bad is not None and not was_used:
            skipped = bad
            warn_at_script(f"step {number} skipped on all ranks: the gradient of {skipped!r} is not finite")
            step.grads.end_step(Becomes.USED, ungrouped)
        else:
            if max_norm is not None:
                factors = factors._replace(clip=clip_coefficient(norm, max_norm))
            with step.failures.tearing():
                self._updates.update(left, factors, step.payloads)
                if self._averages is not None:
                    self._updates.average_idle(updated)
                    self._averages.note_step()
                states.note_step()
                # Gradients that an update has used must not be there for another one.
                step.grads.end_step(Becomes.USED, ungrouped)
        if self._in_backward is not None:
            self._in_backward.sums.discard_sums()
        self.last = StepReport(number, norm, factors.clip, skipped, scale, self._moved(), *self._times_ms)
        if heard := self._manager.observer.steps:
            heard.tell(Stepped(self.last))
        if updated:
            self._scaling.after_step(skipped)

    def _moved(self) -> dict[str, int]:
        """Bytes by link since the last call."""
        before, self._moved_before = self._moved_before, Counter(self._transfer.bytes_by_link)
        return {link: count - before[link] for link, count in self._moved_before.items()}

    def _settings(self) -> str:
        return settings_of_step(self._next.requested or self._max_norm, self._scaling.value, self._param_groups)

    def _true_norm(self, summary: GradientSummary) -> float:
        """The norm of the gradients without the loss scale."""
        return summary.norm / self._scaling.value
