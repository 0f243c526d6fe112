"""no_sync() on several ranks: gradients are added up in fp32 and reduced when somebody needs them."""

from typing import Any

import pytest
import torch

from tests.dist import unsynced_cases
from tests.dist.ranks import RankPool

BF16 = {"dtype": torch.bfloat16}
WRAPS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1, "tensor_placement_policy": "cpu"},
    {"stage": 2, "shard_strategy": "tensor", "chunk_size": 2048},
    {"stage": 3, "model_data_memory": "smallest"},
    {"stage": 0, "shard_strategy": "tensor", "chunk_size": 2048, **BF16},
    {"stage": 1, **BF16},
    {"stage": 2, "tensor_placement_policy": "cpu", "accumulate_dtype": torch.float32, **BF16},
    {"stage": 3, "model_data_memory": "smallest", "shard_strategy": "tensor", "chunk_size": 2048, **BF16},
    {"stage": 3, "reuse_fp16_shard": True, **BF16},
]


@pytest.mark.parametrize("synced", [0, 1])
def test_what_backwards_under_no_sync_left_is_reduced_when_it_is_needed(ranks: RankPool, synced: int) -> None:
    ranks(2).run(unsynced_cases.reduced_when_needed, WRAPS, synced)


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_reduce_it_too(ranks: RankPool, world_size: int) -> None:
    for synced in (0, 1):
        ranks(world_size).run(unsynced_cases.reduced_when_needed, WRAPS, synced, timeout_s=240)


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, 257.0),
        ({"stage": 0, "tensor_placement_policy": "cpu"}, 257.0),
        ({"reduce_dtype": torch.float32, "accumulate_dtype": torch.float32}, 257.0),
        ({"reduce_dtype": torch.bfloat16}, 256.0),  # as was asked for
        ({"accumulate_dtype": torch.bfloat16, "stage": 2, "reuse_fp16_shard": True}, 256.0),
    ],
)
def test_a_sum_of_16_bit_micro_batches_is_not_rounded_on_its_way(
    ranks: RankPool, arguments: dict[str, Any], wanted: float
) -> None:
    ranks(2).run(unsynced_cases.small_ones_beside_large_ones, arguments, wanted)


@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_under_no_sync_can_be_discarded(ranks: RankPool, stage: int) -> None:
    ranks(2).run(unsynced_cases.discarded, stage)


def test_what_one_rank_alone_used_under_no_sync_reaches_all(ranks: RankPool) -> None:
    ranks(2).run(unsynced_cases.used_on_one_rank)


def test_a_rank_adds_up_what_no_sync_left_though_each_step_uses_other_operators(ranks: RankPool) -> None:
    ranks(2).run(unsynced_cases.other_operators_each_step, [{"stage": 3}, {"stage": 3, "shard_strategy": "tensor"}])
