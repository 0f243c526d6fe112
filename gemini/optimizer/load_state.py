"""Loads an optimizer's state dict: a whole state of this optimizer, or of the plain one, becomes this rank's parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from gemini.access.states import FlatAccess, FullPrecisionAccess, States
from gemini.chunks.chunk import ManagedParameter
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_state import ChunkOptimizerState
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.in_words import state_in_words
from gemini.optimizer.runs import EntryNames
from gemini.optimizer.state_checks import check_state
from gemini.optimizer.state_dict import numbers_of
from gemini.placement.demand import Kind
from optim import HALF_DTYPES

_LOAD_ALIKE = "All ranks must load the same state dict"


class StateValues(Protocol):
    """Where the values of states come from."""

    def fill_state(self, access: FlatAccess, managed: ManagedParameter, name: str, value: Tensor) -> None:
        """Set one state of a parameter, for which a state dict has `value`. Collective."""

    def fill_master(self, access: FullPrecisionAccess, managed: ManagedParameter, value: Tensor) -> None:
        """Set the master of a parameter, or its weights if it has none, for which a state dict has `value`."""


class WholeTensors:
    """The values are in the state dict."""

    def fill_state(self, access: FlatAccess, managed: ManagedParameter, name: str, value: Tensor) -> None:
        access.set_whole(managed, managed.laid_out(value))

    def fill_master(self, access: FullPrecisionAccess, managed: ManagedParameter, value: Tensor) -> None:
        dtype = torch.float64 if managed.dtype is torch.float64 else torch.float32
        access.set_whole(managed, managed.laid_out(value, dtype))


class CheckedState(NamedTuple):
    """A state dict that fits an optimizer."""

    saved: Mapping[str, Any]  # with numbers as keys
    by_number: dict[int, ManagedParameter]
    names_of: Callable[[ManagedParameter], EntryNames]
    settings: list[dict[str, Any]]  # of each group, in the words of this optimizer's


def check_optimizer_state(
    model: ShardedModel, states: ChunkStates, groups: list[dict[str, Any]], saved: Mapping[str, Any]
) -> CheckedState:
    """See whether `saved` is of these groups and this kind of optimizer. Local; changes nothing.

    Raises ValueError or KeyError.
    """
    by_number = {number: model.chunk_manager.parameters[index] for index, number in numbers_of(groups).items()}
    saved = _numbered(saved)
    names_of = _names_by_group(states, saved.get("param_groups", ()))
    check_state(groups, saved, by_number, names_of)
    settings = [_hyperparameters_for(*pair) for pair in zip(groups, saved["param_groups"], strict=True)]
    for group, its in zip(groups, settings, strict=True):
        # A trial update refuses bad hyperparameters while nothing has changed.
        states.check_group({**group, **its})
    return CheckedState(saved, by_number, names_of, settings)


def load_optimizer_state(
    model: ShardedModel,
    states: ChunkStates,
    groups: list[dict[str, Any]],
    checked: CheckedState,
    values: StateValues | None = None,
) -> None:
    """Set all state. Frozen parameters in it get memory for their state, as in plain PyTorch. Collective.

    checked: of `check_optimizer_state` for this model and these groups.
    values: fills states and masters where the tensors of the dict only stand for them, on the device meta. None: the
        tensors have the values.

    Raises BudgetError if there is no room, before anything is changed.
    """
    values = values or WholeTensors()
    saved, by_number, names_of, settings = checked
    step, parts = model.chunk_manager.step, States(model.chunk_manager)
    model.trainability.apply_unfrozen()
    step.binding.write_back_all()  # edits of weights must not overwrite the loaded masters later
    # Every rank sets its own part of each parameter's state: with another step count it would be updated otherwise.
    step.communicator.agree(state_in_words(saved).encode(), "loaded optimizer state", remedy=_LOAD_ALIKE)
    masters = saved.get("masters", {})
    # The groups still have their old hyperparameters, which may need fewer states than are loaded.
    with states.expecting(_flat_names(by_number, saved, names_of)):
        model.trainability.take_state(_wanted(by_number, saved, states))
    for group, its in zip(groups, settings, strict=True):
        group.update(deepcopy(its))  # a scheduler writes to a learning rate that is a tensor
    for chunk_state in states.by_chunk.values():
        # The parameters are recreated from the present masters, which are about to be replaced.
        if chunk_state.chunk.holds_grad:
            step.payloads.restore_parameters(chunk_state.chunk)
    with torch.no_grad():
        for number, managed in by_number.items():
            its_state = states.by_chunk.get(managed.chunk.index)
            if its_state is not None:
                _load_entry(parts, its_state, managed, saved["state"].get(number), names_of(managed), values)
            if number in masters:
                _load_master(parts, managed, masters[number], values)


def _wanted(
    by_number: Mapping[int, ManagedParameter], saved: Mapping[str, Any], states: ChunkStates
) -> dict[int, frozenset[Kind]]:
    """The states, by chunk index, that `saved` has of frozen parameters and their chunks have no memory for."""
    wanted: dict[int, frozenset[Kind]] = {}
    for number, managed in by_number.items():
        chunk = managed.chunk
        if chunk.trainable:
            continue
        kinds = set()
        if number in saved["state"] and not states.has(chunk):
            kinds.add(Kind.OPTIM)
        if number in saved.get("masters", {}) and chunk.dtype in HALF_DTYPES and Kind.MASTER not in chunk.homes:
            kinds.add(Kind.MASTER)
        if kinds:
            wanted[chunk.index] = wanted.get(chunk.index, frozenset()) | kinds
    return wanted


def _hyperparameters_for(group: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a loaded param group, in the words of this optimizer's `group`."""
    found = {name: value for name, value in loaded.items() if name != "params"}
    if "adamw_mode" in group:
        # A group of torch's Adam or AdamW says so by this key alone.
        found.setdefault("adamw_mode", found.get("decoupled_weight_decay", group["adamw_mode"]))
        found.pop("decoupled_weight_decay", None)
    return found


def _names_by_group(
    states: ChunkStates, groups: Sequence[Mapping[str, Any]]
) -> Callable[[ManagedParameter], EntryNames]:
    """`states.entry_names`, asked once for each param group: for a torch optimizer the answer takes a trial update."""
    found: dict[int | None, EntryNames] = {}

    def names_of(managed: ManagedParameter) -> EntryNames:
        group = states.group(managed)
        if group not in found:
            found[group] = states.entry_names(managed, groups)
        return found[group]

    return names_of


def _flat_names(
    by_number: Mapping[int, ManagedParameter],
    saved: Mapping[str, Any],
    names_of: Callable[[ManagedParameter], EntryNames],
) -> dict[int, set[str]]:
    """The flat states that the dict has of some of its parameters, by chunk index. The sets are only counted."""
    found: dict[int, set[str]] = defaultdict(set)
    for number, entry in saved["state"].items():
        managed = by_number[number]
        names = names_of(managed)
        found[managed.chunk.index].update(
            name for name, value in entry.items() if _is_flat(name, value, managed, names)
        )
    return found


def _is_flat(name: str, value: Any, managed: ManagedParameter, names: EntryNames) -> bool:
    if not isinstance(value, Tensor) or value.shape != managed.shape:
        return False
    # A parameter without dimensions has the shape of its step count and other scalars.
    return name in names.flat if names.known is not None else name != "step"


def _load_entry(
    states: States,
    chunk_state: ChunkOptimizerState,
    managed: ManagedParameter,
    entry: Mapping[str, Any] | None,
    names: EntryNames,
    values: StateValues,
) -> None:
    """Set one parameter's state to `entry`. None: to that before its first step. Collective."""
    position = managed.position
    # States that the entry lacks are reset, not kept.
    chunk_state.discard(managed)
    if entry is None:
        return
    scalars: dict[str, Any] = {}
    chunk_state.set_scalars(position, scalars)
    for name, value in entry.items():
        # torch's SGD wrote None for a momentum buffer that the next step creates.
        if value is None:
            continue
        if _is_flat(name, value, managed, names):
            # A torch optimizer creates its states at the first step, and this one may not have stepped.
            if name not in chunk_state.flats:
                chunk_state.allocate([name], states.step.params)
            values.fill_state(states.of_optimizer(managed.chunk, name), managed, name, value)
            chunk_state.note_made(position, [name])
        else:
            scalars[name] = _unscalar(name, value, chunk_state)


def _load_master(states: States, managed: ManagedParameter, value: Tensor, values: StateValues) -> None:
    """Set one parameter's fp32 master, and the parameter to its rounding.

    Otherwise a parameter that the next step passes over would have its old value or the new one, as its chunk happens
    to be updated. A weight that is not 16 bits is its own master.
    """
    chunk = managed.chunk
    has_master = chunk.splits_master or Kind.MASTER in chunk.homes
    if has_master:
        managed.note_fractions()
    if has_master or chunk.dtype not in HALF_DTYPES:
        values.fill_master(states.full_precision(chunk), managed, value)


def _numbered(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict with numbers as keys. torch.distributed.checkpoint has names, in the same order."""
    names = [name for group in saved.get("param_groups", ()) for name in group.get("params", ())]
    if not any(isinstance(name, str) for name in names):
        return saved
    number_of = {name: number for number, name in enumerate(names)}
    parts = {key: saved[key] for key in ("state", "masters") if key in saved}
    return {**saved, **{key: {number_of.get(n, n): e for n, e in part.items()} for key, part in parts.items()}}


def _unscalar(name: str, value: Any, state: ChunkOptimizerState) -> Any:
    """A scalar in the form that this optimizer's update keeps: `step` as an int for our Adam, else as given."""
    if name == "step" and state.counts_steps:
        return int(value)
    return value.clone() if isinstance(value, Tensor) else value
