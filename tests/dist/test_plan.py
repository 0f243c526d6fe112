"""Several ranks make the plan that one process makes of the specs."""

import pytest

from tests.harness.ranks import RankPool
from tests.test_plan import NAMES, over_the_zoo


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_have_the_plan_of_the_specs(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(over_the_zoo, NAMES[world_size::6], 1)
