"""How well a policy uses a budget: the least that it needs, and whether it leaves much of a short budget empty.

A budget is *short* if states rest on the host and a larger budget would change the placement. Functions of numbers.
"""

from __future__ import annotations

from gemini.errors import BudgetError
from gemini.placement.demand import Demand, Placement
from gemini.placement.placing import place, place_unbounded
from gemini.placement.policy import PlacementPolicy

IN_USE = 0.95
"""If the budget cannot hold all states, prefer chunk sizes that use at least this fraction of it."""


def least_device_bytes(demand: Demand, policy: PlacementPolicy) -> int | None:
    """The smallest device budget, in bytes, with which the policy places these chunks.

    None if there is none to name: a user's policy refuses without a number, or the fewest slots hold more elements
    than `max_live_parameters` allows, whatever the budget.
    """
    # A plan that does not fit otherwise is made with reductions in tiles.
    demand = demand.in_tiles()
    # A budget of 0 bytes makes the policy refuse. Its error carries the number of bytes that it needs.
    try:
        return policy.place(demand, 0).device_bytes(demand)
    except BudgetError as error:
        needed = error.needed_bytes
    # Policies need not look at `max_live_parameters`, which `place` checks. Its refusal has no number of bytes, because
    # no budget would help.
    if demand.max_live_numel is not None:
        try:
            place(demand, needed, policy)
        except BudgetError:
            return None
    return needed


def is_short(demand: Demand, placement: Placement, policy: PlacementPolicy, budget_bytes: int | None) -> bool:
    """Whether a larger budget would change `placement`, which the policy made for `budget_bytes`."""
    # More slots alone do not make a budget short: with all states on the device no chunk size is worth looking for.
    if budget_bytes is None or not placement.host_bytes(demand):
        return False
    try:
        return place_unbounded(demand, policy) != placement
    except BudgetError:  # of a policy of the user's that refuses without a number
        return True


def would_leave_much(demand: Demand, policy: PlacementPolicy, budget_bytes: int) -> bool:
    """Whether the policy would leave much of this budget empty, or would refuse it."""
    try:
        placement = policy.place(demand, budget_bytes)
    except BudgetError:
        return True
    return leaves_much(demand, placement, policy, budget_bytes)


def leaves_much(demand: Demand, placement: Placement, policy: PlacementPolicy, budget_bytes: int) -> bool:
    """Whether `placement`, made for a short budget, uses less than `IN_USE` of it."""
    # Only another placement tells whether the budget is short, so that is asked last.
    is_used = placement.device_bytes(demand) >= IN_USE * budget_bytes
    return not is_used and is_short(demand, placement, policy, budget_bytes)
