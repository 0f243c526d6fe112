"""Kept slots, in which parameter homes lie, and payloads that are fetched before they are used."""

import pytest

from tests import test_external
from tests.dist import slot_cases as cases
from tests.dist.ranks import RankPool
from tests.mlp import LAYERS


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_kept_payload_and_its_home_are_one_memory(ranks: RankPool, world_size: int) -> None:
    for facts in ranks(world_size).run(cases.a_payload_is_kept_once):
        assert facts["param"] * world_size == facts["all"]
        assert facts["payloads"] <= facts["all"] + facts["largest"], "no home beside a payload, but while one is made"
        assert facts["gathers"] == facts["chunks"], "nothing leaves between forward and backward"


@pytest.mark.parametrize(
    ("budget", "kept", "slots"), [("smallest", 0, 2), ("one kept", 1, 2), (None, LAYERS, 0)], ids=str
)
def test_what_was_fetched_ahead_in_vain_changes_nothing(
    ranks: RankPool, budget: str | None, kept: int, slots: int
) -> None:
    for facts in ranks(2).run(cases.detours, budget):
        assert (facts["kept"], facts["slots"]) == (kept, slots)
        assert facts["ahead"] > 0, "the last step was as the one before: its gathers started early"


def test_a_view_that_outlives_a_step_keeps_the_old_weights(ranks: RankPool) -> None:
    assert ranks(2).run(cases.a_view_outlives_a_step, None) == ["", ""]


def test_a_kept_view_without_room_beside_it_stops_the_step_before_anything_changes(ranks: RankPool) -> None:
    said = ranks(2).run(cases.a_view_outlives_a_step, 0)
    assert "layers.2.weight" in said[0]
    assert "must leave its slot for an update, but a view of one of its parameters is still alive" in said[0]
    assert "model_data_memory=" in said[0]
    assert said[0].startswith("SlotError") and said[1].startswith("RemoteRankError")
    assert "must leave its slot" in said[1]


def test_a_closed_model_gives_its_process_group_back(ranks: RankPool) -> None:
    for counts in ranks(2).run(cases.closed_models_leave_nothing):
        assert counts[-1] <= counts[0], "threads"


@pytest.mark.parametrize("registers", [True, False])
def test_borrowed_weights_on_ranks(ranks: RankPool, registers: bool) -> None:
    ranks(2).run(test_external.on_ranks, registers)
