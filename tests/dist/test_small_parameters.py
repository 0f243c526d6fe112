"""Models of many small parameters on several ranks: the bits of plain PyTorch, and hardly any Python calls."""

import pytest

from tests.dist import small_cases as cases
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_whatever_comes_between_two_steps_changes_no_bit(ranks: RankPool, stage: int) -> None:
    for facts in ranks(2).run(cases.train, stage):
        assert facts["is_resident"]
        assert facts["stays"] == [stage == 3] * 2
        if stage == 3:
            assert facts["gathers"][0] == 2, "both chunks at the root"
            assert facts["gathers"][2] == 0, "nothing is gathered again between micro-batches"


def test_three_ranks_train_as_one_process(ranks: RankPool) -> None:
    ranks(3).run(cases.unused_on_every_rank, 3)


@pytest.mark.parametrize("stage", [1, 3])
def test_an_operator_costs_the_calls_of_plain_pytorch_and_a_gradient_one(ranks: RankPool, stage: int) -> None:
    for calls in ranks(2).run(cases.calls_per_layer, stage):
        assert calls["forward"] == pytest.approx(calls["plain"], abs=0.5)
        assert calls["backward"] <= 2 * 1.5  # a weight and a bias, and what a chunk more costs
        assert calls["step"] <= 1.0


def test_a_view_that_outlives_a_step_shows_new_weights_and_a_graph_is_refused(ranks: RankPool) -> None:
    for facts in ranks(2).run(cases.views_and_graphs_outlive_a_step):
        assert facts["shows_new"]
        assert len(facts["said"]) == 2 and facts["said"][0] == facts["said"][1]
        assert "modified by an inplace operation" in facts["said"][0]


def test_ranks_that_all_catch_an_error_go_on(ranks: RankPool) -> None:
    ranks(2).run(cases.a_failed_step_is_forgotten)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_gradient_is_none_where_no_rank_has_one(ranks: RankPool, stage: int) -> None:
    by_rank = ranks(2).run(cases.unused_on_every_rank, stage)
    assert by_rank[0] == by_rank[1] == [f"layers.{layer}.{kind}" for layer in (0, 1) for kind in ("weight", "bias")]
