"""Buffers that several modules have, or that are views of one another, on ranks that begin with other values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel
from tests.harness.on_ranks import on_ranks

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda base: base,
    "column": lambda base: base[:, 0],
    "expanded": lambda base: base[:1].expand(4, 3),
}


@on_ranks(1, 2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_buffers_that_share_memory_do_so_after_wrapping(rank: int, world_size: int, layout: str) -> None:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    base = torch.arange(6.0).view(2, 3) + 10 * rank
    shared = LAYOUTS[layout](base)
    module.register_buffer("base", base)
    module[0].register_buffer("first", shared)
    module[1].register_buffer("second", shared)
    model = ShardedModel(module, device="emulated")
    assert module[0].first is module[1].second
    model.base.add_(1)
    wanted = torch.arange(6.0).view(2, 3) + 1
    for buffer, of_rank_0 in ((model.base, wanted), (module[1].second, LAYOUTS[layout](wanted))):
        assert torch.equal(buffer, of_rank_0)
    model.close()


@on_ranks(2)
def test_a_buffer_that_only_rank_0_holds_whole_has_its_values(rank: int, world_size: int) -> None:
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    shared = torch.zeros(1).expand(3) if rank else torch.arange(3.0)
    for each in module:
        each.register_buffer("wide", shared)
    model = ShardedModel(module, device="emulated")
    assert module[0].wide is module[1].wide
    assert torch.equal(module[1].wide, torch.arange(3.0))
    model.close()
