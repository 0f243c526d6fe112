"""When free memory has changed enough for another plan, and what that plan may take. Pure functions of numbers.

A reading moves by a little at every step. A model that followed each of them would do nothing but move, so that
what is free has to change by more than a step of `_MARGIN` before states move in, and states that leave make room for
as much again.
"""

from __future__ import annotations

from dataclasses import replace

from gemini.placement.budget import Budget
from gemini.placement.demand import Tier
from gemini.placement.plan import Plan
from gemini.placement.sizes import format_bytes

_MARGIN = 0.02
"""Of the budget."""


def budget_to_follow(plan: Plan, now: Budget) -> Budget | None:
    """The budget of the plan to come, where what is there `now` asks for another plan. None: the plan may stay.

    It is never less than the chunks need: where there is not even so much, training goes on for as long as it can.
    """
    before, room = plan.budget.device, now.device
    if before is not None and _wants_more(plan, before) and (room is None or room > before * (1 + 2 * _MARGIN)):
        return now
    if room is None or room >= plan.device_bytes:
        return None
    less = max(int(room * (1 - _MARGIN)), plan.packed_minimum_bytes or 0)
    return replace(now, device=less) if less < plan.device_bytes else None


def followed_in_words(before: Plan, after: Plan, activations: int | None) -> str:
    """One line: what the device has room for now, and how many states have moved."""
    pairs = zip(before.placement.homes, after.placement.homes, strict=True)
    moves = [homes[kind] for had, homes in pairs for kind in had if kind in homes and had[kind] is not homes[kind]]
    out, into = moves.count(Tier.HOST), moves.count(Tier.DEVICE)
    budgets = [_in_words(plan.budget.device) for plan in (before, after)]
    taken = "" if activations is None else f" beside {format_bytes(activations)} of activations"
    return (
        f"the device has room for {budgets[1]} of model data{taken}, after {budgets[0]}: {out} states moved to the "
        f"host, {into} onto the device, slots {sum(before.placement.num_slots)} -> {sum(after.placement.num_slots)}"
    )


def _in_words(num_bytes: int | None) -> str:
    return "any amount" if num_bytes is None else format_bytes(num_bytes)


def _wants_more(plan: Plan, budget_bytes: int) -> bool:
    """More memory would let states or slots onto the device: it is nearly full, or something rests elsewhere."""
    return plan.host_bytes > 0 or plan.device_bytes > budget_bytes * (1 - 2 * _MARGIN)
