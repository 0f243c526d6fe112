"""`optimizer.state`: the parameters with state, and the names of their states. Reading a tensor gathers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gemini.access.full_access import kept_optimizer_state
from gemini.chunks.chunk import ManagedParameter
from gemini.manager.step import Step
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.param_groups import managed_of
from gemini.optimizer.state_dict import scalar_of


class StateView(Mapping[Tensor, Mapping[str, Any]]):
    """The states by parameter. Only parameters that were updated or loaded count: torch looks at the length.

    Of optimizers that keep nothing of a parameter, such as SGD without momentum, none counts, as in plain PyTorch.
    """

    def __init__(self, step: Step, states: ChunkStates) -> None:
        self._step = step
        self._states = states

    def __iter__(self) -> Iterator[nn.Parameter]:
        for state in self._states.by_chunk.values():
            for managed in state.chunk.parameters:
                if self._state_of(managed) is not None:
                    yield managed.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, parameter: Tensor) -> Mapping[str, Any]:
        """A view of one parameter's state, empty without state. Raises KeyError if it is not the model's."""
        managed = managed_of(self._step, parameter)
        if managed is None:
            raise KeyError("not a parameter of this optimizer's ShardedModel")
        # In plain PyTorch `optimizer.state` is a defaultdict of dicts, so a parameter without state reads as an empty
        # one.
        return self._state_of(managed) or {}

    def __contains__(self, parameter: object) -> bool:
        # `Mapping` would ask `__getitem__`, which also answers for parameters without state.
        managed = managed_of(self._step, parameter)
        return managed is not None and self._state_of(managed) is not None

    def _state_of(self, managed: ManagedParameter) -> _ParameterState | None:
        """A view of one parameter's state. None if it has none."""
        state = self._states.by_chunk.get(managed.chunk.index)
        scalars = None if state is None else state.scalars[managed.position]
        if state is None or scalars is None:
            return None
        # As a mapping it is False if it is empty.
        return _ParameterState(managed.parameter, scalars, state.names(managed.position)) or None


class _ParameterState(Mapping[str, Any]):
    """One parameter's scalars and whole tensors by name. Reading a tensor is collective and returns a copy."""

    def __init__(self, parameter: nn.Parameter, scalars: Mapping[str, Any], names: tuple[str, ...]) -> None:
        self._parameter = parameter
        self._scalars = scalars
        self._names = names

    def __iter__(self) -> Iterator[str]:
        yield from self._scalars
        yield from self._names

    def __len__(self) -> int:
        return len(self._scalars) + len(self._names)

    def __getitem__(self, name: str) -> Any:
        if name in self._scalars:
            return scalar_of(name, self._scalars[name])
        if name not in self._names:
            raise KeyError(name)
        return kept_optimizer_state(self._parameter, name)
