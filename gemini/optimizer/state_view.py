"""`optimizer.state`: the states by parameter, to read and to write as in plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gemini.access.full_access import kept_optimizer_state
from gemini.access.kept import KeptCopy, plain, shown
from gemini.access.states import States
from gemini.errors import GeminiError, UnsupportedError
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.chunk_states import ChunkOptimizerState, ChunkStates
from gemini.optimizer.elementwise import in_words
from gemini.optimizer.state_dict import check_entry, load_entry, scalar_of, unscalar
from gemini.optimizer.step import managed_of
from gemini.runtime.chunk import ManagedParameter

_ALIKE = "All ranks must edit optimizer.state alike"


class StateView(MutableMapping[Tensor, MutableMapping[str, Any]]):
    """The states by parameter. Only parameters that were updated or loaded count: torch looks at the length.

    Of optimizers that keep nothing of a parameter, such as SGD without momentum, none counts, as in plain PyTorch.
    Edits are collective: the next step sees them on all ranks.
    """

    def __init__(self, model: ShardedModel, states: ChunkStates) -> None:
        self._step = model.chunk_manager.step
        self._parts = States(model.chunk_manager)
        self._states = states

    def __iter__(self) -> Iterator[nn.Parameter]:
        for state in self._states.by_chunk.values():
            for managed in state.chunk.parameters:
                if len(_ParameterState(self, managed)):
                    yield managed.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, parameter: Tensor) -> MutableMapping[str, Any]:
        """A view of one parameter's state, empty without state. Raises KeyError if it is not the model's."""
        # In plain PyTorch `optimizer.state` is a defaultdict of dicts, so a parameter without state reads as an empty
        # one.
        return _ParameterState(self, self._managed(parameter))

    def __contains__(self, parameter: object) -> bool:
        # `Mapping` would ask `__getitem__`, which also answers for parameters without state.
        managed = managed_of(self._step, parameter)
        return managed is not None and len(_ParameterState(self, managed)) > 0

    def __setitem__(self, parameter: Tensor, entry: Mapping[str, Any]) -> None:
        """Set the whole state of a parameter. An empty one is that before the first step."""
        self.set_entry(self._managed(parameter), entry)

    def __delitem__(self, parameter: Tensor) -> None:
        """The parameter starts from fresh state. Raises KeyError if it has none."""
        if parameter not in self:
            raise KeyError("the parameter has no state")
        self.set_entry(self._managed(parameter), {})

    def pop(self, parameter: Tensor, *default: Any) -> Any:
        """As of a dict: the removed state is returned, in ordinary tensors. Raises KeyError without a default."""
        if parameter not in self:
            if default:
                return default[0]
            raise KeyError("the parameter has no state")
        removed = {name: plain(value) for name, value in self[parameter].items()}
        del self[parameter]
        return removed

    def clear(self) -> None:
        """All parameters start from fresh state."""
        for parameter in list(self):
            del self[parameter]

    def replace(self, states: Mapping[Any, Any]) -> None:
        """`optimizer.state = states`. Raises TypeError for what is no mapping."""
        if states is self:
            return
        if not isinstance(states, Mapping):
            raise TypeError(f"optimizer.state must be a mapping of parameters to states, found {type(states).__name__}")
        given = dict(states)
        self.clear()
        for parameter, entry in given.items():
            self[parameter] = entry

    def _managed(self, parameter: Tensor) -> ManagedParameter:
        managed = managed_of(self._step, parameter)
        if managed is None:
            raise KeyError("not a parameter of this optimizer's ShardedModel")
        return managed

    def of(self, managed: ManagedParameter) -> ChunkOptimizerState | None:
        """The state of the parameter's chunk. None: it has no memory, as that of frozen parameters."""
        return self._states.by_chunk.get(managed.chunk.index)

    def stamp(self, managed: ManagedParameter, name: str) -> object:
        """A value that is equal as long as nothing has changed this state or scalar. Local."""
        state = self.of(managed)
        return None if state is None else state.stamp(managed.position, name)

    def write(self, managed: ManagedParameter, name: str, value: Tensor) -> None:
        """Set a flat state to `value`, each rank its own part. Collective at stage 0. Raises ValueError for a shape."""
        self._begin(managed, name)
        with self._step.publishing(), torch.inference_mode(False), torch.no_grad():
            if value.shape != managed.shape:
                raise ValueError(
                    f"{name!r} of {managed.name!r} has shape {tuple(managed.shape)}, found {tuple(value.shape)}"
                )
            self._parts.of_optimizer(managed.chunk, name).set_of_each_rank(managed, managed.laid_out(value))

    def write_scalar(self, managed: ManagedParameter, name: str, value: Any) -> None:
        """Set what is no flat state, such as the number of steps. Collective."""
        state = self._begin(managed, name)
        value = plain(value)
        with self._step.publishing():
            words = f"{name} of {managed.name} = {in_words(value)}"
            self._step.communicator.agree(words.encode(), "an edit of optimizer.state", remedy=_ALIKE)
            # A dict of its own: parameters that are updated together share theirs.
            scalars = {**(state.scalars[managed.position] or {}), name: unscalar(name, value, state, managed.position)}
            state.set_scalars(managed.position, scalars)
            state.note_edit(managed.position, name)

    def set_entry(self, managed: ManagedParameter, entry: Mapping[str, Any]) -> None:
        """Set all that is kept of a parameter; nothing: it starts from fresh state. Collective."""
        state = self._begin(managed, "the state")
        entry = {name: plain(value) for name, value in entry.items()}
        with self._step.publishing(), torch.inference_mode(False), torch.no_grad():
            # The names are those of the group's settings as they are now.
            names = self._states.entry_names(managed, None)
            if entry:
                check_entry(entry, repr(managed.name), managed, names)
            words = ", ".join(
                name if isinstance(its, Tensor) and its.dim() else f"{name}={in_words(its)}"
                for name, its in entry.items()
            )
            self._step.communicator.agree(
                f"{managed.name}: {words}".encode(), "an edit of optimizer.state", remedy=_ALIKE
            )
            # The average of its weights is not the optimizer's: it stays, as torch's `AveragedModel` would.
            load_entry(self._parts, state, managed, entry or None, names, keeps_average=True)

    def _begin(self, managed: ManagedParameter, what: str) -> ChunkOptimizerState:
        self._step.check_idle(f"a write to {what!r} of {managed.name!r}")
        if self._step.grads.are_used:
            raise GeminiError(
                f"a write to {what!r} of {managed.name!r} in optimizer.state between backward() and step(), and "
                "update_in_backward=True has updated with what was before: write after the step"
            )
        state = self.of(managed)
        if state is None or self._states.group(managed) is None:
            raise UnsupportedError(
                f"{managed.name!r} has no optimizer state to write to: it is frozen, or in no param group"
            )
        return state


class _ParameterState(MutableMapping[str, Any]):
    """One parameter's scalars and whole tensors by name. Reading a tensor is collective and returns a copy.

    A write to the copy counts (`KeptState`).
    """

    def __init__(self, view: StateView, managed: ManagedParameter) -> None:
        self._view = view
        self._managed = managed

    @property
    def _scalars(self) -> Mapping[str, Any]:
        state = self._view.of(self._managed)
        return (None if state is None else state.scalars[self._managed.position]) or {}

    @property
    def _names(self) -> tuple[str, ...]:
        state, position = self._view.of(self._managed), self._managed.position
        return () if state is None or state.scalars[position] is None else state.names(position)

    def __iter__(self) -> Iterator[str]:
        yield from self._scalars
        yield from self._names

    def __len__(self) -> int:
        return len(self._scalars) + len(self._names)

    def __getitem__(self, name: str) -> Any:
        view, managed, scalars = self._view, self._managed, self._scalars
        if name in scalars:
            state = view.of(managed)
            assert state is not None, "it has scalars"
            value = scalar_of(name, scalars[name], state, managed.position)
            if not isinstance(value, Tensor):
                return value
            write = partial(view.write_scalar, managed, name)
        elif name in self._names:
            value, write = kept_optimizer_state(managed.parameter, name), partial(view.write, managed, name)
        else:
            raise KeyError(name)
        return shown(KeptCopy(f"{name!r} of {managed.name!r}", value, write, partial(view.stamp, managed, name)))

    def __setitem__(self, name: str, value: Any) -> None:
        value = plain(value)
        if name in self._names and isinstance(value, Tensor):
            self._view.write(self._managed, name, value)
        elif name in self._scalars:
            self._view.write_scalar(self._managed, name, value)
        else:
            self._view.set_entry(self._managed, {**self, name: value})

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._view.set_entry(self._managed, {other: value for other, value in self.items() if other != name})

    def clear(self) -> None:
        """The parameter starts from fresh state."""
        if len(self):
            self._view.set_entry(self._managed, {})

    def __repr__(self) -> str:
        return repr(dict(self))
