"""The update of a run of elements: by our Adam, or by a torch optimizer that works element by element.

A run is a piece of a flat shard whose parameters share group, step count and scalars. An elementwise optimizer gives
the same bits on a run as on its parameters one by one, so one call updates hundreds of parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemini.errors import UnsupportedError
from gemini.optimizer.runs import Run, RunUpdate
from optim import AdamPiece, AdamScalars, CPUAdam, HybridAdam, adam_scalars, hyperparameters, update_pieces

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
"""Optimizers whose updates of flat runs are tested to equal those of separate parameters."""


class GradientFactors(NamedTuple):
    """The factors that every gradient is multiplied by before the update, in this order."""

    inv_scale: float = 1.0
    clip: float = 1.0


class EntryNames(NamedTuple):
    """The keys of a parameter's entry in an optimizer state dict."""

    needed: tuple[str, ...]  # without one of these an update would fail, or continue from zeros
    flat: tuple[str, ...]  # per-element states: tensors of the parameter's shape
    known: tuple[str, ...] | None  # any other key is of another optimizer; None: this optimizer's keys are not known


class AdamUpdate:
    """The Adam of `optim.reference`, over any number of chunks at once."""

    is_fused = True  # one call takes runs with spans, of several chunks; step counts are plain numbers

    def flat_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """The per-element states of a parameter of this param group."""
        return ("exp_avg", "exp_avg_sq")

    def entry_names(self, group: Mapping[str, Any]) -> EntryNames:
        """The keys of a state dict's entry for a parameter of this param group that was stepped."""
        flat = self.flat_names(group)
        return EntryNames(("step", *flat), flat, ("step", *flat))

    def update(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """Update the runs' weights, states and scalars: one launch for all that have the same constants.

        Raises ValueError for a hyperparameter of `groups` that is not valid, and UnsupportedError for fp64 weights.
        """
        constants: dict[tuple[int, int], AdamScalars] = {}  # by step and param group
        pieces: dict[AdamScalars, list[AdamPiece]] = {}
        for each in updates:
            if each.grad.dtype is torch.float64:
                raise UnsupportedError("HybridAdam updates fp32 weights; this model has fp64 ones: use AdamW")
            # Runs without elements count their steps as well: their parameters are in other ranks' shards.
            step = each.scalars["step"] = int(each.scalars.get("step", 0)) + 1
            key = step, each.run.group
            if key not in constants:
                settings = hyperparameters(groups[each.run.group])
                constants[key] = adam_scalars(step=step, **factors._asdict(), **settings)
            if each.weights is not None:
                moments = each.flat["exp_avg"], each.flat["exp_avg_sq"]
                its = (
                    part.piece(each.run.start, each.grad, *moments, each.run.spans) for part in each.weights.segments()
                )
                pieces.setdefault(constants[key], []).extend(piece for piece in its if piece is not None)
        for scalars, alike in pieces.items():
            update_pieces(alike, scalars)


class TorchUpdate:
    """A `torch.optim` optimizer to which the runs of one chunk are passed as its parameters.

    One call updates all of them. It uses the optimizer's loop over parameters, not its `foreach` and `fused` forms,
    whose bits differ and would depend on how parameters are cut into runs.
    """

    is_fused = False

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        accepted = inspect.signature(type(optimizer).__init__).parameters
        settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        self._make = lambda parameter: type(optimizer)([parameter], **settings)
        self._worker = self._make(torch.zeros(1, device="cpu"))
        self._starts_with_state = bool(self._worker.state)  # Adagrad creates its state in the constructor

    def flat_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """See `AdamUpdate.flat_names`."""
        return tuple(self._probe(group).made)

    def entry_names(self, group: Mapping[str, Any]) -> EntryNames:
        """See `AdamUpdate.entry_names`."""
        if type(self._worker) not in TESTED:
            return EntryNames((), (), None)
        # SGD creates a missing momentum buffer in any step, so none is needed.
        if isinstance(self._worker, torch.optim.SGD):
            return EntryNames((), ("momentum_buffer",), ("momentum_buffer",))
        probe = self._probe(group)
        names = (*probe.scalars, *probe.made)
        return EntryNames(names, tuple(probe.made), names)

    def _probe(self, group: Mapping[str, Any]) -> RunUpdate:
        """A first update of no elements, which shows the states and scalars that the optimizer creates."""
        first = RunUpdate(Run(0, 0, (), 0), None, torch.zeros(0, device="cpu"), {}, {}, is_new=True)
        # An optimizer that is not on the tested list may draw random numbers, which must not change the user's.
        with torch.random.fork_rng(devices=[]):
            self.update([first], [group], GradientFactors())
        return first

    def update(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """See `AdamUpdate.update`, for the runs of one chunk. Raises what the optimizer raises."""
        worker = self._worker
        worker.state.clear()
        worker.param_groups.clear()
        lent = [self._lend(each, factors) for each in updates]
        for number, group in enumerate(groups):
            members = [parameter for each, parameter in zip(updates, lent, strict=True) if each.run.group == number]
            if members:
                options = {name: False if name in ("foreach", "fused") else value for name, value in group.items()}
                worker.param_groups.append({**options, "params": members})
        worker.step()
        # Take the states out: scalars are copied, flat states that the optimizer created or replaced are reported.
        for each, parameter in zip(updates, lent, strict=True):
            for name, value in worker.state.get(parameter, {}).items():
                if not (isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() == 1):
                    each.scalars[name] = _copy(value)
                elif name not in each.flat or each.flat[name].data_ptr() != value.data_ptr():
                    each.made[name] = value
        worker.state.clear()

    def _lend(self, each: RunUpdate, factors: GradientFactors) -> Tensor:
        """The run's weights as a parameter of the worker, with their gradient and state."""
        run = each.run
        lent = (
            torch.zeros_like(each.grad)
            if each.weights is None
            else each.weights.load()[run.start : run.start + run.numel]
        )
        lent = lent.detach()
        grad = each.grad.to(lent.dtype)
        for factor in factors:
            if factor != 1.0:
                grad = grad * torch.tensor(factor, dtype=lent.dtype, device=lent.device)
        lent.grad = grad
        if not each.is_new:
            self._worker.state[lent] = each.flat | {name: _copy(value) for name, value in each.scalars.items()}
        elif self._starts_with_state:
            self._worker.state[lent] = self._make(lent).state[lent]
        return lent


ElementwiseUpdate = AdamUpdate | TorchUpdate


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def resolve_update(optimizer: torch.optim.Optimizer, elementwise: bool) -> ElementwiseUpdate:
    """The update of the user's optimizer. Raises UnsupportedError if it is not known to be elementwise."""
    if type(optimizer) in (HybridAdam, CPUAdam):
        return AdamUpdate()
    if type(optimizer) in TESTED or elementwise:
        return TorchUpdate(optimizer)
    names = ", ".join(["HybridAdam", "CPUAdam", *(kind.__name__ for kind in TESTED)])
    raise UnsupportedError(
        f"{type(optimizer).__name__} is not known to work element by element, which chunks need. Known: {names}. If "
        "yours does, say elementwise=True"
    )
