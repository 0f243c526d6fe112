"""Of the plans that chunk sizes make under the same budgets: which one is taken. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemini.placement import budget_use
from gemini.placement.budget_use import leaves_much, would_leave_much
from gemini.placement.chunk_size import step_cost

if TYPE_CHECKING:
    from gemini.placement.plan import Plan

_MOST_JUDGED = 24
"""Plans of which is asked what they would leave of later budgets: each answer takes as long as some placements."""


def best_of(plans: Sequence[Plan], later: Sequence[int]) -> Plan:
    """The one whose step costs least. Local.

    Sizes come last that leave much of a budget unused, although it is short: the first step's, or one that may come
    `later`, as chunks keep their size.

    plans: with which training fits, the last of which may be one that has all it wants. At least one. later: bytes of
    the device.
    """
    if len(plans) == 1:
        return plans[0]
    cheapest = sorted(plans, key=_cost)[:_MOST_JUDGED]  # of equal ones the first
    left = []
    for plan in cheapest:
        left.append(_num_left(plan, later))
        if not left[-1]:
            break
    return cheapest[left.index(min(left))]


def is_short(plan: Plan) -> bool:
    """With a larger budget the policy would do otherwise."""
    return budget_use.is_short(plan.demand, plan.placement, plan.settings.policy, plan.budget.device)


def _cost(plan: Plan) -> tuple[bool, int]:
    demand, placement, budget = plan.demand, plan.placement, plan.budget.device
    leaves = budget is not None and leaves_much(demand, placement, plan.settings.policy, budget)
    return leaves, step_cost(demand, placement, plan.world_size)


def _num_left(plan: Plan, later: Sequence[int]) -> int:
    """Of later budgets: how many it would leave much of."""
    if not is_short(plan):
        return 0
    return sum(would_leave_much(plan.demand, plan.settings.policy, each) for each in later)
