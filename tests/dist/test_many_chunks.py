"""On several ranks, too, time and what ranks tell one another grow in proportion to the chunks."""

from typing import Any

import pytest
import torch

from tests.dist import growth_cases as cases
from tests.harness.calls import CHUNK_NUMEL
from tests.harness.on_ranks import in_soak
from tests.harness.ranks import RankPool

# Every other one is a set of its own: what is loaded was saved before it.
USES = ["state_dict", "set_each_parameter", "load_state_dict", "copy", "set_each_state", "freeze_and_train"]


@pytest.mark.soak
@pytest.mark.parametrize("chooses", [*in_soak(False), True], ids=["ranks alike", "other branches"])
def test_twice_the_layers_cost_twice_the_agreement(ranks: RankPool, chooses: bool) -> None:
    for found, growth_of_bytes in ranks(2).run(cases.first_step, 10, chooses):
        assert found == {}
        assert growth_of_bytes < 2.3, "for twice the layers; quadratic is 4"


@pytest.mark.parametrize(
    ("arguments", "uses"),
    [
        ({"bytes_per_layer": 2 * 1024}, USES[:3:2]),
        pytest.param({"bytes_per_layer": 2 * 1024}, USES[::2], marks=pytest.mark.soak),
        pytest.param({"bytes_per_layer": 2 * 1024}, USES[1::2], marks=pytest.mark.soak),
        pytest.param({"tensor_placement_policy": "cuda"}, USES, marks=pytest.mark.soak),
    ],
    ids=["slots", "slots, every other use", "slots, other uses", "on the device"],
)
def test_no_function_runs_more_than_twice_as_often_for_twice_the_layers(
    ranks: RankPool, arguments: dict[str, Any], uses: list[str]
) -> None:
    for found in ranks(2).run(cases.phases, 8, uses, {"chunk_size": CHUNK_NUMEL, **arguments}):
        assert found == {}


@pytest.mark.parametrize("stage", [1, 3])
def test_loops_over_states_move_each_parameter_and_not_its_chunk(ranks: RankPool, stage: int) -> None:
    arguments = {"chunk_size": 2**16, "dtype": torch.bfloat16, "stage": stage}
    for few, many in ranks(2).run(cases.moved_by_states, [8, 16], arguments):
        assert many < 2.1 * few, "elements for twice the layers; quadratic is 4"
