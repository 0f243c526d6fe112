"""The plan from specs alone is the plan of the model that is wrapped then, whatever the module is."""

import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import BudgetError, Settings, ShardedModel, ShardedOptimizer, estimate_memory, plan_model, specs_of
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import mlp
from tests.zoo.models import cases

_CHOICES: dict[str, list[Any]] = {
    "stage": [0, 1, 2, 3],
    "dtype": [None, torch.bfloat16, {"*": torch.float16}],
    "tensor_placement_policy": ["auto", "cpu", "cuda"],
    "shard_strategy": ["chunk", "bucket", "tensor"],
    "chunk_size": [None, 4096],
    "reuse_fp16_shard": [False, True],
}
BUDGETS = ["none", "least", "between"]


def assert_planned(make: Callable[[], nn.Module], budget: str, options: dict[str, Any], world_size: int) -> None:
    """Collective: every rank calls it."""
    settings = Settings(device="emulated", host_memory="4GB", **options)
    spec = specs_of(make(), settings, world_size)
    plan = plan_model(spec, settings, world_size)
    least = plan.minimum_bytes
    assert least is not None
    budget_bytes = {"none": None, "least": least, "between": (least + plan.device_bytes) // 2}[budget]
    if budget_bytes is not None:
        options = {**options, "model_data_memory": max(least, budget_bytes)}
    estimate = estimate_memory(make(), world_size=world_size, device="emulated", host_memory="4GB", **options)
    model = ShardedModel(make(), device="emulated", host_memory="4GB", **options)
    assert model.plan == estimate.plan, (options, budget)
    assert model.plan.hash == estimate.plan.hash
    assert estimate.device_bytes == model.plan.device_bytes and estimate.host_bytes == model.plan.host_bytes
    model.close()


def combinations(seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Of a budget and options, in an order of its own."""
    found = [
        (budget, dict(zip(_CHOICES, values, strict=True)))
        for budget, *values in itertools.product(BUDGETS, *_CHOICES.values())
    ]
    random.Random(seed).shuffle(found)
    return found


NAMES = [case.name for case in cases()]


@on_ranks_with(
    "names",
    {1: [NAMES[::8]], 2: [NAMES[2::12]], 3: [NAMES[3::12]]},
    soak={1: [[name] for name in NAMES]},
    ids=lambda names: names[0] if len(names) == 1 else f"{len(names)} models",
)
def test_a_wrapped_model_has_the_plan_of_its_specs(rank: int, world_size: int, names: list[str]) -> None:
    """Alone a model has many options, among others one."""
    count = 40 if len(names) == 1 else 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="reuse_fp16_shard=True does nothing here")
        for number, case in enumerate(cases(names=names)):
            for budget, options in combinations(10 * number + world_size)[:count]:
                assert_planned(lambda case=case: case.build(torch.float32), budget, options, world_size)  # type: ignore[misc]


@on_ranks(1, 2)
def test_the_minimum_of_a_wrapped_model_trains_and_one_byte_less_is_refused(rank: int, world_size: int) -> None:
    free = ShardedModel(mlp.build(), device="emulated", chunk_size=mlp.CHUNK_NUMEL)
    least = free.plan.minimum_bytes
    assert least is not None
    model, optimizer = mlp.sharded("smallest")
    assert model.plan.budget_bytes == least
    mlp.train_step(model, optimizer)
    assert model.chunk_manager.memory.tiers[0].ledger.peak_bytes <= least
    less = ShardedModel(mlp.build(), device="emulated", chunk_size=mlp.CHUNK_NUMEL, model_data_memory=least - 1)
    assert less.plan.infers
    with pytest.raises(BudgetError) as refused:
        ShardedOptimizer(less, mlp.adam(less.parameters()))
    assert refused.value.needed_bytes == least


@on_ranks(1, 2)
def test_a_plan_follows_what_is_trained_and_says_what_that_needs(rank: int, world_size: int) -> None:
    model, optimizer = mlp.sharded("smallest")
    before = model.plan
    assert before.minimum_bytes is not None
    for parameter in list(model.module.parameters())[:-2]:
        parameter.requires_grad_(False)
    mlp.train_step(model, optimizer)
    assert model.plan.packing is before.packing and model.plan.trained == (False,) * 10 + (True,) * 2
    assert model.plan.minimum_bytes is not None and model.plan.minimum_bytes <= before.minimum_bytes
    assert f"device is {model.plan.minimum_bytes} bytes" in model.plan.explain()
