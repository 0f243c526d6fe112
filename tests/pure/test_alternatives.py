"""What a plan says of other budgets is what happens with them, to the byte."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from gemini import BudgetError, Plan, Settings, Tier, plan_model
from gemini.placement.demand import ModelSpec
from gemini.placement.planning import replan
from gemini.placement.policies import next_better, next_worse
from tests.pure.test_plan import LINE, RANKS, choices, specs


def with_budget(plan: Plan, budget_bytes: int) -> Plan:
    """For the same chunks."""
    return replan(plan, plan.trained, {}, budget=replace(plan.budget, device=budget_bytes))


def line_at(percent: int, ranks: int, **options: object) -> Plan:
    settings = Settings(chunk_size=2048, **options)  # type: ignore[arg-type]
    free = plan_model(LINE, settings, ranks)
    assert free.minimum_bytes is not None
    budget = free.minimum_bytes + (free.device_bytes - free.minimum_bytes) * percent // 100
    return plan_model(LINE, replace(settings, model_data_memory=budget), ranks)


@examples(max_examples=40, deadline=None)
@given(st.integers(0, 110), RANKS, st.sampled_from(["auto", "cpu"]))
def test_the_next_better_and_worse_placements_begin_at_their_bytes(percent: int, ranks: int, policy: str) -> None:
    plan = line_at(percent, ranks, tensor_placement_policy=policy)
    assert plan.budget_bytes is not None
    better = next_better(plan.demand, plan.placement, plan.budget_bytes, plan.settings.policy)
    if better is None:
        assert with_budget(plan, 10**9).placement == plan.placement
    else:
        assert better.budget_bytes > plan.budget_bytes
        assert with_budget(plan, better.budget_bytes).placement == better.placement != plan.placement
        assert with_budget(plan, better.budget_bytes - 1).placement == plan.placement
    worse = next_worse(plan.demand, plan.placement, plan.settings.policy)
    if worse is None:
        with pytest.raises(BudgetError):
            with_budget(plan, plan.device_bytes - 1)
    else:
        assert with_budget(plan, plan.device_bytes - 1).placement == worse.placement != plan.placement


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_explanation_says_with_how_many_bytes_more_everything_rests_on_the_device(ranks: int) -> None:
    plan = line_at(20, ranks)
    assert plan.budget_bytes is not None and plan.host_bytes > 0
    words = plan.explain()
    more = re.search(r"With a budget of (\d+) bytes.* everything would rest on the device\.", words)
    assert more is not None, words
    enough = int(more[1])
    assert with_budget(plan, enough).host_bytes == 0 < with_budget(plan, enough - 1).host_bytes
    most = re.search(r"With (\d+) bytes.* nothing would have to leave a slot", words)
    assert most is not None
    last = int(most[1])
    assert with_budget(plan, last).placement == with_budget(plan, 10**9).placement
    assert with_budget(plan, last - 1).placement != with_budget(plan, 10**9).placement


def test_an_explanation_names_what_moves_next() -> None:
    plan = line_at(20, 1)
    assert plan.budget_bytes is not None
    words = plan.explain()
    better = re.search(r"The next larger budget that helps is (\d+) bytes.*: then (.*)\.", words)
    assert better is not None, words
    after = with_budget(plan, int(better[1]))
    moved = [
        kind
        for had, has in zip(plan.placement.homes, after.placement.homes, strict=True)
        for kind in has
        if had[kind] is Tier.HOST and has[kind] is Tier.DEVICE
    ]
    assert moved and "on the device" in better[2]
    slots = re.search(r"helps is (\d+) bytes.*: then there would be 1 slot more\.", line_at(40, 1).explain())
    assert slots is not None
    least = line_at(0, 1)
    assert "With less, there would be no placement." in least.explain()
    free = plan_model(LINE, Settings(), 1)
    assert "More room on the device would change nothing." in free.explain()
    assert f"This plan takes {free.device_bytes} bytes" in free.explain() and "With less, " in free.explain()


@examples(max_examples=30, deadline=None)
@given(specs(), choices(), RANKS)
def test_every_plan_explains_itself_and_what_is_next(spec: ModelSpec, settings: Settings, ranks: int) -> None:
    free = plan_model(spec, settings, ranks)
    least = plan_model(spec, replace(settings, model_data_memory=free.minimum_bytes), ranks)
    for plan in (free, least):
        assert "minimum of model data" in plan.explain()
    assert least.budget_bytes is not None
    better = next_better(least.demand, least.placement, least.budget_bytes, settings.policy)
    if better is not None:
        assert with_budget(least, better.budget_bytes).placement == better.placement != least.placement
        assert with_budget(least, better.budget_bytes - 1).placement == least.placement
