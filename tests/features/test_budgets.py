"""What a model may take: the device's and the host's budget. Ranks agree on readings; what users give must be equal."""

from typing import Any

import pytest
import torch

from gemini import (
    BudgetError,
    DivergenceError,
    EmulatedDevice,
    ShardedModel,
    ShardedOptimizer,
    ZeroInitContext,
    estimate_memory,
)
from gemini.monitor.readings import share_of_host
from tests.harness.machine import host_with
from tests.harness.on_ranks import gathered, on_ranks
from tests.uneven import Uneven, batch_loss
from tests.zoo.mlp import CHUNK_NUMEL, Mlp, adam, assert_same, build, smallest_budget, train_step, weights_of

FREE_BYTES = 10**6
HOST_BYTES = 10**9
POLICIES = ["auto", "cpu", "cuda"]


class DeviceOfTensors(EmulatedDevice):
    """Counts tensors as in use, as CUDA's readings do: a module that lies there is missing from what is free."""

    counts_tensors = True


@pytest.mark.parametrize("is_built", [False, True])
def test_memory_that_wrapping_frees_counts_as_free(is_built: bool) -> None:
    """The module's own parameters lie on the device that they are about to leave; tied ones count once."""
    with ZeroInitContext(enabled=is_built):
        module = build()
        module.layers[1].weight = module.layers[0].weight
    elements = sum(parameter.numel() for parameter in module.parameters())
    budget = ShardedModel(module, device=DeviceOfTensors(FREE_BYTES)).plan.budget_bytes
    assert budget is not None
    padding = 256 * len(list(module.parameters())) if is_built else 0  # of the shards that a build keeps
    assert int((FREE_BYTES + 4 * elements) * 0.7) <= budget <= int((FREE_BYTES + 4 * (elements + padding)) * 0.7)


def test_a_given_budget_is_what_the_user_gave() -> None:
    assert (
        ShardedModel(build(), device=EmulatedDevice(FREE_BYTES), model_data_memory=50_000).plan.budget_bytes == 50_000
    )
    assert ShardedModel(build(), device=EmulatedDevice(FREE_BYTES), device_memory="1MB").plan.budget_bytes == 700_000


def test_buffers_stay_and_are_not_counted_as_free() -> None:
    module = build()
    module.register_buffer("table", torch.zeros(1000))
    elements = sum(parameter.numel() for parameter in module.parameters())
    assert ShardedModel(module, device=DeviceOfTensors(FREE_BYTES)).plan.budget_bytes == int(
        (FREE_BYTES + 4 * elements) * 0.7
    )


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_module_on_the_host_gives_an_emulated_device_no_room(is_built: bool, policy: str) -> None:
    """A device smaller than the module holds no more than it has, and a policy that needs more is refused."""
    with ZeroInitContext(enabled=is_built):
        module = build(lambda: Mlp(30))
    num_bytes = sum(parameter.nbytes for parameter in module.parameters())
    device = EmulatedDevice(num_bytes // 2)
    if policy == "cuda":
        with pytest.raises(BudgetError, match="device"):
            ShardedModel(module, device=device, chunk_size=CHUNK_NUMEL, tensor_placement_policy=policy)
        return
    model = ShardedModel(module, device=device, chunk_size=CHUNK_NUMEL, tensor_placement_policy=policy)
    assert model.plan.budget_bytes == int(num_bytes // 2 * 0.7)
    assert model.plan.device_bytes <= num_bytes // 2


# ---- the chunk size is searched under the budget ----------------------------------------------------------------


def least_estimate(policy: str, chunk_size: int | None, world_size: int) -> int:
    """Bytes, as the refusal of a budget of nothing says."""
    with pytest.raises(BudgetError) as refused:
        estimate(policy, chunk_size, world_size, 0)
    assert refused.value.needed_bytes is not None and refused.value.tier == "device"
    return refused.value.needed_bytes


def estimate(policy: str, chunk_size: int | None, world_size: int, budget: int) -> int:
    return estimate_memory(
        build(Uneven),
        tensor_placement_policy=policy,
        chunk_size=chunk_size,
        world_size=world_size,
        model_data_memory=budget,
    ).device_bytes


@pytest.mark.sampled(4)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_budget_from_the_least_of_any_chunk_size_is_accepted(policy: str, world_size: int) -> None:
    """And one byte less is refused with that figure."""
    least = least_estimate(policy, None, world_size)
    sizes = [256 * 2**power for power in range(12)] + [768, 1280, 5_000, 40_000]
    assert least <= min(least_estimate(policy, size, world_size) for size in sizes)
    for budget in (least, least + 1, least + 1000, *(least * factor // 8 for factor in range(9, 40, 3))):
        assert estimate(policy, None, world_size, budget) <= budget
    with pytest.raises(BudgetError, match=f"needs {least} bytes.*chunk sizes were tried"):
        estimate(policy, None, world_size, least - 1)
    with pytest.raises(BudgetError, match="make chunk_size= smaller"):
        estimate(policy, 2**20, world_size, least - 1)


def test_a_budget_that_the_best_chunk_size_fits_does_not_change_it() -> None:
    free = ShardedModel(build(Uneven), device="emulated").plan.packing
    needed = least_estimate("auto", free.chunk_bytes // 4, 1)
    assert least_estimate("auto", None, 1) < needed, "the best size is not the one that needs least"
    at_its_least = ShardedModel(build(Uneven), device="emulated", model_data_memory=needed).plan.packing
    assert at_its_least == free
    below = ShardedModel(build(Uneven), device="emulated", model_data_memory=needed - 1).plan.packing
    assert below != free


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_model_at_the_least_budget_has_the_bits_of_one_without_a_budget(policy: str, is_built: bool) -> None:
    results = []
    options: dict[str, Any] = {"tensor_placement_policy": policy}
    for budget in (None, smallest_budget(Uneven, **options)):
        with ZeroInitContext(enabled=is_built):
            module = build(Uneven)
        model = ShardedModel(module, device="emulated", model_data_memory=budget, **options)
        packing = model.plan.packing
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        for step in range(4):
            batch_loss(model, step).backward()
            optimizer.step()
            if step == 1:  # memory follows at the next forward, and chunks stay as they are
                model.module.layers[0].weight.requires_grad_(False)
                model.module.layers[0].bias.requires_grad_(False)
        assert model.plan.packing is packing
        results.append(weights_of(model))
        if budget is not None:
            assert model.chunk_manager.memory.tiers[0].ledger.peak_bytes <= budget
    for name, value in results[0].items():
        assert torch.equal(value, results[1][name]), name


def test_host_memory_that_a_smaller_chunk_size_fits_is_enough() -> None:
    """Paddings of large chunks are what does not fit."""
    options: dict[str, Any] = {"device": "emulated", "tensor_placement_policy": "cpu"}
    with pytest.raises(BudgetError, match=r"host: [0-9]+ bytes") as refused:
        ShardedModel(build(Uneven), host_memory=1000, **options)
    least = refused.value.needed_bytes
    assert least is not None and (refused.value.tier, refused.value.budget_bytes) == ("host", 1000)
    model = ShardedModel(build(Uneven), host_memory=least, **options)
    assert model.chunk_manager.memory.tiers[1].ledger.peak_bytes <= least
    with pytest.raises(BudgetError, match=f"host: {least} bytes"):
        ShardedModel(build(Uneven), host_memory=least - 1, **options)


# ---- several ranks -------------------------------------------------------------------------------------------------

RANK_0_BYTES = 30_000


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_built", [False, True])
@on_ranks(2, 3)
def test_ranks_that_read_different_free_memory_go_by_the_least(rank: int, world_size: int, is_built: bool) -> None:
    """Every rank reads more than the one before, and rank 0 the least of all."""
    spread = 7_000
    with host_with(HOST_BYTES + spread * rank):
        if is_built:
            with ZeroInitContext():
                module = build(Mlp)
        else:
            module = build(Mlp)
        device_memory = EmulatedDevice(RANK_0_BYTES + spread * rank)
        model = ShardedModel(module, device=device_memory, chunk_size=CHUNK_NUMEL)
    device, host = model.chunk_manager.memory.tiers
    budget = model.plan.budget_bytes
    assert budget is not None and device.capacity_bytes == budget and host.capacity_bytes is not None
    homes = {tier for its in model.plan.placement.homes for tier in its.values()}
    assert homes == {"device", "host"}, "a budget that decides what is where"
    assert len(set(gathered((budget, host.capacity_bytes, model.plan.hash)))) == 1, "one budget, one plan"
    assert host.capacity_bytes == share_of_host(HOST_BYTES)
    assert budget == int(RANK_0_BYTES * 0.7)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    losses = [float(train_step(model, optimizer, step)) for step in range(3)]
    assert losses[1] < losses[0]
    assert model.plan.budget_bytes == device.capacity_bytes
    assert len(set(gathered((model.plan.budget_bytes, model.plan.hash)))) == 1, "and after steps, which read again"
    model.close()


@pytest.mark.parametrize("argument", ["model_data_memory", "device_memory", "host_memory"])
@on_ranks(2)
def test_given_budgets_that_differ_are_refused_by_name(rank: int, world_size: int, argument: str) -> None:
    budgets: dict[str, Any] = {"model_data_memory": 10**6, "device_memory": 10**7, "host_memory": 10**8}
    budgets[argument] += 4096 * rank
    if argument == "host_memory" and rank:
        del budgets["host_memory"]  # given on one rank only
    with pytest.raises(DivergenceError, match=f"{argument}=") as refused:
        ShardedModel(build(), device="emulated", **budgets)
    assert "differs between rank 0 and rank 1" in str(refused.value)


@pytest.mark.parametrize("policy", ["auto", "cuda"])
@on_ranks(2)
def test_ranks_at_the_least_budget_have_the_bits_of_ranks_without_one(rank: int, world_size: int, policy: str) -> None:
    """The chunk size is searched; the bits are those of the same ranks without a budget."""
    results, numbers = [], []
    options: dict[str, Any] = {"tensor_placement_policy": policy}
    least = smallest_budget(Uneven, **options)
    for budget in (None, least):
        model = ShardedModel(build(Uneven), device="emulated", model_data_memory=budget, **options)
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        for step in range(3):
            batch_loss(model, step * world_size + rank).backward()
            optimizer.step()
        results.append(weights_of(model))
        numbers.append(model.plan.packing.chunk_bytes)
        if budget is not None:
            assert model.chunk_manager.memory.tiers[0].ledger.peak_bytes <= budget
        model.close()
    assert numbers[1] < numbers[0]
    assert_same(results[1], results[0])


def test_a_refusal_names_the_device_memory_that_is_enough() -> None:
    """Of which model data gets a part before the first step: who gives what it needs would be refused again."""
    with pytest.raises(BudgetError, match="94% of device_memory= at most") as refused:
        ShardedModel(build(), device="emulated", device_memory=2_000)
    enough = refused.value.enough_bytes
    assert enough is not None and f"{enough} bytes of it are enough" in str(refused.value)
    model = ShardedModel(build(), device="emulated", device_memory=enough)
    ShardedOptimizer(model, adam(model.parameters()))
    less = ShardedModel(build(), device="emulated", device_memory=enough - 2)
    with pytest.raises(BudgetError, match="device"):
        ShardedOptimizer(less, adam(less.parameters()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_placement_policy": "cuda"}, "tensor_placement_policy='auto' needs least"),
        ({"tensor_placement_policy": "static"}, "tensor_placement_policy='auto' needs least"),
        ({"param_persistence_threshold": 10**9}, "Weights that param_persistence_threshold= keeps on the device"),
    ],
)
def test_a_refusal_names_the_setting_that_asks_for_much(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BudgetError, match=words) as refused:
        ShardedModel(build(), device="emulated", model_data_memory=12_000, **options)
    assert "until a step" not in str(refused.value)
    ShardedModel(build(), device="emulated", model_data_memory=12_000)
