"""Weights that are read or written through a wrapped module, on several ranks."""

import pytest
import torch

from tests import whole_weights
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_two_ranks_read_and_write_weights_as_plain_ones(ranks: RankPool, dtype: torch.dtype | None) -> None:
    ranks(2).run(whole_weights.reads_and_writes, {}, dtype, timeout_s=60)


def test_two_ranks_refuse_what_would_take_memory_that_moves(ranks: RankPool) -> None:
    ranks(2).run(whole_weights.refusals, {}, timeout_s=60)
