"""torch's DDP, FSDP and fully_shard around a sharded model, on one rank: refused by name, in one sentence."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests import torch_wrappers


@pytest.fixture
def _one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_wrappers_that_shard_or_reduce_themselves_are_refused_by_name(place: str) -> None:
    torch_wrappers.every_wrapper_is_refused_by_its_name(0, 1, place, 3)


@pytest.mark.usefixtures("_one_rank")
def test_modules_beside_a_sharded_model_may_be_wrapped() -> None:
    torch_wrappers.modules_beside_a_sharded_model_may_be_wrapped(0, 1)
