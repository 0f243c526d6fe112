"""What a user does with `.grad`, on several ranks."""

import pytest

from tests import gradients
from tests.dist.ranks import RankPool
from tests.dist.test_access import all_wraps


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_parameter_without_a_gradient_on_any_rank_has_none_on_every_rank(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(all_wraps, gradients.idle, gradients.WRAPS)
