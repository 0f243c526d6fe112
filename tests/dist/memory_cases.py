"""What ranks measure about memory: bytes by kind from the ledger, and live storages while training."""

import gc
from typing import Any

import torch
from torch import nn

from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam
from tests.harness.ledger import WRAPS, assert_equals_ledger
from tests.zoo.mlp import CHUNK_NUMEL

LAYERS, WIDTH = 8, 64


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def ledger_after_a_step(rank: int, world_size: int, wrap: dict[str, Any]) -> dict[str, Any]:
    """Peak bytes by kind over both tiers, payload elements, traffic of the second step."""
    model = ShardedModel(build(), device="emulated", **wrap)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    sent = [0, 0]
    for _ in range(3):
        model(torch.ones(2, WIDTH) * (rank + 1)).square().mean().backward()
        optimizer.step()
        collectives = model.chunk_manager.communicator.collectives
        sent = [sent[1], collectives.bytes_sent]
    device, host = model.chunk_manager.memory.tiers
    kinds = {
        kind: device.ledger.peak_by_kind[kind] + host.ledger.peak_by_kind[kind]
        for kind in ("param", "grad", "master", "optim", "slots", "gradient slots")
    }
    chunks = model.chunk_manager.chunks
    return {
        "kinds": kinds,
        "numel": sum(chunk.numel for chunk in chunks),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "sent_per_step": sent[1] - sent[0],
        "num_chunks": len(chunks),
        "peak_open": model.chunk_manager.grads.places.peak_open,
        "calls": dict(model.chunk_manager.communicator.collectives.calls),
    }


def device_storage_bytes(model: ShardedModel) -> int:
    """Bytes of the distinct storages behind everything that the device tier holds, found by walking the objects."""
    seen: dict[int, int] = {}

    def add(tensor: torch.Tensor | None) -> None:
        if tensor is not None and tensor.numel():
            with torch._C.DisableTorchFunctionSubclass():
                storage = tensor.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()

    manager = model.chunk_manager
    for chunk in manager.chunks:
        for home in chunk.homes.values():
            if home.tier == "device":
                add(home.flat)
    for pools in (manager.params.slots.pools, manager.grads.places.pools):
        for pool in pools or ():
            for slot in pool.slots + pool.held:
                add(slot.region and slot.region.flat)
    scratch = manager.grads.scratch._memory
    add(scratch and scratch.flat)
    if model.chunk_manager.optimizer is not None:
        for state in model.chunk_manager.optimizer.states.by_chunk.values():
            for flat in state.flats.values():
                if state.tier == "device":
                    add(flat)
    return sum(seen.values())


def live_tensors_within_budget(rank: int, world_size: int, budget: int) -> dict[str, int]:
    """Train under a budget; at the end of every forward and backward compare ledger, budget and live storages."""
    model = ShardedModel(build(), device="emulated", model_data_memory=budget, chunk_size=8192)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    largest = 0
    for _ in range(3):
        loss = model(torch.ones(2, WIDTH) * (rank + 1)).square().mean()
        largest = max(largest, device_storage_bytes(model))
        loss.backward()
        largest = max(largest, device_storage_bytes(model))
        optimizer.step()
        largest = max(largest, device_storage_bytes(model))
        gc.collect()
    ledger = model.chunk_manager.memory.tiers[0].ledger
    return {
        "storages": largest,
        "ledger": ledger.peak_bytes,
        "budget": budget,
        "evictions": model.observer.counts["evict"],
    }


def steady_state_allocations(rank: int, world_size: int) -> tuple[int, int]:
    """Ledger takes before and after ten more steps: no model data is allocated after warm-up."""
    model = ShardedModel(build(), device="emulated", chunk_size=8192, tensor_placement_policy="cpu")
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
    counts = []
    for step in range(12):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        if step in (1, 11):
            counts.append(sum(tier.ledger.num_allocations for tier in model.chunk_manager.memory.tiers))
    return counts[0], counts[1]


def estimates_equal_ledgers(rank: int, world_size: int) -> None:
    for wrap in WRAPS:
        assert_equals_ledger(wrap, world_size)
    assert_equals_ledger({"chunk_size": CHUNK_NUMEL, "shard_strategy": "tensor"}, world_size)
