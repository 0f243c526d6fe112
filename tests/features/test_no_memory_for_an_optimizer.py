"""The device has less memory than the plan says when an optimizer comes: model data makes room, and nothing is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemini import BudgetError, Kind, ShardedModel, ShardedOptimizer
from gemini.memory.memory import EmulatedTier
from tests.features.test_plan_for_inference import infer
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.told import told
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, minimum_bytes, train_while

SMALL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL}


@contextmanager
def holding_at_most(num_bytes: int) -> Iterator[list[str]]:
    """Inside, the device holds so many bytes and has no memory for more. Yields what was refused, by kind."""
    allocate, refused = EmulatedTier._allocate, []

    def _allocate(tier: EmulatedTier, wanted: int, kind: str) -> Tensor:
        if tier.ledger.total_bytes + wanted > num_bytes:
            refused.append(kind)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB")
        return allocate(tier, wanted, kind)

    with mock.patch.object(EmulatedTier, "_allocate", _allocate):
        yield refused


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("infers", [False, True])
@pytest.mark.parametrize("kind", [Kind.GRAD, Kind.OPTIM])
def test_an_optimizer_without_memory_makes_room_and_trains_with_the_bits_of_one_that_had_it(
    rank: int, world_size: int, kind: Kind, infers: bool
) -> None:
    """The last rank alone has none, for the home of a gradient, when slots for gradients are not there yet, or for
    moments; all ranks plan again.
    """
    model = ShardedModel(build(), **SMALL)
    if infers:
        infer(model)
    plan = model.plan
    held = model.chunk_manager.memory.device.ledger.total_bytes
    grads = [homes_bytes.get(Kind.GRAD, 4 * CHUNK_NUMEL // world_size) for homes_bytes in _home_bytes(model)]
    room = held + (2 * grads[0] if kind is Kind.GRAD else sum(grads) + 3 * grads[0])
    with told() as lines, holding_at_most(room if rank == world_size - 1 else 10**9) as refused:
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        assert not any(pool.slots for pool in model.chunk_manager.memory.gradient_slots)
    assert (kind in gathered(refused)[-1]) and not any(gathered(refused)[:-1])
    assert not model.plan.infers
    assert infers or model.plan.device_bytes < plan.device_bytes
    assert len(set(gathered(model.plan.hash))) == 1
    lines = [line for line in lines if "ran out of memory when training began" in line]
    assert bool(lines) == (rank == 0), lines
    for state in optimizer._chunk_states.by_chunk.values():
        assert state.tier is model.plan.placement.homes[state.chunk.index][Kind.OPTIM], "by the plan"
    found = train_while(model, optimizer, rank)
    whole = ShardedModel(build(), **SMALL)
    assert found == train_while(whole, ShardedOptimizer(whole, adam(whole.parameters())), rank)


def _home_bytes(model: ShardedModel) -> list[dict[Kind, int]]:
    return [chunk.home_bytes for chunk in model.plan.demand.chunks]


@on_ranks(1, 2)
def test_an_optimizer_is_refused_on_all_ranks_where_model_data_cannot_be_less(rank: int, world_size: int) -> None:
    """The model infers on, and trains when the memory is there."""
    options = {**SMALL, "tensor_placement_policy": "cuda"}
    model = ShardedModel(build(), model_data_memory=minimum_bytes(build(), **options), **options)
    held, before = model.chunk_manager.memory.device.ledger.total_bytes, infer(build())
    with holding_at_most(held + CHUNK_NUMEL if rank == world_size - 1 else 10**9):
        with pytest.raises(BudgetError, match="no memory for"):
            ShardedOptimizer(model, adam(model.parameters()))
    assert torch.equal(infer(model), before)
    assert not model.chunk_manager.memory.device.ledger.bytes_by_kind[Kind.GRAD]
    found = train_while(model, ShardedOptimizer(model, adam(model.parameters())), rank, steps=2)
    whole = ShardedModel(build(), **SMALL)
    assert found == train_while(whole, ShardedOptimizer(whole, adam(whole.parameters())), rank, steps=2)
