"""What planning costs: nothing in a step where nothing changed, and no more for each chunk of a larger model."""

import gc
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.planning import NUMEL, spec_of
from gemini import Demand, EmulatedDevice, Placement, Settings, ShardedModel, ShardedOptimizer, plan_model
from gemini.placement.planning import replan
from gemini.placement.policies import AutoPolicy
from tests.harness.calls import growing, lines_of
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, train_step


class CountingPolicy:
    """`auto`, which says how often it was asked."""

    name = "counting"

    def __init__(self) -> None:
        self.count = 0

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        self.count += 1
        return AutoPolicy().place(demand, budget_bytes)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("total", [None, 30_000, 10**6], ids=["no-bound", "tight", "everything-fits"])
def test_a_step_in_which_nothing_changes_plans_nothing(rank: int, world_size: int, total: int | None) -> None:
    """Live memory is read in each of them."""
    policy = CountingPolicy()
    device = EmulatedDevice(total, activation_bytes=2000)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, tensor_placement_policy=policy)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    for step in range(3):  # the second forward may follow what the first step has shown
        train_step(model, optimizer, step)
    count, plan = policy.count, model.plan
    assert (plan.host_bytes > 0) == (total == 30_000)
    for step in range(3, 7):
        train_step(model, optimizer, step)
    assert (policy.count, model.plan) == (count, plan)
    model.close()


def test_the_garbage_collector_does_not_search_while_a_plan_is_made() -> None:
    """For a first time, and again when budgets, what is trained or free memory change."""
    searches: list[bool] = []

    class Noting(CountingPolicy):
        def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
            searches.append(gc.isenabled())
            return super().place(demand, budget_bytes)

    device = EmulatedDevice(10**6)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, tensor_placement_policy=Noting())
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    plans = [model.plan]

    def train(step: int) -> None:
        train_step(model, optimizer, step)
        plans.append(model.plan)

    train(0)
    device.total_bytes = 60_000
    train(1)
    train(2)
    next(model.parameters()).requires_grad_(False)
    train(3)
    model.change_budgets(model_data_memory=40_000)
    train(4)
    assert [one is not other for one, other in pairwise(plans)] == [False, False, True, True, True]
    assert gc.isenabled() and not any(searches)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    ("chunk_size", "counts"),
    [(NUMEL, (100, 200)), pytest.param(None, (400, 800), marks=pytest.mark.soak)],
    ids=["given", "searched"],
)
def test_a_plan_costs_no_more_for_each_chunk_of_a_larger_model(
    chunk_size: int | None, counts: tuple[int, int], ranks: int
) -> None:
    """Executed lines, of functions that grow faster than the model. `benchmarks/planning.py` has the seconds.

    A search tries all sizes of a small model, and of a larger one so many that they have some thousand chunks in all.
    """
    settings = Settings(chunk_size=chunk_size, host_memory="1000TB")
    found: list[tuple[Any, Any]] = []
    for count in counts:
        spec = spec_of(count)
        whole = plan_model(spec, settings, ranks).device_bytes
        tight = replace(settings, model_data_memory=whole // 2)
        first = plan_model(spec, tight, ranks)
        less = replace(first.budget, device=whole * 45 // 100)
        found.append(
            (
                lines_of(lambda: plan_model(spec, tight, ranks)),
                lines_of(lambda: replan(first, first.trained, {}, budget=less)),
            )
        )
    for few, many in zip(*found, strict=True):
        assert not growing(few, many)
