"""Graphs that are dropped without a complete backward, on several ranks."""

import pytest

from tests.dist import graph_cases as cases
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_a_graph_that_every_rank_drops_keeps_nothing(ranks: RankPool, place: str) -> None:
    kinds = ("evaluate", "leave_a_head_unused", "checkpoint_it")
    ranks(2).run(cases.dropped, kinds, place)
