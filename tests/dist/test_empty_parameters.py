"""A trainable parameter without elements trains, saves and loads like any other."""

import pytest

from tests import empty_parameters
from tests.dist.ranks import RankPool


def test_one_rank_trains_beside_parameters_without_elements() -> None:
    empty_parameters.train_beside_them(0, 1)


@pytest.mark.parametrize("world_size", [2])
def test_ranks_train_beside_parameters_without_elements(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(empty_parameters.train_beside_them)
