"""How one run of elements is updated: by our Adam, or by a torch optimizer that works element by element.

A run is a piece of a flat shard whose parameters share group, step count and scalars. Elementwise optimizers give
equal bits on a run and on the parameters it consists of, so one call serves hundreds of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gemini.errors import UnsupportedError
from gemini.optimizer.launches import Launches
from gemini.optimizer.shard_view import ShardView
from optim import AdamPiece, CPUAdam, HybridAdam, Spans, adam_scalars, hyperparameters

TESTED: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose updates on flat runs are tested to equal those on separate parameters."""


class GradientFactors(NamedTuple):
    """What every gradient is multiplied by, one after the other, before it is used."""

    inv_scale: float = 1.0
    clip: float = 1.0


@dataclass
class RunState:
    """What an optimizer keeps for a run: `flat` views into the chunk's state, and scalars that all elements share."""

    flat: dict[str, Tensor] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    is_new: bool = True


class EntryNames(NamedTuple):
    """The keys of a parameter's entry in an optimizer state dict."""

    needed: tuple[str, ...]  # without one of these an update would fail, or go on from zeros
    flat: tuple[str, ...]  # per-element states: tensors of the parameter's shape
    known: tuple[str, ...] | None  # any other key is another optimizer's; None: the optimizer is not known that well


class ElementwiseUpdate(Protocol):
    """Updates runs."""

    def flat_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The per-element states of a parameter of this param group."""
        ...

    def entry_names(self, group: Mapping[str, Any]) -> EntryNames:
        """What a state dict has of a parameter of this param group that was stepped."""
        ...

    def update(
        self, param: Tensor, grad: Tensor, state: RunState, group: Mapping[str, Any], factors: GradientFactors
    ) -> dict[str, Tensor]:
        """Step `param` (fp32 or fp64, 1-D) in place; returns per-element states that are not views of `state.flat`."""
        ...

    def update_run(
        self,
        view: ShardView,
        start: int,
        spans: Spans | None,
        grad: Tensor,
        state: RunState,
        group: Mapping[str, Any],
        factors: GradientFactors,
        launches: Launches,
    ) -> dict[str, Tensor]:
        """`update` of the weights of `view` from element `start` on, as many as `grad` has, by `launches.run()`.

        spans: of them, those that are updated; None: all.
        """
        ...


class AdamUpdate:
    """The written Adam of `optim.reference`."""

    def flat_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    def entry_names(self, group: Mapping[str, Any]) -> EntryNames:
        flat = self.flat_names(group)
        return EntryNames(("step", *flat), flat, ("step", *flat))

    def update(
        self, param: Tensor, grad: Tensor, state: RunState, group: Mapping[str, Any], factors: GradientFactors
    ) -> dict[str, Tensor]:
        if param.dtype is not torch.float32:
            raise UnsupportedError(f"HybridAdam updates fp32 weights; this model has {param.dtype} ones: use AdamW")
        launches = Launches()
        self._update([AdamPiece(param, grad, *self._moments(state))], state, group, factors, launches)
        launches.run()
        return {}

    def update_run(
        self,
        view: ShardView,
        start: int,
        spans: Spans | None,
        grad: Tensor,
        state: RunState,
        group: Mapping[str, Any],
        factors: GradientFactors,
        launches: Launches,
    ) -> dict[str, Tensor]:
        moments = self._moments(state)
        pieces = [segment.piece(start, grad, *moments, spans) for segment in view.segments()]
        self._update([piece for piece in pieces if piece is not None], state, group, factors, launches)
        return {}

    def _moments(self, state: RunState) -> tuple[Tensor, Tensor]:
        return state.flat["exp_avg"], state.flat["exp_avg_sq"]

    def _update(
        self,
        pieces: list[AdamPiece],
        state: RunState,
        group: Mapping[str, Any],
        factors: GradientFactors,
        launches: Launches,
    ) -> None:
        step = int(state.scalars.get("step", 0)) + 1
        launches.add(pieces, adam_scalars(step=step, **factors._asdict(), **hyperparameters(group)))
        state.scalars["step"] = step


class TorchUpdate:
    """A `torch.optim` optimizer that is lent one run at a time as its only parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        accepted = inspect.signature(type(optimizer).__init__).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        self._make = lambda parameter: type(optimizer)([parameter], **settings)
        self._worker = self._make(torch.zeros(1))
        self._starts_with_state = bool(self._worker.state)  # Adagrad

    def flat_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(self._probe(group)[0])

    def entry_names(self, group: Mapping[str, Any]) -> EntryNames:
        if type(self._worker) not in TESTED:
            return EntryNames((), (), None)
        if isinstance(self._worker, torch.optim.SGD):  # it makes a momentum buffer whenever it has none
            return EntryNames((), ("momentum_buffer",), ("momentum_buffer",))
        flat, scalars = self._probe(group)
        names = (*scalars, *flat)
        return EntryNames(names, tuple(flat), names)

    def _probe(self, group: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The per-element states and the scalars that a first update makes."""
        state = RunState()
        with torch.random.fork_rng(devices=[]):  # an optimizer that is not on the tested list may draw numbers
            flat = self.update(torch.zeros(7), torch.ones(7), state, group, GradientFactors())
        return flat, state.scalars

    def update(
        self, param: Tensor, grad: Tensor, state: RunState, group: Mapping[str, Any], factors: GradientFactors
    ) -> dict[str, Tensor]:
        grad = grad.to(param.dtype)
        for factor in factors:
            if factor != 1.0:
                grad = grad * torch.tensor(factor, dtype=param.dtype, device=param.device)
        lent = param.detach()
        lent.grad = grad
        worker = self._worker
        settings = {name: value for name, value in group.items() if name != "params"}
        settings |= {name: False for name in ("foreach", "fused") if name in settings}
        worker.param_groups[0].clear()
        worker.param_groups[0].update(settings, params=[lent])
        worker.state.clear()
        if not state.is_new:
            scalars = {name: _copy(value) for name, value in state.scalars.items()}
            worker.state[lent] = {**state.flat, **scalars}
        elif self._starts_with_state:
            worker.state[lent] = self._make(lent).state[lent]
        worker.step()
        replaced: dict[str, Tensor] = {}
        for name, value in worker.state.get(lent, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and value.dim() == 1:
                if name not in state.flat or state.flat[name].data_ptr() != value.data_ptr():
                    replaced[name] = value
            else:
                state.scalars[name] = _copy(value)
        worker.state.clear()
        return replaced

    def update_run(
        self,
        view: ShardView,
        start: int,
        spans: Spans | None,
        grad: Tensor,
        state: RunState,
        group: Mapping[str, Any],
        factors: GradientFactors,
        launches: Launches,
    ) -> dict[str, Tensor]:
        assert spans is None, "a torch optimizer gets its runs one by one"
        return self.update(view.load()[start : start + grad.numel()], grad, state, group, factors)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def resolve_update(optimizer: torch.optim.Optimizer, elementwise: bool) -> ElementwiseUpdate:
    """The update of a user's optimizer. Raises UnsupportedError for one that is not known to be elementwise."""
    if type(optimizer) in (HybridAdam, CPUAdam):
        return AdamUpdate()
    if type(optimizer) in TESTED or elementwise:
        return TorchUpdate(optimizer)
    names = ", ".join(["HybridAdam", "CPUAdam", *(kind.__name__ for kind in TESTED)])
    raise UnsupportedError(
        f"{type(optimizer).__name__} is not known to work element by element, which chunks need. Known: {names}. If "
        "yours does, say elementwise=True"
    )
