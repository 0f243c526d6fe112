"""Shard strategies: what is a unit?

A unit is a flat run of elements that is split evenly over the ranks in one piece. A strategy is a small pure class that
groups the parameters of the operators into units. It sees names and sizes, never a tensor, so it can be tried without a
model. Packing resolves the user's choice with `resolve_strategy`, calls `units`, and refuses a grouping that loses or
repeats a parameter with `check_units`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class ParameterSpec:
    """The facts of a parameter that a strategy may use."""

    name: str
    numel: int
    shape: tuple[int, ...]


class ShardStrategy(ABC):
    """Groups parameters into units. Subclass it and write `units`; every rank must get the same answer.

    Example:
        >>> class OneUnit(ShardStrategy):
        ...     def units(self, operators):
        ...         return [[parameter for operator in operators for parameter in operator]]
        >>> model = ShardedModel(torch.nn.Linear(8, 8), shard_strategy=OneUnit())
    """

    spans_chunk: ClassVar[bool] = False
    """True: all units that share a chunk are divided over the ranks as one."""

    @abstractmethod
    def units(self, operators: Sequence[Sequence[ParameterSpec]]) -> list[list[ParameterSpec]]:
        """The units of a model, in order of first use. Each parameter is in exactly one operator and one unit.

        operators: the parameters of each operator, in order of first use. Local; raises nothing.
        """


class TensorShardStrategy(ShardStrategy):
    """Each tensor is a unit: the simplest shards, and every rank holds a part of every tensor.

    Example:
        >>> model = ShardedModel(torch.nn.Linear(8, 8), shard_strategy=TensorShardStrategy())  # or "tensor"
    """

    def units(self, operators: Sequence[Sequence[ParameterSpec]]) -> list[list[ParameterSpec]]:
        return [[parameter] for operator in operators for parameter in operator]


class BucketTensorShardStrategy(ShardStrategy):
    """All tensors of one operator are a unit: a bias never travels alone.

    Example:
        >>> model = ShardedModel(torch.nn.Linear(8, 8), shard_strategy=BucketTensorShardStrategy())  # or "bucket"
    """

    def units(self, operators: Sequence[Sequence[ParameterSpec]]) -> list[list[ParameterSpec]]:
        return [list(operator) for operator in operators if operator]


class ChunkShardStrategy(TensorShardStrategy):
    """The whole chunk is a unit: one collective a chunk, least padding. The packer merges a chunk's units.

    Example:
        >>> model = ShardedModel(torch.nn.Linear(8, 8), shard_strategy=ChunkShardStrategy())  # or "chunk", the default
    """

    spans_chunk: ClassVar[bool] = True


_NAMED: dict[str, type[ShardStrategy]] = {
    "tensor": TensorShardStrategy,
    "bucket": BucketTensorShardStrategy,
    "chunk": ChunkShardStrategy,
}


def resolve_strategy(strategy: ShardStrategy | type[ShardStrategy] | str | None) -> ShardStrategy:
    """The strategy object for what a user may write; None is `ChunkShardStrategy`.

    Raises ValueError for an unknown name and TypeError for what is no strategy.
    """
    if strategy is None:
        return ChunkShardStrategy()
    if isinstance(strategy, ShardStrategy):
        return strategy
    if isinstance(strategy, type) and issubclass(strategy, ShardStrategy):
        return strategy()
    valid = ", ".join(repr(name) for name in _NAMED)
    if isinstance(strategy, str):
        if strategy in _NAMED:
            return _NAMED[strategy]()
        raise ValueError(f"shard_strategy={strategy!r} is unknown; valid names are {valid}")
    raise TypeError(
        f"shard_strategy must be a ShardStrategy, a subclass of it, None or one of {valid}; got {strategy!r}"
    )


def check_units(
    strategy: ShardStrategy,
    operators: Sequence[Sequence[ParameterSpec]],
    units: Sequence[Sequence[ParameterSpec]],
) -> None:
    """Raise ValueError unless the units hold every parameter of the operators once, and nothing else."""
    who = f"{type(strategy).__name__}.units()"
    if not _is_nested(units):
        raise ValueError(f"{who} must return a list of lists of ParameterSpec, got {str(units)[:200]}")
    # Specs are equal only with name, size and shape: a spec of a known name with another size is one that no operator
    # has.
    given = Counter(parameter for operator in operators for parameter in operator)
    found = Counter(parameter for unit in units for parameter in unit)
    wrong = {
        "was given parameters in more than one operator": [each for each, count in given.items() if count > 1],
        "returned parameters that no operator has": [each for each in found if each not in given],
        "left out parameters": [each for each in given if each not in found],
        "returned parameters more than once": [each for each, count in found.items() if count > 1],
    }
    for what, parameters in wrong.items():
        if parameters:
            raise ValueError(f"{who} {what}: {_names(parameters)}")
    if empty := [index for index, unit in enumerate(units) if not unit]:
        raise ValueError(f"{who} returned units without parameters, at {empty[:8]}")


def _is_nested(units: object) -> bool:
    return isinstance(units, Sequence) and all(
        isinstance(unit, Sequence) and all(isinstance(parameter, ParameterSpec) for parameter in unit) for unit in units
    )


def _names(parameters: Iterable[ParameterSpec]) -> str:
    # With the shape, because a strategy may return a known name with another size.
    shown = [f"{parameter.name} {parameter.shape}" for parameter in parameters]
    more = f" and {len(shown) - 8} more" if len(shown) > 8 else ""
    return ", ".join(shown[:8]) + more
