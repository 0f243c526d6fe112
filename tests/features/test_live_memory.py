"""The device's free memory changes while a model is trained: states move out and in again, and no bit changes."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch

from gemini import BudgetError, EmulatedDevice, MemoryMonitor, ShardedModel, ShardedOptimizer
from gemini.memory.arena import HostTier
from gemini.memory.memory import EmulatedTier
from gemini.monitor import live
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.told import told
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, inputs, loss_of, train_while

STEPS = 8
TOTAL = 10**6


def trainer(device: EmulatedDevice, dtype: torch.dtype | None = None) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, dtype=dtype)
    return model, ShardedOptimizer(model, adam(model.parameters()))


def held(model: ShardedModel) -> int:
    return model.chunk_manager.memory.device.ledger.total_bytes


def train(
    rank: int,
    device: EmulatedDevice,
    dtype: torch.dtype | None = None,
    between: Callable[[int, ShardedModel], None] | None = None,
    steps: int = STEPS,
) -> tuple[list[float], int]:
    return train_while(*trainer(device, dtype), rank, between, steps, dtype)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_another_process_takes_memory_and_frees_it_again(rank: int, world_size: int, dtype: torch.dtype | None) -> None:
    """Of a device that has room for all; within two steps, told in a line by rank 0, with the same bits."""
    device, plans = EmulatedDevice(TOTAL), []
    with told() as lines:

        def change(step: int, model: ShardedModel) -> None:
            plans.append((model.plan, held(model)))
            if step == 1:
                assert model.plan.host_bytes == 0
                device.others_bytes = TOTAL - held(model)  # all that was free
            elif step == 4:
                device.others_bytes = 0

        changed = train(rank, device, dtype, change)
    assert changed == train(rank, EmulatedDevice(), dtype)
    tight, now = plans[3]
    assert tight.host_bytes > 0
    assert now <= tight.budget.device < plans[1][0].device_bytes
    back, _ = plans[6]
    assert back.host_bytes == 0
    lines = [line for line in lines if "room for" in line]
    assert len(lines) == (2 if rank == 0 else 0), lines
    for line, words in zip(lines, ("states moved to the host, 0 onto", "0 states moved to the host, "), strict=False):
        assert words in line


@on_ranks(2, soak=(3,))
def test_ranks_whose_readings_differ_plan_alike(rank: int, world_size: int) -> None:
    device = EmulatedDevice(TOTAL + 1000 * rank)

    def change(step: int, model: ShardedModel) -> None:
        plan = model.plan
        assert len(set(gathered((plan.hash, plan.budget)))) == 1
        if step in (3, 6):
            assert plan.host_bytes > 0, "the rank with least counts"
        if step in (1, 4):
            device.others_bytes = (TOTAL - held(model)) if rank == step % world_size else 0

    assert train(rank, device, None, change) == train(rank, EmulatedDevice())


def test_noise_moves_nothing() -> None:
    """Readings that go up and down by one percent, at a budget that is used up."""
    model, optimizer = trainer(EmulatedDevice())
    loss_of(model).backward()
    optimizer.step()
    full = model.plan.device_bytes
    total = int(0.6 * full / 0.7)
    device, plans = EmulatedDevice(total), []

    def change(step: int, model: ShardedModel) -> None:
        plans.append(model.plan.hash)
        device.total_bytes = total + (total // 100) * (-1) ** step

    train(0, device, None, change)
    assert len(set(plans[2:])) == 1
    assert len(set(plans)) <= 2, "the first reading below the plan's bytes moves states, and makes room for the next"


def test_a_model_that_does_not_fit_any_more_keeps_the_least_that_it_needs() -> None:
    device, budgets = EmulatedDevice(TOTAL), []

    def change(step: int, model: ShardedModel) -> None:
        budgets.append(model.plan.budget_bytes)
        if step > 0:
            device.others_bytes = TOTAL - held(model)  # whatever this process frees another one takes
        if step == 15:
            assert model.plan.device_bytes == model.plan.packed_minimum_bytes

    assert train(0, device, None, change, steps=16) == train(0, EmulatedDevice(), steps=16)
    assert budgets == sorted(budgets, reverse=True)


@on_ranks(1, 2)
def test_a_full_host_ends_no_training(rank: int, world_size: int) -> None:
    """What should leave the device has nowhere to go: states stay, which is told once, until there is room again."""
    device = EmulatedDevice(TOTAL)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, host_memory=1000)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))

    def change(step: int, model: ShardedModel) -> None:
        assert model.plan.host_bytes == 0
        if step == 1:
            device.others_bytes = TOTAL - held(model)

    with told() as lines:
        assert train_while(model, optimizer, rank, change, STEPS) == train(rank, EmulatedDevice())
    lines = [line for line in lines if "states stay where they are" in line]
    assert len(lines) == (1 if rank == 0 else 0), lines


def test_what_leaves_the_device_is_no_longer_kept_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's allocator would cache it: the tier is asked to give it back, when states have moved."""
    trimmed = []

    def trim(self: EmulatedTier) -> None:
        trimmed.append(self.ledger.total_bytes)

    monkeypatch.setattr(EmulatedTier, "trim", trim)
    device = EmulatedDevice(TOTAL)

    def change(step: int, model: ShardedModel) -> None:
        if step == 1:
            assert not trimmed
            device.others_bytes = TOTAL - held(model)
        if step == 3:
            assert trimmed, "states have left"
            assert trimmed[0] <= model.plan.device_bytes

    train(0, device, None, change)


def test_what_the_user_fixed_is_not_read() -> None:
    device = EmulatedDevice(TOTAL)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, model_data_memory=TOTAL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    device.others_bytes = TOTAL
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
    assert (model.plan.budget_bytes, model.plan.host_bytes) == (TOTAL, 0)


def test_twice_the_batch_leaves_less_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are measured, of real batches: what they take in a step is no longer model data's in the next.

    Model data has it again when no step has needed it for a while, here after 4 to 8 steps.
    """
    monkeypatch.setattr(live, "_WINDOW", 4)
    device = EmulatedDevice(51_000)
    model, optimizer = trainer(device)
    budgets = []
    for copies in (1, 1, 2, 2, *([1] * 10)):
        with MemoryMonitor(device).record_peaks() as peaks:
            peaks.at("step")
            x = inputs(0).repeat(copies, 1)
            (model(x) - x).square().mean().backward()
        optimizer.step()
        loss_of(model)  # the next forward follows what the step has seen
        budgets.append(model.plan.budget_bytes)
        optimizer.zero_grad()
        assert held(model) <= budgets[-1]
        assert budgets[-1] + 1.1 * device.activation_bytes <= 51_000
    one, two = budgets[0], budgets[2]
    budgets_then = [one, one, two, two, two, two]
    assert budgets[:6] == [pytest.approx(each, rel=0.02) for each in budgets_then]  # the margin
    assert budgets[-1] == pytest.approx(one, rel=0.02)
    assert two < 0.8 * one


@on_ranks(1, 2)
def test_batches_of_two_sizes_in_turn_find_the_room_that_they_had(rank: int, world_size: int) -> None:
    """A small batch gives model data no room that the next large one needs, and an evaluation between steps counts."""
    device = EmulatedDevice(40_000)
    model, optimizer = trainer(device)
    x = inputs(rank)
    with device.holding_activations():
        for is_large in (True, False, False, True, False, False, False, True):
            batch = x if is_large else x[:1]
            (model(batch) - batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            model(x.repeat(2, 1))
        smaller = model.plan.device_bytes
        for _ in range(3):
            (model(x[:1]) - x[:1]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert model.plan.device_bytes <= smaller
        with torch.no_grad():
            model(x.repeat(2, 1))
    assert device.read().num_ooms == 0


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("part", [0.8, 0.5])
def test_a_capacity_that_is_lowered_below_what_is_held_is_kept_within_two_steps(
    rank: int, world_size: int, part: float
) -> None:
    device, held_at = EmulatedDevice(TOTAL, activation_bytes=0), []

    def change(step: int, model: ShardedModel) -> None:
        held_at.append(held(model))
        if step == 1:
            device.total_bytes = int(part * held(model))
        elif step == 4:
            device.total_bytes = TOTAL

    assert train(rank, device, None, change) == train(rank, EmulatedDevice())
    assert held_at[3] <= part * held_at[1]
    assert held_at[6] == held_at[1]


@on_ranks(1, 2)
def test_other_processes_are_followed_within_what_the_user_allows(rank: int, world_size: int) -> None:
    """device_memory= is an upper bound, and no promise that so much is there."""
    device, plans = EmulatedDevice(TOTAL), []
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, device_memory=TOTAL // 2)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))

    def change(step: int, model: ShardedModel) -> None:
        plans.append(model.plan)
        if step == 1:
            device.others_bytes = TOTAL - held(model)
        elif step == 4:
            device.others_bytes = 0

    assert train_while(model, optimizer, rank, change, STEPS) == train(rank, EmulatedDevice())
    assert [plan.host_bytes > 0 for plan in (plans[1], plans[3], plans[6])] == [False, True, False]
    little = ShardedModel(build(), device=EmulatedDevice(40_000), chunk_size=CHUNK_NUMEL, device_memory=TOTAL)
    assert little.plan.budget_bytes == int(40_000 * 0.7)


@on_ranks(1, 2)
def test_states_that_find_no_memory_on_their_way_in_stay_where_they_were(rank: int, world_size: int) -> None:
    """Another process takes what was free between a step and the next forward, on one rank: no step is lost."""
    device = EmulatedDevice(60_000, others_bytes=30_000, activation_bytes=1000)
    allocate, limits = EmulatedTier._allocate, [60_000]

    def limited(tier: EmulatedTier, num_bytes: int, kind: str) -> torch.Tensor:
        if tier.ledger.total_bytes + num_bytes > limits[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB")
        return allocate(tier, num_bytes, kind)

    at_least = []

    def change(step: int, model: ShardedModel) -> None:
        if step == 2:
            device.others_bytes = 0
        elif step == 3 and rank == world_size - 1:
            limits[0] = model.plan.device_bytes + 1000
        elif step >= 4:
            at_least.append(model.plan.placement)

    with told() as lines, mock.patch.object(EmulatedTier, "_allocate", limited):
        changed = train(rank, device, None, change)
    assert changed == train(rank, EmulatedDevice())
    assert all(placement == at_least[0] for placement in at_least)
    lines = [line for line in lines if "states stay where they are" in line]
    assert len(lines) == (1 if rank == 0 else 0), lines


@on_ranks(1, 2)
def test_states_that_find_no_memory_on_the_host_stay_where_they_were(rank: int, world_size: int) -> None:
    """The last rank's machine has none, though its budget allows it."""
    device = EmulatedDevice(TOTAL)

    def change(step: int, model: ShardedModel) -> None:
        assert model.plan.host_bytes == 0
        if step == 1:
            device.others_bytes = TOTAL - held(model)

    def reserve(tier: HostTier, num_bytes: int, kind: str) -> None:
        if num_bytes > 0 and rank == world_size - 1:
            raise BudgetError("host: no memory", tier="host", is_shortage=True)

    with told() as lines, mock.patch.object(HostTier, "reserve", reserve):
        changed = train(rank, device, None, change)
    assert changed == train(rank, EmulatedDevice())
    lines = [line for line in lines if "states stay where they are" in line]
    assert len(lines) == (1 if rank == 0 else 0), lines


def test_a_policy_that_wants_no_more_of_the_device_tells_nothing() -> None:
    device = EmulatedDevice(60_000, activation_bytes=1000)
    model = ShardedModel(build(), device=device, tensor_placement_policy="cpu", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))

    def change(step: int, model: ShardedModel) -> None:
        device.total_bytes = 60_000 + 6_000 * step

    with told() as lines:
        train_while(model, optimizer, 0, change, STEPS)
    assert not [line for line in lines if "room for" in line]
    assert (model.plan.budget_bytes or 0) > 70_000


def test_nearly_all_of_the_budget_is_used_after_the_first_step() -> None:
    device = EmulatedDevice(50_000, activation_bytes=5_000)
    model, optimizer = trainer(device)
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
    assert model.plan.host_bytes > 0
    budget = model.plan.budget_bytes
    assert budget is not None
    assert budget == 50_000 - int(1.1 * 5_000 + 0.03 * 50_000)
    assert model.plan.device_bytes > 0.95 * budget - max(model.plan.demand.slot_bytes)


def test_a_policy_that_cannot_give_way_says_so_once() -> None:
    device = EmulatedDevice(TOTAL)
    model = ShardedModel(build(), device=device, tensor_placement_policy="cuda", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))

    def change(step: int, model: ShardedModel) -> None:
        if step == 1:
            device.others_bytes = TOTAL - held(model) // 2

    with told() as lines:
        train_while(model, optimizer, 0, change, STEPS)
    assert len([line for line in lines if "tensor_placement_policy='cuda' has there cannot be less" in line]) == 1
