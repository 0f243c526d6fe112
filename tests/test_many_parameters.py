"""Wrapping and training take time in proportion to the parameters and the chunks."""

from typing import Any

import pytest

from tests.calls import CHUNK_NUMEL, growth

MAX_GROWTH = 2.3  # for twice the model: quadratic is 4


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"chunk_size": 2**20},
        {"chunk_size": CHUNK_NUMEL},
        {"chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu", "model_data_memory": 32 * 1024},
        {"chunk_size": CHUNK_NUMEL, "model_data_memory": 64 * 1024, "shard_strategy": "tensor"},
    ],
    ids=["searched", "one chunk", "chunks of one parameter", "few slots", "some on the device"],
)
def test_twice_the_layers_cost_twice_the_calls(arguments: dict[str, Any]) -> None:
    found = growth(100, **arguments)
    assert max(found.values()) < MAX_GROWTH, found
