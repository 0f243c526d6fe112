"""The estimator, and the ledgers and the mappings of a model that took a step: the same bytes."""

from typing import Any

import torch

from gemini import ShardedModel, ShardedOptimizer, estimate_memory
from optim import HybridAdam
from tests.zoo import mlp

WRAPS: list[dict[str, Any]] = [
    {"stage": stage, "dtype": dtype, "tensor_placement_policy": policy, "chunk_size": mlp.CHUNK_NUMEL}
    for stage in (0, 1, 2, 3)
    for dtype in (None, torch.bfloat16)
    for policy in ("cuda", "cpu")
]
_SMALL: dict[str, Any] = {"tensor_placement_policy": "cuda", "chunk_size": mlp.CHUNK_NUMEL}
WRAPS += [
    {"stage": stage, "reuse_fp16_shard": True, "dtype": dtype, **_SMALL}
    for stage in (0, 1, 2, 3)
    for dtype in (torch.float16, {"layers.1": torch.float32, "*": torch.bfloat16})
]
WRAPS += [
    {"stage": 2, "reuse_fp16_shard": True, "dtype": torch.bfloat16, "shard_strategy": "tensor", **_SMALL},
    {"stage": 0, "dtype": torch.bfloat16, "accumulate_dtype": torch.float32, **_SMALL},
    {"stage": 1, "dtype": torch.bfloat16, "reduce_dtype": torch.float32, **_SMALL},
    {"stage": 3, "reduce_dtype": torch.bfloat16, "accumulate_dtype": torch.float16, **_SMALL},
]


def measured(model: ShardedModel) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by kind on both tiers, as the ledgers have them after a step."""
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    optimizer.backward(mlp.loss_of(model, dtype=next(model.parameters()).dtype).float() / 2**10)
    optimizer.step()
    device, host = model.chunk_manager.memory.tiers
    return dict(device.ledger.bytes_by_kind), dict(host.ledger.bytes_by_kind)


def assert_equals_ledger(wrap: dict[str, Any], world_size: int) -> None:
    module = mlp.build()
    estimate = estimate_memory(module, world_size=world_size, **wrap)
    model = ShardedModel(module, device="emulated", **wrap)
    device, host = measured(model)
    assert model.chunk_manager.memory.tiers[1].mapped_bytes == estimate.host_bytes, wrap
    model.close()
    for found, wanted in ((estimate.device, device), (estimate.host, host)):
        assert {k: n for k, n in found.items() if n} == {k: n for k, n in wanted.items() if n}, wrap
