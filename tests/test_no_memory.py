"""The machine has no memory although the budget has: an error as for a budget, and nothing is counted as taken."""

from typing import Any
from unittest import mock

import pytest
import torch

from gemini import BudgetError, ShardedModel, ShardedOptimizer, SlotError
from gemini.memory.arena import HostTier
from gemini.memory.memory import AcceleratorTier, EmulatedTier
from tests.features.test_access import FewSlots
from tests.zoo.mlp import (
    CHUNK_NUMEL,
    LAYERS,
    adam,
    assert_same,
    build,
    inputs,
    plain,
    smallest_budget,
    train_step,
    weights_of,
)

TOO_MANY_BYTES = 2**55


@pytest.mark.parametrize("make", [HostTier, EmulatedTier, lambda: AcceleratorTier(torch.device("cpu"))])
def test_an_allocation_that_the_machine_refuses_is_a_budget_error_and_not_booked(make: Any) -> None:
    tier = make()
    with pytest.raises(BudgetError, match=rf"{tier.name}: no memory for {TOO_MANY_BYTES} bytes of param"):
        tier.allocate(TOO_MANY_BYTES, "param")
    assert tier.ledger.total_bytes == tier.ledger.num_allocations == 0
    assert tier.allocate(64, "param").nbytes == tier.ledger.total_bytes == 64


def test_the_advice_is_about_a_budget_only_where_there_is_one() -> None:
    for capacity_bytes, advice in ((None, "set a budget with model"), (2 * TOO_MANY_BYTES, "allow less with model")):
        with pytest.raises(BudgetError, match=f"free memory, or {advice}"):
            EmulatedTier(capacity_bytes).allocate(TOO_MANY_BYTES, "param")
    with pytest.raises(BudgetError, match="Allow more with model_data_memory="):
        EmulatedTier(8).allocate(64, "param")


@pytest.mark.parametrize("has_budget", [False, True])
def test_a_kept_view_without_a_spare_slot_is_told_what_helps(has_budget: bool) -> None:
    options = (
        {"model_data_memory": smallest_budget(chunk_size=CHUNK_NUMEL)}
        if has_budget
        else {"tensor_placement_policy": FewSlots()}
    )
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, **options)
    model(inputs(0))
    kept: list[torch.Tensor] = []
    for layer in model.module.layers:
        layer.register_forward_hook(lambda layer, *_: kept.append(layer.weight.detach()))
    with mock.patch.object(torch, "zeros", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
        with pytest.raises(SlotError, match="a view of one of its parameters is still alive") as found:
            model(inputs(0))
    assert ("allow more with model_data_memory=" in str(found.value)) is has_budget
    assert ("free memory there" in str(found.value)) is not has_budget


def test_an_error_that_is_not_about_memory_stays_what_it_is() -> None:
    with mock.patch.object(torch, "zeros", side_effect=RuntimeError("the driver is gone")):
        with pytest.raises(RuntimeError, match="the driver is gone") as found:
            EmulatedTier().allocate(64, "param")
    assert not isinstance(found.value, BudgetError)


def test_optimizer_state_rests_on_the_host_where_the_device_has_no_memory_left() -> None:
    zeros, taken = torch.zeros, []

    def refusing(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            taken.append(kwargs["device"])
        if "device" in kwargs and len(taken) > LAYERS:  # the gradients are there
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB")
        return zeros(*args, **kwargs)

    class Device(AcceleratorTier):
        """A GPU whose memory is this machine's."""

        def __init__(self) -> None:
            super().__init__(torch.device("cpu"))

        def synchronize(self) -> None:
            return

    with mock.patch("gemini.memory.memory.EmulatedTier", Device):
        model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, tensor_placement_policy="cuda")
    with mock.patch.object(torch, "zeros", refusing):
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
    assert "host" in model.memory_report()
    assert {state.tier for state in optimizer._chunk_states.by_chunk.values()} == {"host"}
    reference, its_optimizer = plain()
    for step in range(2):
        train_step(model, optimizer, step)
        train_step(reference, its_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize("num_takes", [3, LAYERS + 5], ids=["gradients", "moments"])
def test_an_optimizer_that_finds_no_memory_half_way_gives_back_what_it_took(num_takes: int) -> None:
    """Of the third chunk's gradient, or state. Afterwards another optimizer trains as in plain PyTorch."""
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, tensor_placement_policy="cuda")
    device = model.chunk_manager.memory.device
    before, allocate, taken = device.ledger.total_bytes, type(device).allocate, []

    def refusing(tier: Any, num_bytes: int, kind: str) -> torch.Tensor:
        taken.append(kind)
        if len(taken) > num_takes:
            raise BudgetError("no memory", tier=tier.name)
        return allocate(tier, num_bytes, kind)

    with mock.patch.object(EmulatedTier, "allocate", refusing), mock.patch.object(HostTier, "allocate", refusing):
        with pytest.raises(BudgetError, match="no memory"):
            ShardedOptimizer(model, adam(model.parameters()))
    assert len(taken) > num_takes
    assert device.ledger.total_bytes == before
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    reference, its = plain()
    for step in range(2):
        train_step(model, optimizer, step)
        train_step(reference, its, step)
    assert_same(weights_of(model), weights_of(reference))
