"""What a policy makes of a budget: the least it asks for, and whether it leaves much of it empty although it is short.

Pure functions of numbers.
"""

from __future__ import annotations

from gemini.errors import BudgetError
from gemini.placement.demand import Demand, Placement
from gemini.placement.placing import place, place_unbounded
from gemini.placement.policy import PlacementPolicy

IN_USE = 0.95
"""Of a budget, which is not enough for everything, the least part that a chunk size makes use of, if one can."""


def least_device_bytes(demand: Demand, policy: PlacementPolicy) -> int | None:
    """What the policy asks for when there is nothing. None: it refuses without a number, or refuses that, too.

    It does so where the fewest slots hold more elements than `max_live_parameters` allows.
    """
    try:
        return policy.place(demand, 0).device_bytes(demand)
    except BudgetError as error:
        needed = error.needed_bytes
    if demand.max_live_numel is not None:
        try:
            place(demand, needed, policy)
        except BudgetError:
            return None
    return needed


def is_short(demand: Demand, placement: Placement, policy: PlacementPolicy, budget_bytes: int | None) -> bool:
    """With a larger budget the policy would do otherwise than with this one, of which `placement` came."""
    if budget_bytes is None or not placement.host_bytes(demand):
        return False
    try:
        return place_unbounded(demand, policy) != placement
    except BudgetError:  # of a policy of the user's that refuses without a number
        return True


def would_leave_much(demand: Demand, policy: PlacementPolicy, budget_bytes: int) -> bool:
    """`leaves_much` of the placement that would come of a budget; also if the policy would refuse it."""
    try:
        placement = policy.place(demand, budget_bytes)
    except BudgetError:
        return True
    return leaves_much(demand, placement, policy, budget_bytes)


def leaves_much(demand: Demand, placement: Placement, policy: PlacementPolicy, budget_bytes: int) -> bool:
    """Much of a budget that is short stays empty with the `placement` that came of it."""
    is_used = placement.device_bytes(demand) >= IN_USE * budget_bytes
    return not is_used and is_short(demand, placement, policy, budget_bytes)
