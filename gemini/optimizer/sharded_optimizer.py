"""`ShardedOptimizer`: a torch optimizer over a `ShardedModel`'s chunks.

A step: look at all gradients once (norm, non-finite elements, who has one: one all-reduce), then update chunk by
chunk where the chunk's state lives, in order of first use.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.errors import GeminiError, UnsupportedError
from gemini.model.released import link_of
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_state import ChunkOptimizerState, Run
from gemini.optimizer.elementwise import AdamUpdate, resolve_update
from gemini.optimizer.shard_view import ShardView, Staging
from gemini.optimizer.state_dict import load_optimizer_state, whole_optimizer_state
from gemini.optimizer.summary import GradientSummary, norm_tensor, summarize
from gemini.placement.demand import Kind, Tier
from optim import clip_coefficient
from optim.hyperparameters import refuse_unknown_arguments


@dataclass(frozen=True)
class StepReport:
    """What the last step did. `skipped` names the parameter whose gradient was not finite."""

    number: int
    grad_norm: float
    clip: float
    skipped: str | None


class ShardedOptimizer(torch.optim.Optimizer):
    """Steps a `ShardedModel` with the update of an ordinary elementwise optimizer.

    Collective: every rank creates, steps, saves and loads it alike.

    Args:
        model: the `ShardedModel` whose parameters the optimizer was made with.
        optimizer: `HybridAdam(model.parameters(), ...)`, or a torch optimizer that works element by element. It is
            taken over: its `param_groups` become this optimizer's (schedulers act on them), its state stays empty.
        clip_grad_norm: clip every step to this global norm (L2 over all ranks); None does not clip.
        elementwise: take an optimizer that is not on the tested list at your word.
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: torch.optim.Optimizer,
        *,
        clip_grad_norm: float | None = None,
        elementwise: bool = False,
        **unknown: Any,
    ) -> None:
        refuse_unknown_arguments("ShardedOptimizer", unknown, ["model", "optimizer", "clip_grad_norm", "elementwise"])
        if not isinstance(model, ShardedModel):
            raise TypeError(f"model must be a ShardedModel, found {type(model).__name__}")
        if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, ShardedOptimizer):
            raise TypeError(f"optimizer must be a plain torch optimizer, found {type(optimizer).__name__}")
        if model._optimizer is not None:
            raise UnsupportedError("this model has a ShardedOptimizer already")
        if any(int(entry.get("step", 1)) for entry in optimizer.state.values()):
            raise UnsupportedError("the optimizer has stepped before: make a new one for the sharded model")
        if not isinstance(elementwise, bool):
            raise TypeError(f"elementwise must be True or False, found {elementwise!r}")
        self._update = resolve_update(optimizer, elementwise)
        self._clip_grad_norm = _check_max_norm("clip_grad_norm", clip_grad_norm)
        self.model = model
        self._chunks = [chunk for chunk in model._chunks if chunk.trainable]
        self._num_parameters = len(model._managed)
        group_of = self._groups_by_index(optimizer)
        optimizer.state.clear()  # Adagrad has a whole state from the start
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self._states: dict[int, ChunkOptimizerState] = {}
        counts = isinstance(self._update, AdamUpdate)
        for chunk in self._chunks:
            groups = [group_of.get(managed.index) for managed in chunk.parameters]
            tier = model.plan.placement.homes[chunk.index][Kind.OPTIM]
            state = ChunkOptimizerState(chunk, tier, counts, groups, scalars=[None for _ in groups])
            self._states[chunk.index] = state
            if any(group is not None for group in groups):
                for name in self._update.flat_names():
                    state.take(name, model.executor.fetcher)
        self._staging = Staging()
        self._requested_clip: tuple[float, float] | None = None
        self._summary: GradientSummary | None = None
        self._summarized = 0, 0  # the gradients that `_summary` has seen
        self._num_steps = 0
        self.grad_norm: Tensor | None = None
        self.last_step: StepReport | None = None
        model._optimizer = self
        for managed in model._managed:
            link = link_of(managed.parameter)
            assert link is not None
            link.optimizer = self

    def _groups_by_index(self, optimizer: torch.optim.Optimizer) -> dict[int, int]:
        """Parameter index -> param group. Raises if a parameter is not this model's."""
        group_of: dict[int, int] = {}
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                link = link_of(parameter)
                if link is None or link.executor is not self.model.executor:
                    raise ValueError(
                        f"param group {number} of {type(optimizer).__name__} has a parameter of shape "
                        f"{tuple(parameter.shape)} that is not this model's: make the optimizer with "
                        "model.parameters() of the wrapped model"
                    )
                group_of[link.managed.index] = number
        return group_of

    # -- the loop

    def backward(self, loss: Tensor) -> None:
        """`loss.backward()`; if it raises, the other ranks are told why."""
        with self.model.executor.publishing():
            loss.backward()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the next step's gradients to `max_norm`; returns their norm before clipping, 0-dim. Collective.

        norm_type: 2 (exact, whatever the chunks and ranks) or inf.
        """
        if norm_type not in (2.0, math.inf):
            raise ValueError(f"norm_type must be 2 or inf, found {norm_type!r}")
        checked = _check_max_norm("max_norm", max_norm)
        if checked is None:
            raise ValueError("max_norm must be a number, found None")
        self._check_has_backward("clip_grad_norm_()")
        with self.model.executor.publishing():
            self._requested_clip = checked, norm_type
            self._summary = self._summarize(norm_type)
            self._summarized = self._gradients_now()
        self.grad_norm = norm_tensor(self._summary.norm, self.model.executor.gradients.device)
        return self.grad_norm

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights with the gradients since the last step and consume those. Collective.

        If any rank has a non-finite gradient, nothing changes on any rank, `last_step.skipped` names the first
        parameter that has one, and the gradients are dropped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_has_backward("step()")
        if self._summarized[0] != self._gradients_now()[0]:
            self._summary = self._requested_clip = None  # those gradients were discarded
        if self._summary is not None and self._summarized != self._gradients_now():
            raise GeminiError("backward() after clip_grad_norm_(): clip again, after the last backward of the step")
        self.model.check_parameters()
        with self.model.executor.publishing():
            self._step()
            self.model.executor.end_update()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard gradients that no step has consumed; after a step there are none."""
        self.model.zero_grad(set_to_none)
        self._summary = self._requested_clip = None

    def _check_has_backward(self, what: str) -> None:
        executor = self.model.executor
        executor.check_idle(what)
        if any(chunk.pins for chunk in executor.chunks):
            raise GeminiError(f"{what} inside GatheredParameters(...) is not possible: leave it first")
        if not executor.gradients.num_backwards:
            raise GeminiError(f"{what} without a backward(): there is no gradient since the last step")

    def _gradients_now(self) -> tuple[int, int]:
        gradients = self.model.executor.gradients
        return gradients.num_forgotten, gradients.num_backwards

    def forget_summary(self) -> None:
        """Gradients changed after their norm was taken: the step takes it again, and clips as was asked."""
        self._summary = None

    # -- the step

    def _refuse_bad_hyperparameters(self) -> None:
        """Let the update check its hyperparameters on no elements, while every rank can still go back."""
        checked: set[int] = set()  # membership only
        for state in self._states.values():
            for position, group in enumerate(state.groups):
                if group is not None and group not in checked:
                    checked.add(group)
                    none = torch.zeros(0, dtype=state.dtype)
                    self._update.update(none, none.clone(), state.empty_run(position), self.param_groups[group], 1.0)

    def _summarize(self, norm_type: float) -> GradientSummary:
        """What all ranks must know. Who cannot update says so before it, while nobody has changed anything."""
        for chunk in self._chunks:
            self.model.executor.before_chunk_update(chunk)
        return summarize(self.model.executor, self._chunks, self._num_parameters, norm_type)

    def _step(self) -> None:
        executor = self.model.executor
        self._refuse_bad_hyperparameters()
        executor.before_update()
        max_norm, norm_type = self._requested_clip or (self._clip_grad_norm, 2.0)
        executor.fetcher.device.synchronize()
        summary = self._summary or self._summarize(norm_type)
        self._summary = self._requested_clip = None
        self._num_steps += 1
        self.grad_norm = norm_tensor(summary.norm, executor.gradients.device)
        skipped = None
        clip = 1.0
        if summary.non_finite is not None:
            skipped = self.model._managed[summary.non_finite].name
            warnings.warn(
                f"step {self._num_steps} skipped on all ranks: the gradient of {skipped!r} is not finite", stacklevel=4
            )
        else:
            if max_norm is not None:
                clip = clip_coefficient(summary.norm, max_norm)
            updated = [chunk for chunk in self._chunks if any(self._steps(chunk, summary))]
            with executor.tearing():
                for chunk in updated:
                    executor.before_chunk_update(chunk)  # again, for those that were used after the summary
                    self._update_chunk(chunk, summary, clip)
        executor.gradients.forget()
        self.last_step = StepReport(self._num_steps, summary.norm, clip, skipped)

    def _update_chunk(self, chunk: Chunk, summary: GradientSummary, clip: float) -> None:
        """Update one chunk where its state lives; it is on this rank alone until the new weights are gathered."""
        executor, state = self.model.executor, self._states[chunk.index]
        steps = self._steps(chunk, summary)
        runs = state.runs(steps)
        if runs:
            self._update_runs(chunk, state, runs, clip)
        self._count_elsewhere(state, runs, [position for position, does in enumerate(steps) if does])
        executor.after_chunk_update(chunk)
        if chunk.home_layout.world_size < chunk.optim_layout.world_size:
            executor.fetcher.spread(chunk)

    def _steps(self, chunk: Chunk, summary: GradientSummary) -> list[bool]:
        """By position in the chunk: the parameter has a gradient on some rank, and is in a param group."""
        groups = self._states[chunk.index].groups
        return [
            summary.has_gradient[managed.index] and group is not None
            for managed, group in zip(chunk.parameters, groups, strict=True)
        ]

    def _update_runs(self, chunk: Chunk, state: ChunkOptimizerState, runs: list[Run], clip: float) -> None:
        executor = self.model.executor
        fetcher = executor.fetcher
        gradient = executor.gradients.store.gradients[chunk.index]
        tier = self._where(chunk, state)
        view = ShardView(chunk, fetcher, self._staging, tier)
        weights = view.load()
        grad = gradient.reduced()
        if gradient.reduced_tier() is not tier:
            staged = self._staging.take("gradient", chunk.optim_numel, grad.dtype)
            from_tier = fetcher.tier(gradient.reduced_tier())
            grad = fetcher.staged_copy(staged, grad, tier, from_tier)
        scalars: dict[int, dict[str, Any]] = {}
        for run in runs:
            end = run.start + run.numel
            run_state = state.state_of(run)
            group = self.param_groups[run.group]
            replaced = self._update.update(weights[run.start : end], grad[run.start : end], run_state, group, clip)
            state.keep(run, run_state, replaced, fetcher)
            for position in run.positions:
                scalars[position] = run_state.scalars
        state.keep_scalars(scalars)
        view.store(weights)

    def _count_elsewhere(self, state: ChunkOptimizerState, runs: list[Run], updated: list[int]) -> None:
        """Parameters that lie wholly in other ranks' shards count their steps here too, so that all ranks agree."""
        here = {position for run in runs for position in run.positions}
        absent = [position for position in updated if position not in here]
        if not absent:
            return
        dtype = state.dtype
        for position in absent:
            run_state = state.empty_run(position)
            group_number = state.groups[position]
            assert group_number is not None
            none = torch.zeros(0, dtype=dtype)
            self._update.update(none, none.clone(), run_state, self.param_groups[group_number], 1.0)
            state.scalars[position] = run_state.scalars

    def _where(self, chunk: Chunk, state: ChunkOptimizerState) -> Tier:
        """The device if everything that the update touches is there, else the host."""
        tiers = {chunk.homes[kind].tier for kind in (Kind.PARAM, Kind.MASTER) if kind in chunk.homes}
        tiers.add(self.model.executor.gradients.store.gradients[chunk.index].reduced_tier())
        device = self.model.executor.fetcher.device.device
        on_device = state.tier is Tier.DEVICE and all(flat.device == device for flat in state.flats.values())
        return Tier.DEVICE if tiers == {Tier.DEVICE} and on_device else Tier.HOST

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """torch.optim's format with whole CPU tensors, and "masters": fp32 weights by parameter number. Collective."""
        with self.model.executor.publishing():
            return whole_optimizer_state(self.model.executor, self._states, self.param_groups)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of `state_dict` or of the plain optimizer. Checked before anything changes."""
        with self.model.executor.publishing():
            load_optimizer_state(self.model.executor, self._states, self.param_groups, state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_states"):
            raise UnsupportedError(
                "param groups cannot be added after ShardedOptimizer(...): give all of them at first"
            )
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:  # torch.amp.GradScaler.step() asks
        raise UnsupportedError(
            "torch.amp.GradScaler cannot scale a ShardedOptimizer: train without it, dtype=torch.bfloat16 needs no "
            "loss scale"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a ShardedOptimizer cannot be pickled or copied: use state_dict()")


def _check_max_norm(name: str, value: float | None) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be a number above 0 or None, found {value!r}")
    return float(value)
