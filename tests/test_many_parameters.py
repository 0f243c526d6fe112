"""Wrapping, training and everything else takes time in proportion to the parameters and the chunks."""

from typing import Any

import pytest
import torch

from tests.harness.calls import CHUNK_NUMEL, USES, growing_phases, moved_by_states
from tests.harness.on_ranks import in_soak

ON_HOST = {"chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}
MANY_SLOTS = {**ON_HOST, "bytes_per_layer": 1024}


@pytest.mark.parametrize(
    "arguments",
    [
        *in_soak({"chunk_size": CHUNK_NUMEL}),
        *in_soak({**ON_HOST, "model_data_memory": 8 * 1024}),
        *in_soak(MANY_SLOTS),
        *in_soak({"chunk_size": CHUNK_NUMEL, "bytes_per_layer": 5 * 1024, "shard_strategy": "tensor"}),
        *in_soak({"chunk_size": CHUNK_NUMEL, "tied": True}),
    ],
    ids=["chunks of one parameter", "few slots", "many slots", "some on the device", "tied"],
)
def test_no_function_runs_more_than_twice_as_often_for_twice_the_layers(arguments: dict[str, Any]) -> None:
    assert growing_phases(16, **arguments) == {}


def test_a_fetch_among_twice_the_slots_looks_at_no_more_of_them() -> None:
    assert growing_phases(16, [], **MANY_SLOTS) == {}


@pytest.mark.soak
@pytest.mark.parametrize("arguments", [{}, *in_soak({"chunk_size": 2**20})], ids=["searched", "one chunk"])
def test_a_chunk_of_many_parameters_is_wrapped_and_trained_in_proportion(arguments: dict[str, Any]) -> None:
    """What gathers or loads a single parameter looks at its whole chunk: loops of that are left out here."""
    loops = ("load_into_module", "use_each_parameter")
    assert growing_phases(16, [use for use in USES if use not in loops], **arguments) == {}


@pytest.mark.parametrize("arguments", [{}, {"dtype": torch.bfloat16}, {**ON_HOST, "dtype": torch.bfloat16}], ids=str)
def test_loops_over_states_move_each_parameter_and_not_its_chunk(arguments: dict[str, Any]) -> None:
    few, many = (moved_by_states(count, **{**arguments, "chunk_size": 2**16}) for count in (8, 16))
    assert many < 2.1 * few, "elements for twice the layers; quadratic is 4"
