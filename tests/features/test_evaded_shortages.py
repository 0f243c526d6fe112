"""The device has no memory for one state, and the host takes it: that is no reason to make room at the next step."""

from unittest import mock

import pytest
import torch
from torch import Tensor

from gemini import EmulatedDevice, Kind, ShardedModel, ShardedOptimizer
from gemini.memory.memory import EmulatedTier
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, layer_of, loss_of


class CountingDevice(EmulatedDevice):
    """Counts what was refused among its shortages, as torch's allocator does, once for each of `kinds`."""

    def __init__(self, *kinds: Kind) -> None:
        super().__init__(10**6)
        self.due = [*kinds]

    def allocate(self, tier: EmulatedTier, num_bytes: int, kind: str) -> Tensor:
        if kind in self.due:
            self.due.remove(Kind(kind))
            self._num_ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB")
        return ALLOCATE(tier, num_bytes, kind)


ALLOCATE = EmulatedTier._allocate


def trained(device: CountingDevice, kind: Kind) -> tuple[list[float], int]:
    """Losses, and the bytes that model data may have on the device.

    In step 2 a state comes that there was not before: the sum of gradients, for a second micro-batch, or what a
    parameter that was frozen is stepped with.
    """
    due, device.due = device.due, []
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, dtype=torch.bfloat16)
    layer_of(model, 0).requires_grad_(kind is not Kind.OPTIM)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    losses = []
    for step in range(5):
        if step == 2:
            device.due = due
            layer_of(model, 0).requires_grad_(True)
        for micro in range(2 if step == 2 and kind is Kind.GRAD else 1):
            loss = loss_of(model, 2 * step + micro, torch.bfloat16)
            optimizer.backward(loss)
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    assert not device.due
    return losses, model.chunk_manager.plan.budget.device or 0


@on_ranks(1)
@pytest.mark.parametrize("kind", [Kind.GRAD, Kind.OPTIM])
def test_what_the_host_took_instead_is_no_shortage_of_the_next_step(rank: int, world_size: int, kind: Kind) -> None:
    wanted = trained(CountingDevice(), kind)
    device = CountingDevice(kind)

    def allocate(tier: EmulatedTier, num_bytes: int, kind: str) -> Tensor:
        return device.allocate(tier, num_bytes, kind)

    with mock.patch.object(EmulatedTier, "_allocate", allocate):
        assert trained(device, kind) == wanted
    assert device.read().num_ooms == 1


def accumulated(device: CountingDevice, due: list[Kind]) -> list[float]:
    """Losses of steps of two micro-batches, of which the plan knows from the third on."""
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, dtype=torch.bfloat16)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    losses = []
    for step in range(4):
        device.due = due if step == 2 else []
        for micro in range(2):
            loss = loss_of(model, 2 * step + micro, torch.bfloat16)
            optimizer.backward(loss)
            losses.append(float(loss.detach()))
        optimizer.step()
    return losses


def test_a_plan_for_more_micro_batches_that_finds_no_memory_ends_no_training() -> None:
    wanted, device = accumulated(CountingDevice(), []), CountingDevice()

    def allocate(tier: EmulatedTier, num_bytes: int, kind: str) -> Tensor:
        return device.allocate(tier, num_bytes, kind)

    with mock.patch.object(EmulatedTier, "_allocate", allocate):
        assert accumulated(device, [Kind.GRAD]) == wanted
    assert device.read().num_ooms == 1
