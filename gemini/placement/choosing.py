"""The choice among plans that differ in their chunk size, made for the same budgets. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.placement import budget_use
from gemini.placement.budget_use import leaves_much, would_leave_much
from gemini.placement.chunk_size import step_cost

if TYPE_CHECKING:
    from gemini.placement.plan import Plan

_MOST_JUDGED = 24
"""Check at most this many plans against later budgets. Each check costs several placements."""


def best_of(plans: Sequence[Plan], later: Sequence[int]) -> Plan:
    """The plan with the cheapest step. Local.

    Plans that leave much of a short budget unused rank last. Of the cheapest plans the first one is taken that does so
    under the fewest budgets in `later`, because the chunk size is fixed when the model is wrapped.

    plans: at least one, each with room to train. later: device budgets in bytes that may apply after the first step.
    """
    if len(plans) == 1:
        return plans[0]
    # The sort is stable, so among equal costs the size that the search ranked first stays first on every rank.
    cheapest = sorted(plans, key=_cost)[:_MOST_JUDGED]
    left = []
    for plan in cheapest:
        left.append(_num_left(plan, later))
        # No plan leaves fewer than none, and the plans behind this one cost at least as much.
        if not left[-1]:
            break
    return cheapest[left.index(min(left))]


def is_short(plan: Plan) -> bool:
    """Whether a larger device budget would change the plan's placement."""
    return budget_use.is_short(plan.demand, plan.placement, plan.settings.policy, plan.budget.device)


def _cost(plan: Plan) -> tuple[bool, int]:
    demand, placement, budget = plan.demand, plan.placement, plan.budget.device
    # False sorts before True, so plans that use the budget come first, whatever their cost.
    leaves = budget is not None and leaves_much(demand, placement, plan.settings.policy, budget)
    return leaves, step_cost(demand, placement, plan.world_size)


def _num_left(plan: Plan, later: Sequence[int]) -> int:
    """The number of `later` budgets of which this plan's chunks would leave much unused."""
    if not is_short(plan):
        return 0
    return sum(would_leave_much(plan.demand, plan.settings.policy, each) for each in later)
