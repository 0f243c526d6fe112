"""Leaves: modules of which every rank uses other parts."""

import pytest

from tests.dist import leaf_cases as cases
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("budget", ["smallest", None])
@pytest.mark.parametrize("way", ["", cases.IDLE, cases.INSIDE, "not reentrant", "reentrant"])
def test_ranks_that_use_other_branches_equal_plain(ranks: RankPool, way: str, budget: str | None) -> None:
    evictions = ranks(2).run(cases.routes, way, budget)
    assert all(count > 0 for count in evictions) or budget is None


@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_than_that(ranks: RankPool, world_size: int) -> None:
    if world_size == 4:  # a power of two: the mean's division is exact, and so is the comparison
        ranks(world_size).run(cases.routes, cases.IDLE, "smallest")
    ranks(world_size).run(cases.routes, "", "smallest")


def test_without_a_mark_ranks_that_choose_differently_are_told(ranks: RankPool) -> None:
    for said in ranks(2).run(cases.unmarked, fresh=True):
        assert "blocks.0.switch.branches." in said.result, said
        assert "set_leaf_module" in said.result
