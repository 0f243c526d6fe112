"""Ranks whose memory differs, by what they read or by what they were given."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from gemini import DivergenceError, ShardedModel, ShardedOptimizer, ZeroInitContext
from gemini.memory import live
from tests.mlp import CHUNK_NUMEL, Mlp, adam, assert_same, build, smallest_budget, train_step, weights_of
from tests.uneven import Uneven, batch_loss

HOST_BYTES = 10**9
FREE_BYTES = 30_000


@contextmanager
def reading(device_bytes: int, host_bytes: int) -> Iterator[None]:
    with (
        mock.patch.object(live, "free_device_bytes", return_value=device_bytes),
        mock.patch.object(live, "free_host_bytes", return_value=host_bytes),
    ):
        yield


def readings_that_differ(rank: int, world_size: int, spread: int, is_built: bool) -> list[int]:
    """Wrap and train; every rank reads `spread` bytes more than the one before, and rank 0 the least of all."""
    with reading(FREE_BYTES + spread * rank, HOST_BYTES + spread * rank):
        if is_built:
            with ZeroInitContext():
                module = build(Mlp)
        else:
            module = build(Mlp)
        own = 0 if is_built else sum(parameter.nbytes for parameter in module.parameters())
        model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    losses = [float(train_step(model, optimizer, step)) for step in range(2)]
    assert losses[1] < losses[0]
    device, host = model._tiers
    budget = model.plan.budget_bytes
    assert budget is not None and device.capacity_bytes == budget and host.capacity_bytes is not None
    homes = {tier for its in model.plan.placement.homes for tier in its.values()}
    assert homes == {"device", "host"}, "a budget that decides what is where"
    model.close()
    return [budget, host.capacity_bytes, model.plan.hash, own]


def given_budgets_that_differ(rank: int, world_size: int, argument: str) -> str:
    """What every rank is told."""
    budgets = {"model_data_memory": 10**6, "device_memory": 10**7, "host_memory": 10**8}
    budgets[argument] += 4096 * rank
    if argument == "host_memory" and rank:
        del budgets["host_memory"]  # given on one rank only
    try:
        ShardedModel(build(), device="emulated", **budgets)  # type: ignore[arg-type]
    except DivergenceError as error:
        return str(error)
    raise AssertionError("ranks with different budgets were accepted")


def at_the_least_budget(rank: int, world_size: int, policy: str) -> None:
    """The chunk size is searched; the bits are those of the same ranks without a budget."""
    results, numbers = [], []
    options = {"tensor_placement_policy": policy}
    least = smallest_budget(Uneven, **options)
    for budget in (None, least):
        model = ShardedModel(build(Uneven), device="emulated", model_data_memory=budget, **options)  # type: ignore[arg-type]
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        for step in range(3):
            batch_loss(model, step * world_size + rank).backward()
            optimizer.step()
        results.append(weights_of(model))
        numbers.append(model.plan.packing.chunk_bytes)
        if budget is not None:
            assert model._tiers[0].ledger.peak_bytes <= budget
        model.close()
    assert numbers[1] < numbers[0]
    assert_same(results[1], results[0])
