"""Strategies group parameters into units; a grouping that loses or repeats one is refused by name."""

import math
from collections.abc import Sequence
from typing import Any

import pytest

from sharding import (
    BucketTensorShardStrategy,
    ChunkShardStrategy,
    ParameterSpec,
    ShardStrategy,
    TensorShardStrategy,
    check_units,
    resolve_strategy,
)

Operators = Sequence[Sequence[ParameterSpec]]


def spec(name: str, *shape: int) -> ParameterSpec:
    return ParameterSpec(name, math.prod(shape), shape)


EMBED, W1, B1, W2, B2 = (
    spec("embed", 100, 8),
    spec("l1.weight", 8, 8),
    spec("l1.bias", 8),
    spec("l2.weight", 8, 8),
    spec("l2.bias", 8),
)
OPERATORS = [[EMBED], [W1, B1], [], [W2, B2]]


class WeightsThenBiases(ShardStrategy):
    """What a user may write: units that cross operators."""

    def units(self, operators: Operators) -> list[list[ParameterSpec]]:
        flat = [parameter for operator in operators for parameter in operator]
        groups = [[p for p in flat if len(p.shape) > 1], [p for p in flat if len(p.shape) <= 1]]
        return [group for group in groups if group]


class Answers(ShardStrategy):
    """Returns what it was told to, right or wrong."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def units(self, operators: Operators) -> list[list[ParameterSpec]]:
        answer: list[list[ParameterSpec]] = self.answer
        return answer


@pytest.mark.parametrize(
    ("strategy", "units", "spans_chunk"),
    [
        (TensorShardStrategy(), [[EMBED], [W1], [B1], [W2], [B2]], False),
        (BucketTensorShardStrategy(), [[EMBED], [W1, B1], [W2, B2]], False),
        (ChunkShardStrategy(), [[EMBED], [W1], [B1], [W2], [B2]], True),
        (WeightsThenBiases(), [[EMBED, W1, W2], [B1, B2]], False),
    ],
)
def test_each_strategy_has_its_units(
    strategy: ShardStrategy, units: list[list[ParameterSpec]], spans_chunk: bool
) -> None:
    assert strategy.units(OPERATORS) == units
    assert strategy.spans_chunk is spans_chunk
    check_units(strategy, OPERATORS, units)
    assert strategy.units([]) == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([[EMBED], [W1, B1], [W2]], r"left out parameters: l2\.bias"),
        ([[EMBED], [W1, B1], [W2, B2, W1]], r"more than once: l1\.weight"),
        ([[EMBED, EMBED], [W1, B1], [W2, B2]], r"more than once: embed"),
        ([[EMBED], [W1, B1], [W2, B2], [spec("ghost", 3)]], r"no operator has: ghost \(3,\)"),
        ([[spec("embed", 7)], [W1, B1], [W2, B2]], r"no operator has: embed \(7,\)"),
        ([[EMBED], [W1, B1], [], [W2, B2]], r"without parameters, at \[2\]"),
        ([EMBED, W1, B1, W2, B2], r"must return a list of lists of ParameterSpec"),
        ([["embed"]], r"must return a list of lists of ParameterSpec"),
        (None, r"must return a list of lists of ParameterSpec, got None"),
    ],
)
def test_a_wrong_grouping_is_refused_by_class_and_parameter(answer: Any, message: str) -> None:
    strategy = Answers(answer)
    with pytest.raises(ValueError, match=r"^Answers\.units\(\).*" + message):
        check_units(strategy, OPERATORS, strategy.units(OPERATORS))


def test_a_parameter_in_two_operators_is_refused() -> None:
    with pytest.raises(ValueError, match=r"more than one operator: embed"):
        check_units(TensorShardStrategy(), [[EMBED], [EMBED]], [[EMBED]])


def test_a_long_list_of_names_is_cut() -> None:
    operators = [[spec(f"p{index}", 1)] for index in range(20)]
    with pytest.raises(ValueError, match=r"p7 \(1,\) and 12 more"):
        check_units(Answers([]), operators, [])


def test_what_a_user_may_write_for_a_strategy() -> None:
    own = WeightsThenBiases()
    assert resolve_strategy(own) is own
    assert type(resolve_strategy(WeightsThenBiases)) is WeightsThenBiases
    assert type(resolve_strategy(None)) is ChunkShardStrategy
    assert type(resolve_strategy("tensor")) is TensorShardStrategy
    assert type(resolve_strategy("bucket")) is BucketTensorShardStrategy
    assert type(resolve_strategy("chunk")) is ChunkShardStrategy


def test_anything_else_names_what_was_found_and_what_is_valid() -> None:
    with pytest.raises(ValueError, match=r"'chnuk' is unknown; valid names are 'tensor', 'bucket', 'chunk'"):
        resolve_strategy("chnuk")
    with pytest.raises(TypeError, match=r"one of 'tensor', 'bucket', 'chunk'; got 3"):
        resolve_strategy(3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"got <class 'int'>"):
        resolve_strategy(int)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract"):
        resolve_strategy(ShardStrategy)
