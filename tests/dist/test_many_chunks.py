"""The first step on several ranks takes time in proportion to the chunks, too."""

import pytest

from tests.dist import growth_cases as cases
from tests.dist.ranks import RankPool

MAX_GROWTH = 2.3  # for twice the model: quadratic is 4


@pytest.mark.parametrize("chooses", [False, True], ids=["ranks alike", "other branches"])
def test_twice_the_layers_cost_twice_the_agreement(ranks: RankPool, chooses: bool) -> None:
    for found in ranks(2).run(cases.growth, 20, chooses):
        assert max(found.values()) < MAX_GROWTH, found
