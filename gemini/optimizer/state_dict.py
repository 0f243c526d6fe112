"""State dicts, saved and loaded, and hashes of states."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import wraps
from itertools import count, islice
from numbers import Real
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gemini.access.link import link_of
from gemini.access.states import FlatAccess, FullPrecisionAccess, StateAccess, States
from gemini.access.weights import refuse_rank0_only
from gemini.log import warn_at_script
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.averages import AVERAGE, OTHERS
from gemini.optimizer.chunk_states import ChunkOptimizerState, ChunkStates
from gemini.optimizer.elementwise import state_in_words
from gemini.optimizer.several import WHOSE
from gemini.optimizer.shards import EntryNames
from gemini.placement.demand import Kind
from gemini.ranks.communicator import Communicator
from gemini.ranks.parts import gathered, is_dtensor
from gemini.runtime.chunk import ManagedParameter
from optim import HALF_DTYPES

# -- `state_hash`: one hash of all training state, to compare runs bit by bit.


def state_hash(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
    """SHA-256, in hexadecimal, of all parameters and buffers, and of the optimizer's state if one is given.

    A `ShardedModel` on any number of ranks has the hash of the plain module with the same bits, so two runs can be
    compared by one line of their logs. Collective for a sharded model.

    Args:
        model: a `ShardedModel` or a plain module.
        optimizer: its states and fp32 masters are part of the hash, its hyperparameters are not.

    Raises what `state_dict()` of the two raises, such as GeminiError inside a forward.

    Example:
        >>> plain = state_hash(module)
        >>> state_hash(ShardedModel(module)) == plain
        True
    """
    digest = hashlib.sha256()
    _add(digest, "model", model.state_dict())
    if optimizer is not None:
        saved = optimizer.state_dict()
        _add(digest, "state", saved["state"])
        if averages := saved.get(AVERAGE, {}).get(OTHERS):
            _add(digest, OTHERS, averages)
        masters = saved.get("masters")
        if masters:
            _add(digest, "masters", masters)
    return digest.hexdigest()


def _add(digest: Any, name: str, value: Any) -> None:
    if isinstance(value, Mapping):
        # Keys are sorted, because the hash must not depend on the order in which entries were added.
        for key in sorted(value, key=str):
            _add(digest, f"{name}.{key}", value[key])
        return
    digest.update(name.encode())
    if is_dtensor(value):
        value = gathered(value)
    if isinstance(value, Tensor):
        # Dtype and shape are hashed too: tensors with equal bytes may still differ.
        flat = value.detach().cpu().contiguous().reshape(-1)
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        # numpy has no bfloat16, so the elements are taken as bytes.
        digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"")
    else:
        digest.update(repr(value).encode())


# -- The user's hooks on the state dicts of an optimizer, which run as in `torch.optim.Optimizer`'s own methods.


Its = TypeVar("Its", bound=Optimizer)
Arguments = ParamSpec("Arguments")
State = dict[str, Any]


def saves_with_hooks(
    state_dict: Callable[Concatenate[Its, Arguments], State],
) -> Callable[Concatenate[Its, Arguments], State]:
    """Run the hooks before and after `state_dict`. The latter may return another dict.

    On a rank that keeps nothing of the state there is nothing for them to see.
    """

    @wraps(state_dict)
    def hooked(self: Its, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> State:
        # torch runs these hooks inside its own `state_dict` and `load_state_dict`, which a `ShardedOptimizer`
        # overrides.
        with _publishing(self):
            for before in self._optimizer_state_dict_pre_hooks.values():
                before(self)
        state = state_dict(self, *args, **kwargs)
        for after in self._optimizer_state_dict_post_hooks.values() if state else ():
            replaced = after(self, state)
            state = state if replaced is None else replaced
        return state

    return hooked


def loads_with_hooks(load_state_dict: Callable[[Its, State], None]) -> Callable[[Its, State], None]:
    """Run the hooks before and after `load_state_dict`. The former may return another dict to load."""

    @wraps(load_state_dict)
    def hooked(self: Its, state_dict: State) -> None:
        state = dict(state_dict)  # hooks may change it, and it is the user's
        with _publishing(self):
            for before in self._optimizer_load_state_dict_pre_hooks.values():
                replaced = before(self, state)
                state = state if replaced is None else replaced
        load_state_dict(self, state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    return hooked


def _publishing(optimizer: Any) -> AbstractContextManager[None]:
    """Around hooks that run before a collective, in which the other ranks would wait for one that failed here.

    For those behind it nobody waits: ranks that have none of them, or none that fails, may go on.
    """
    communicator: Communicator = optimizer.model.chunk_manager.communicator
    return communicator.publishing()


# -- What an optimizer's state dict must have to be this optimizer's: checked before anything is changed.


_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum", "alpha", "rho", "etas")
"""Hyperparameters by which optimizers are told apart: a param group that lacks one of this optimizer's is foreign."""


def check_state(
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    by_number: Mapping[int, ManagedParameter],
    names_of: Callable[[ManagedParameter], EntryNames],
) -> None:
    """Raises ValueError unless `saved` fits the param groups and parameters of this optimizer, and names what is wrong.

    by_number: the parameters by their number in the state dict. names_of: what an entry of a parameter has.
    """
    for key in ("state", "param_groups"):
        if key not in saved:
            raise ValueError(
                f"this is not an optimizer state dict: it has no {key!r} (found {sorted(map(str, saved))})"
            )
    sizes, loaded = ([len(group["params"]) for group in each] for each in (groups, saved["param_groups"]))
    if sizes != loaded:
        raise ValueError(f"the state dict has param groups of {loaded} parameters, this optimizer of {sizes}")
    for group, loaded_group in zip(groups, saved["param_groups"], strict=True):
        if group.get(WHOSE) != loaded_group.get(WHOSE):
            raise ValueError(
                f"a param group of the state dict is of {loaded_group.get(WHOSE)!r} and this optimizer's of "
                f"{group.get(WHOSE)!r}: make it of the same optimizers, in the same order"
            )
        missing = [name for name in _HYPERPARAMETERS if name in group and name not in loaded_group]
        if missing:
            raise ValueError(
                f"a param group of the state dict has no {', '.join(missing)}, found "
                f"{sorted(name for name in loaded_group if name != 'params')}: it is another optimizer's"
            )
    for part in ("state", "masters"):
        if not isinstance(saved.get(part, {}), Mapping):
            raise ValueError(f"{part!r} of an optimizer state dict must be a dict, found {type(saved[part]).__name__}")
        for number, entry in saved.get(part, {}).items():
            if number not in by_number:
                raise ValueError(f"{part} of parameter {number}: this optimizer has no such parameter")
            who = f"parameter {number} ({by_number[number].name})"
            if part == "masters":
                _check_tensor("master", entry, who, by_number[number])
            elif not isinstance(entry, Mapping):
                raise ValueError(f"state of {who} is a {type(entry).__name__}, not a dict")
            else:
                check_entry(entry, who, by_number[number], names_of(by_number[number]))


def check_entry(entry: Mapping[str, Any], who: str, managed: ManagedParameter, names: EntryNames) -> None:
    """Raises ValueError unless the entry has the keys and shapes of this optimizer's for a stepped parameter."""
    for name, value in entry.items():
        if name == "step" and not (_is_number(value) and 0 <= float(value) < math.inf):
            raise ValueError(f"step of {who} is not a number of steps: {value!r}")
        has_elements = isinstance(value, Tensor) and value.dim() > 0 and name != "step"
        is_flat = name in names.flat or (has_elements and not names.has_other_shapes)
        if is_flat and value is not None:
            _check_tensor(name, value, who, managed)
    missing = [name for name in names.needed if entry.get(name) is None]
    foreign = [str(name) for name in entry if names.known is not None and name not in names.known]
    if missing or foreign:
        keeps = ", ".join(names.known or names.needed)
        raise ValueError(
            f"state of {who} has {', '.join(map(str, entry)) or 'nothing'}; of a parameter that was stepped this "
            f"optimizer keeps {keeps}. Either the state dict is another optimizer's, or a part of it is missing. To "
            "start a parameter from fresh state, leave it out of 'state'"
        )


def _check_tensor(name: str, value: Any, who: str, managed: ManagedParameter) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} of {who} is a {type(value).__name__}, not a tensor")
    if not _has_shape(value, managed):
        raise ValueError(f"{name} of {who} has shape {tuple(value.shape)}, expected {tuple(managed.shape)}")


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_dtensor(value)


def _has_shape(value: Any, managed: ManagedParameter) -> bool:
    """Whether it is a tensor of this rank's part of a parameter, or a `DTensor` of the whole."""
    if not isinstance(value, Tensor):
        return False
    return value.shape == (managed.whole_shape if is_dtensor(value) else managed.shape)


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)


# -- The optimizer's state as whole tensors, in torch.optim's format plus fp32 masters.
#
# {"state": {number: {"step": ..., "exp_avg": whole tensor, ...}}, "param_groups": [...], "masters": {number: tensor}}
#
# Numbers count parameters through the param groups, as torch does, so a plain optimizer's state dict loads here
# (`load_optimizer_state`) and this one's (without "masters") loads there.


def whole_optimizer_state(
    model: ShardedModel, states: ChunkStates, groups: list[dict[str, Any]], rank0_only: bool = False
) -> dict[str, Any]:
    """Whole copies of the state in host memory, on all ranks or on rank 0 only. Collective.

    With `rank0_only` the other ranks take part in the collectives and keep nothing.
    """
    step, parts = model.chunk_manager.step, States(model.chunk_manager)
    keep, shards = not rank0_only or step.communicator.rank == 0, model.chunk_manager.row_shards
    step.check_idle("optimizer.state_dict()")
    refuse_rank0_only(parts, rank0_only)
    numbers, parameters = numbers_of(groups), model.chunk_manager.parameters
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, Tensor] = {}
    averages: dict[int | str, Tensor] = {}  # of parameters without an entry
    names = names_by_chunk(step.communicator, states)
    with torch.no_grad():
        for chunk in step.chunks:
            known = [managed for managed in chunk.parameters if managed.index in numbers]
            if states.has(chunk):
                its = parts, states.by_chunk[chunk.index], names[chunk.index]
                entries, others = _whole_entries(*its, known if keep else (), chunk.parameters if keep else ())
                state |= {numbers[index]: entry for index, entry in entries.items()}
                averages |= {_key_of(parameters[index], numbers): average for index, average in others.items()}
            if Kind.MASTER in chunk.homes:
                mastered = [managed for managed in known if managed.owns_master]
                masters |= {
                    numbers[managed.index]: master
                    for managed, master in _copies(parts, parts.full_precision(chunk), mastered if keep else ())
                }
        if shards is None:
            _join_parts(model, numbers, state, masters, averages)
    if rank0_only and step.communicator.everyone.rank != 0:
        return {}
    counting = count()
    packed = [{**group, "params": list(islice(counting, len(group["params"])))} for group in groups]
    for group in packed:
        if "adamw_mode" in group:  # by which torch's Adam tells whether the state is AdamW's
            group["decoupled_weight_decay"] = group["adamw_mode"]
    whole: dict[str, Any] = {
        "state": dict(sorted(state.items())),
        "param_groups": packed,
        "masters": dict(sorted(masters.items())),
    }
    if states.averages is not None:
        whole[AVERAGE] = {**states.averages.counts(), OTHERS: averages}
    return whole


def _join_parts(
    model: ShardedModel,
    numbers: Mapping[int, int],
    state: dict[int, dict[str, Any]],
    masters: dict[int, Tensor],
    averages: dict[int | str, Tensor],
) -> None:
    """Put wholes in the place of tensors of which tensor parallelism leaves a part here. Collective over the parts."""
    managed_of = {number: model.chunk_manager.parameters[index] for index, number in numbers.items()}
    for number, managed in sorted(managed_of.items()):  # other parts may have other chunks, and have these numbers
        part = managed.part
        if part is None:
            continue
        entry = state.get(number, {})
        for name, value in sorted(entry.items()):
            if isinstance(value, Tensor) and value.shape == managed.shape and name != "step":
                entry[name] = part.whole(value)
        if number in masters:
            masters[number] = part.whole(masters[number])
    for managed in model.chunk_manager.parameters:
        key = _key_of(managed, numbers)
        if managed.part is not None and key in averages:
            averages[key] = managed.part.whole(averages[key])


def _parts_of(saved: Mapping[str, Any], by_number: Mapping[int, ManagedParameter]) -> Mapping[str, Any]:
    """A state dict of wholes with this rank's parts in their place, where tensor parallelism divides parameters."""
    if all(managed.part is None for managed in by_number.values()):
        return saved

    def own(number: int, value: Any) -> Any:
        part = by_number[number].part if number in by_number else None
        # A `DTensor` is gathered when it is set: all of them at once may not fit.
        is_whole = part is not None and _is_plain(value) and value.shape == part.shape
        return part.of(value) if part is not None and is_whole else value

    state = {n: {name: own(n, each) for name, each in entry.items()} for n, entry in saved.get("state", {}).items()}
    masters = {n: own(n, each) for n, each in saved.get("masters", {}).items()}
    return {**saved, "state": state, **({"masters": masters} if "masters" in saved else {})}


def names_by_chunk(communicator: Communicator, states: ChunkStates) -> dict[int, list[str]]:
    """The flat states of each chunk that exist on any rank, in sorted order. Collective."""
    # A torch optimizer creates states lazily, so ranks may have different ones, and gathers need one order.
    made = [f"{index} {name}" for index, state in states.by_chunk.items() for name in state.flats]
    found: dict[int, list[str]] = defaultdict(list)
    for words in communicator.agree_on_names(made):
        index, _, name = words.partition(" ")
        found[int(index)].append(name)
    return found


def _whole_entries(
    states: States,
    chunk_state: ChunkOptimizerState,
    names: Sequence[str],
    known: Sequence[ManagedParameter],
    averaged: Sequence[ManagedParameter],
) -> tuple[dict[int, dict[str, Any]], dict[int, Tensor]]:
    """The entries of one chunk's parameters, by parameter index, and the averages of those without one. Collective.

    known: the parameters that may have an entry. averaged: those whose averages count.
    """
    chunk, scalars = chunk_state.chunk, chunk_state.scalars
    entries = {
        managed.index: {name: scalar_of(name, value, chunk_state, managed.position) for name, value in its.items()}
        for managed in known
        if (its := scalars[managed.position]) is not None
    }
    without = dict[int, Tensor]()
    for name in names:
        # Parameters that no step has updated, and those in no group, are averaged too.
        some = averaged if name == AVERAGE else [each for each in known if each.index in entries]
        wanted = [each for each in some if name in chunk_state.names(each.position)]
        for managed, copy in _copies(states, states.of_optimizer(chunk, name), wanted):
            if managed.index in entries:
                entries[managed.index][name] = copy
            else:
                without[managed.index] = copy
    return {index: entry for index, entry in entries.items() if entry}, without  # SGD without momentum keeps nothing


def _key_of(managed: ManagedParameter, numbers: Mapping[int, int]) -> int | str:
    """A parameter's key among averages: its number in the state dict, or its name if it is in no param group."""
    return numbers.get(managed.index, managed.name)


def _copies(
    states: States, access: StateAccess, wanted: Sequence[ManagedParameter]
) -> list[tuple[ManagedParameter, Tensor]]:
    """Copies of a state of parameters of one chunk, whole or as `DTensor`s of rows. Collective over the data."""
    shards = states.manager.row_shards
    if shards is None:
        copies = access.copies(wanted)
        return [(each, copies[each.index]) for each in wanted]
    copies = access.copies(wanted, shards.rows)
    return [(each, states.shown_rows(each, copies[each.index])) for each in wanted]


def numbers_of(groups: list[dict[str, Any]]) -> dict[int, int]:
    """Map each parameter's index in the model to its number in torch's state dict."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return {link.managed.index: n for n, p in enumerate(parameters) if (link := link_of(p)) is not None}


def scalar_of(name: str, value: Any, state: ChunkOptimizerState, position: int) -> Any:
    """`step` as torch writes it: a 0-dim fp32 tensor. Of a parameter that is updated whole: as its optimizer has it."""
    if name == "step" and not isinstance(value, Tensor) and not state.is_whole(position):
        return torch.tensor(float(value), dtype=torch.float32, device="cpu")
    return value.clone() if isinstance(value, Tensor) else value


# -- Loads an optimizer's state dict: a whole state of this optimizer, or of the plain one, becomes this rank's parts.


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
        access.set_whole(managed, managed.laid_out(_own(managed, value)))

    def fill_master(self, access: FullPrecisionAccess, managed: ManagedParameter, value: Tensor) -> None:
        dtype = torch.float64 if managed.dtype is torch.float64 else torch.float32
        access.set_whole(managed, managed.laid_out(_own(managed, value), dtype))


def _own(managed: ManagedParameter, value: Tensor) -> Tensor:
    # What is plain was cut before: see `_parts_of`.
    return managed.own(value.detach()) if is_dtensor(value) else value


class CheckedState(NamedTuple):
    """A state dict that fits an optimizer."""

    saved: Mapping[str, Any]  # with numbers as keys
    by_number: dict[int, ManagedParameter]
    names_of: Callable[[ManagedParameter], EntryNames]
    settings: list[dict[str, Any]]  # of each group, in the words of this optimizer's
    averages: dict[ManagedParameter, Tensor]  # of parameters without an entry


def check_optimizer_state(
    model: ShardedModel, states: ChunkStates, groups: list[dict[str, Any]], saved: Mapping[str, Any]
) -> CheckedState:
    """See whether `saved` is of these groups and this kind of optimizer. Local; changes nothing.

    Raises ValueError or KeyError.
    """
    by_number = {number: model.chunk_manager.parameters[index] for index, number in numbers_of(groups).items()}
    saved = _parts_of(_numbered(saved), by_number)
    if states.averages is None:
        saved = _without_averages(saved)
    names_of = _names_by_group(states, saved.get("param_groups", ()))
    check_state(groups, saved, by_number, names_of)
    settings = [_hyperparameters_for(*pair) for pair in zip(groups, saved["param_groups"], strict=True)]
    for group, its in zip(groups, settings, strict=True):
        # A trial update refuses bad hyperparameters while nothing has changed.
        states.check_group({**group, **its})
    averages = _averages_in(model, saved, by_number, states.averages is not None)
    return CheckedState(saved, by_number, names_of, settings, averages)


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
    saved, by_number, names_of, settings, averages = checked
    step, parts = model.chunk_manager.step, States(model.chunk_manager)
    model.trainability.apply_unfrozen()
    step.binding.write_back_all()  # edits of weights must not overwrite the loaded masters later
    # Every rank sets its own part of each parameter's state: with another step count it would be updated otherwise.
    step.communicator.agree(state_in_words(saved).encode(), "loaded optimizer state", remedy=_LOAD_ALIKE)
    masters = saved.get("masters", {})
    # The groups still have their old hyperparameters, which may need fewer states than are loaded.
    with states.expecting(_flat_names(by_number, saved, names_of)):
        model.trainability.take_state(_wanted(by_number, saved, states, averages))
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
                load_entry(parts, its_state, managed, saved["state"].get(number), names_of(managed), values)
            if number in masters:
                _load_master(parts, managed, masters[number], values)
        if states.averages is not None:
            for chunk_state in states.by_chunk.values():
                for managed in chunk_state.chunk.parameters:
                    if managed in averages:
                        _load_average(parts, chunk_state, managed, averages[managed], values)
                    elif states.group(managed) is None:
                        # It is not of the training that was loaded: the next averaging begins it.
                        chunk_state.lacks_average[managed.position] = True


def _averages_in(
    model: ShardedModel, saved: Mapping[str, Any], by_number: Mapping[int, ManagedParameter], has_averages: bool
) -> dict[ManagedParameter, Tensor]:
    """The averages that a state dict has of parameters without an entry. Raises ValueError for what is none.

    has_averages: whether this optimizer has some, which else ignores them.
    """
    found: dict[ManagedParameter, Tensor] = {}
    if not has_averages:
        return found
    by_name = {managed.name: managed for managed in model.chunk_manager.parameters}
    for key, value in (saved.get(AVERAGE) or {}).get(OTHERS, {}).items():
        managed = by_name.get(key) if isinstance(key, str) else by_number.get(key)
        if managed is None:
            raise ValueError(f"the average of parameter {key!r}: this model has no such parameter")
        if managed.part is not None and isinstance(value, Tensor) and value.shape == managed.part.shape:
            value = managed.part.of(value)
        _check_tensor(AVERAGE, value, f"parameter {key!r} ({managed.name})", managed)
        found[managed] = value
    return found


def _without_averages(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict without the averages of an optimizer that had `ema`, with a warning where it has some."""
    if AVERAGE not in saved:
        return saved
    warn_at_script("the state dict has averages of the weights, and this optimizer was made without ema: they are lost")
    state = {
        number: {name: value for name, value in entry.items() if name != AVERAGE}
        for number, entry in saved["state"].items()
    }
    return {**saved, "state": state}


def _wanted(
    by_number: Mapping[int, ManagedParameter],
    saved: Mapping[str, Any],
    states: ChunkStates,
    averages: Mapping[ManagedParameter, Tensor],
) -> dict[int, frozenset[Kind]]:
    """The states, by chunk index, that `saved` has of frozen parameters and their chunks have no memory for."""
    wanted: dict[int, frozenset[Kind]] = {}
    for number, managed in by_number.items():
        chunk = managed.chunk
        if chunk.trainable:
            continue
        kinds = set()
        if (number in saved["state"] or managed in averages) and not states.has(chunk):
            kinds.add(Kind.OPTIM)
        if number in saved.get("masters", {}) and chunk.dtype in HALF_DTYPES and Kind.MASTER not in chunk.homes:
            kinds.add(Kind.MASTER)
        if kinds:
            wanted[chunk.index] = wanted.get(chunk.index, frozenset()) | kinds
    return wanted


def _hyperparameters_for(group: Mapping[str, Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a loaded param group, in the words of this optimizer's `group`."""
    # How moments are stored is this optimizer's choice: loaded ones are rounded to it.
    found = {name: value for name, value in loaded.items() if name not in ("params", "optim_bits")}
    if "adamw_mode" in group:
        # A group of torch's Adam or AdamW says so by this key alone.
        found.setdefault("adamw_mode", found.get("decoupled_weight_decay", group["adamw_mode"]))
        found.pop("decoupled_weight_decay", None)
    return found


def _names_by_group(
    states: ChunkStates, groups: Sequence[Mapping[str, Any]]
) -> Callable[[ManagedParameter], EntryNames]:
    """`states.entry_names`, asked once for each param group: for a torch optimizer the answer takes a trial update.

    Once for each shape, too, where it decides which states there are.
    """
    found: dict[tuple[int | None, torch.Size | None], EntryNames] = {}

    def names_of(managed: ManagedParameter) -> EntryNames:
        of_any_shape, key = (states.group(managed), None), (states.group(managed), managed.shape)
        if of_any_shape in found:
            return found[of_any_shape]
        if key not in found:
            names = states.entry_names(managed, groups)
            found[key if names.has_other_shapes else of_any_shape] = names
            return names
        return found[key]

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
    if not _has_shape(value, managed):
        return False
    # A parameter without dimensions has the shape of its step count and other scalars.
    return name in names.flat if names.known is not None else name != "step"


def load_entry(
    states: States,
    chunk_state: ChunkOptimizerState,
    managed: ManagedParameter,
    entry: Mapping[str, Any] | None,
    names: EntryNames,
    values: StateValues | None = None,
    *,
    keeps_average: bool = False,
) -> None:
    """Set one parameter's state to `entry`. None: to that before its first step. Collective.

    keeps_average: of its weights, where the entry has none.
    """
    position, values = managed.position, values or WholeTensors()
    # States that the entry lacks are reset, not kept.
    chunk_state.discard(managed, keeps_average=keeps_average)
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
            if name == AVERAGE:
                _load_average(states, chunk_state, managed, value, values)
                continue
            values.fill_state(states.of_optimizer(managed.chunk, name), managed, name, value)
            chunk_state.note_made(position, [name])
        else:
            scalars[name] = unscalar(name, value, chunk_state, position)


def _load_average(
    states: States, chunk_state: ChunkOptimizerState, managed: ManagedParameter, value: Tensor, values: StateValues
) -> None:
    """Set the average of one parameter's weights."""
    values.fill_state(states.of_optimizer(managed.chunk, AVERAGE), managed, AVERAGE, value)
    chunk_state.note_average(managed.position)


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


def unscalar(name: str, value: Any, state: ChunkOptimizerState, position: int) -> Any:
    """A scalar in the form that this optimizer's update keeps: `step` as an int for our Adam, else as given."""
    if name == "step" and state.counts_steps(position):
        return int(value)
    return value.clone() if isinstance(value, Tensor) else value
