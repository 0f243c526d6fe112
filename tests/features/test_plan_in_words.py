"""`plan.explain()` after a change of plan, and of policies and models at the edge."""

import re

import pytest
from torch import nn

from gemini import HybridAdam, ShardedModel, ShardedOptimizer, estimate_memory
from gemini.errors import BudgetError, UnsupportedError
from gemini.placement.demand import Demand, Placement
from gemini.placement.policies import CpuPolicy


class NeedsABudget(CpuPolicy):
    name = "needs a budget"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        if budget_bytes is None:
            raise BudgetError("tell me a budget")
        return super().place(demand, budget_bytes)


class IgnoresItsBudget(CpuPolicy):
    name = "ignores its budget"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        return super().place(demand, None)


def line() -> nn.Module:
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def wide() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def test_after_a_change_of_plan_only_the_chunks_that_exist_have_a_minimum() -> None:
    model = ShardedModel(line(), device="emulated", tensor_placement_policy="cuda", chunk_size=8192, host_memory="1GB")
    ShardedOptimizer(model, HybridAdam(model.parameters()))
    model.change_budgets(model_data_memory=model.plan.device_bytes + 1000)
    words = model.plan.explain()
    assert f"With these chunks the minimum of model data on the device is {model.plan.minimum_bytes} bytes" in words
    assert "lowers it" not in words
    found = re.search(r"Wrapping again with tensor_placement_policy='auto' would lower it to (\d+) bytes", words)
    assert found is not None, words
    again = estimate_memory(line(), chunk_size=8192, host_memory="1GB", model_data_memory=int(found[1]))
    assert again.plan.device_bytes == int(found[1])


def test_after_a_change_of_plan_the_size_is_not_the_cheapest_of_these_budgets() -> None:
    model = ShardedModel(line(), device="emulated", host_memory="1GB")
    assert "the cheapest under these budgets" in model.plan.explain()
    least = model.plan.packed_minimum_bytes
    assert least is not None
    model.change_budgets(model_data_memory=least)
    assert "the cheapest under those of wrapping" in model.plan.explain()


def test_a_model_without_weights_is_explained() -> None:
    assert "No weights are planned" in estimate_memory(nn.Identity()).plan.explain()


def test_a_policy_that_wants_a_budget_is_explained() -> None:
    plan = estimate_memory(line(), tensor_placement_policy=NeedsABudget(), model_data_memory="1MB").plan
    assert "The policy does not say what it would do without a budget." in plan.explain()


def test_less_than_a_policy_insists_on_is_no_placement() -> None:
    plan = estimate_memory(line(), tensor_placement_policy=IgnoresItsBudget(), host_memory="1GB").plan
    words = plan.explain()
    assert "nothing would change" not in words and "there would be no placement" in words


def test_a_model_that_is_wrapped_is_not_estimated() -> None:
    model = ShardedModel(line(), device="emulated")
    for module in (model, model.module):
        with pytest.raises(UnsupportedError, match=r"wrapped already.*model\.plan"):
            estimate_memory(module)


def test_a_page_has_one_unit_and_its_budgets_can_be_pasted() -> None:
    free = estimate_memory(wide(), host_memory="1GB").plan
    assert free.minimum_bytes is not None
    tight = estimate_memory(wide(), host_memory="1GB", model_data_memory=2 * free.minimum_bytes).plan
    words = tight.explain()
    assert " bytes" not in words and not re.search(r"\d (KiB|GiB|B)\b", words), words
    found = re.search(r"minimum of model data on the device is ([\d.]+ MiB)", words)
    assert found is not None, words
    pasted = estimate_memory(wide(), host_memory="1GB", model_data_memory=found[1]).plan
    assert free.minimum_bytes <= pasted.device_bytes <= 1.01 * free.minimum_bytes
