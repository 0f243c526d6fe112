"""torch's DDP, FSDP and fully_shard around a sharded model, on several ranks: refused by name, in one sentence."""

import pytest

from tests import torch_wrappers
from tests.harness.ranks import RankPool


@pytest.mark.parametrize(("place", "stage"), [("smallest", 3), ("cuda", 0)])
def test_wrappers_that_shard_or_reduce_themselves_are_refused_by_name(ranks: RankPool, place: str, stage: int) -> None:
    ranks(2).run(torch_wrappers.every_wrapper_is_refused_by_its_name, place, stage)


def test_modules_beside_a_sharded_model_may_be_wrapped(ranks: RankPool) -> None:
    ranks(2).run(torch_wrappers.modules_beside_a_sharded_model_may_be_wrapped)
