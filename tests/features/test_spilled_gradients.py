"""Gradients that leave their slots for the host in a backward take turns in memory that is kept for later steps."""

import torch
from torch import nn

from gemini import ShardedModel, ShardedOptimizer
from gemini.memory.arena import HostTier
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks

KIND = "spilled gradients"


@on_ranks(2)
def test_a_later_backward_spills_into_the_memory_of_an_earlier_one(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = ShardedModel(module, device="emulated", chunk_size=64 * 64, model_data_memory=150_000)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
    host, taken = model.chunk_manager.memory.host, list[str]()
    allocate = host.allocate

    def note(num_bytes: int, kind: str) -> torch.Tensor:
        taken.append(kind)
        return allocate(num_bytes, kind)

    def step() -> int:
        before = model.observer.counts["spill"]
        model(torch.ones(2, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model.observer.counts["spill"] - before

    host.allocate = note  # type: ignore[method-assign]
    step()
    first, peak = taken.count(KIND), host.ledger.peak_by_kind[KIND]
    assert first > 0 and step() > 0
    assert taken.count(KIND) == first, "the second step has taken memory of its own"
    # While no gradient is in it, no budget counts it, and what the model gives up is not kept.
    assert host.ledger.peak_by_kind[KIND] == peak and not host.ledger.bytes_by_kind[KIND]
    model.chunk_manager.give_room()
    host.trim()
    assert isinstance(host, HostTier) and host.staging.mapped_bytes == 0
    assert step() > 0
    model.close()
