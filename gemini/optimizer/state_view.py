"""`optimizer.state`: the parameters with state, and the names of their states. Reading a tensor gathers it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from gemini.access.full_access import kept_optimizer_state
from gemini.access.link import link_of
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.state_dict import scalar_of


class StateView(Mapping[Tensor, Mapping[str, Any]]):
    """The states by parameter. Only parameters that were updated or loaded count: torch looks at the length."""

    def __init__(self, states: ChunkStates) -> None:
        self._states = states

    def __iter__(self) -> Iterator[nn.Parameter]:
        for state in self._states.by_chunk.values():
            for managed, scalars in zip(state.chunk.parameters, state.scalars, strict=True):
                if scalars is not None:
                    yield managed.parameter

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __getitem__(self, parameter: Tensor) -> Mapping[str, Any]:
        """A view of one parameter's state, empty without state. Raises KeyError if it is not the model's."""
        link = link_of(parameter)
        if link is None:
            raise KeyError("not a parameter of the ShardedModel")
        state = self._states.by_chunk.get(link.managed.chunk.index)
        position = link.managed.position
        scalars = None if state is None else state.scalars[position]
        # In plain PyTorch `optimizer.state` is a defaultdict of dicts, so a parameter without state reads as an empty
        # one.
        if state is None or scalars is None:
            return {}
        return _ParameterState(link.managed.parameter, scalars, state.names(position))


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
