"""The low-level API under a third of the model data, on several ranks."""

import pytest

from tests import third
from tests.dist.ranks import RankPool


@pytest.mark.parametrize(("world_size", "ways"), [(2, ["bf16"]), (3, ["fp16"])])
def test_everything_under_a_third_of_the_model_data_has_the_same_bits(
    ranks: RankPool, world_size: int, ways: list[str]
) -> None:
    for way in ways:
        ranks(world_size).run(third.compare, way)


@pytest.mark.soak
@pytest.mark.parametrize("way", third.WAYS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_way_of_it(ranks: RankPool, world_size: int, way: str) -> None:
    ranks(world_size).run(third.compare, way)
