"""When free memory has changed enough for another plan, and the budget of that plan. Pure functions of numbers.

A reading moves by a little at every step. A model that followed each of them would do nothing but move, so that
what is free has to change by more than a step of `_MARGIN` before states move in, and states that leave make room for
as much again. The first reading of all is no such change: what it shows is followed to the byte.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from gemini.placement.budget import Budget
from gemini.placement.demand import Kind, Tier
from gemini.placement.plan import Plan
from gemini.placement.sizes import format_bytes

_MARGIN = 0.02
"""Fraction of the budget by which a reading may fluctuate without an effect."""
_SHRINK = 0.2
"""Fraction of the model data on the device that is at least given up after an out-of-memory step."""
_CALM_STEPS = 100
"""Steps without a shortage before model data may grow again after the first one. Each further shortage doubles them."""


def budget_to_follow(plan: Plan, now: Budget, is_first: bool = False) -> Budget | None:
    """The budget of the plan to come, where what is there `now` asks for another plan. None: the plan may stay.

    It is never less than the chunks need: where there is not even so much, training goes on for as long as it can.
    is_first: no step has been read before.
    """
    margin = 0.0 if is_first else _MARGIN
    before, room = plan.budget.device, now.device
    # Twice the margin: a budget that has just shrunk is one margin below the room, and the same reading must not let it
    # grow back.
    if before is not None and _wants_more(plan, before) and (room is None or room > before * (1 + 2 * margin)):
        return now
    # Shrink, but only if the room is less than the plan takes: an unused part of the budget may disappear unnoticed.
    if room is None or room >= plan.device_bytes:
        return None
    # Give up a margin more than the reading asks for. Otherwise the next reading, a little lower, would move states
    # again.
    return _less(plan, now, int(room * (1 - margin)))


def budget_for_bound(plan: Plan, now: Budget) -> Budget | None:
    """Return the next plan's budget if an upper bound of the activations leaves less than the plan takes, else None.

    now: the room that is left beside the bound. A bound may be far above the real peak, so it never lets the budget
    grow, and it never refuses: if the chunks need more than is left, the step may fit nevertheless.
    """
    return None if now.device is None else _less(plan, now, now.device)


def budget_after_shortage(plan: Plan, now: Budget) -> Budget | None:
    """Return the reduced budget after an out-of-memory step, or None if the plan is already at its minimum.

    now: the budget that free memory allows, as far as it is known. The failed step wanted more than was measured, so
    the budget shrinks by `_SHRINK` even where `now` would allow more.
    """
    # A part of what the plan takes, not of its budget: a cut of an unused part would free nothing.
    less = int(plan.device_bytes * (1 - _SHRINK))
    if now.device is not None:
        less = min(less, int(now.device * (1 - _MARGIN)))
    return _less(plan, now, less)


def _less(plan: Plan, now: Budget, num_bytes: int) -> Budget | None:
    """A device budget of `num_bytes`, or the chunks' minimum if that is more. None if the plan takes no more anyway."""
    # A user's policy may not say its minimum. Then the policy is asked with this budget, and if it refuses, the plan in
    # force stays.
    less = max(num_bytes, plan.packed_minimum_bytes or 0)
    return replace(now, device=less) if less < plan.device_bytes else None


class ShortageCap:
    """The upper bound of model data after the device ran out of memory. It counts steps, which all ranks share.

    Without the cap the model would grow back at the next reading and run out of memory in the same way.
    """

    def __init__(self) -> None:
        self._most: int | None = None
        self._calm = 0
        self._needed = _CALM_STEPS // 2  # `set` doubles it

    def set(self, most: int | None) -> None:
        """A shortage has reduced model data to `most` bytes."""
        self._most, self._calm, self._needed = most, 0, 2 * self._needed

    def step(self) -> None:
        """A step ended without a shortage."""
        self._calm += 1
        if self._calm >= self._needed:
            self._most = None

    def bound(self, budget: Budget) -> Budget:
        """`budget`, limited to the cap."""
        if self._most is None:
            return budget
        return replace(budget, device=self._most if budget.device is None else min(budget.device, self._most))


def followed_in_words(
    before: Plan,
    after: Plan,
    activations: int | None,
    is_short: bool,
    peak: str | None = None,
    room: int | None = None,
) -> str:
    """Say in one line the room on the device now and the number of states that have moved.

    activations: bytes that a step was seen to take besides model data. is_short: the device ran out of memory. peak:
    the event of a step with the most activations on rank 0, which tells the line. None: no step was recorded. room:
    bytes that the device has for model data, where that may be less than the chunks need. None: as `after` says.
    """
    budgets = [_in_words(plan.budget.device) for plan in (before, after)]
    # The budget is never less than the chunks need, so it may exceed the room that there is. Then the line says both.
    if room is not None and room < (after.budget.device or 0):
        budgets[1] = f"{format_bytes(room)} of model data, where the chunks need {budgets[1]}"
    else:
        budgets[1] += " of model data"
    taken = "" if activations is None else f" beside {format_bytes(activations)} of activations"
    taken += peak_in_words(before, peak) if taken else ""
    why = "the device ran out of memory in the last step, which was dropped: it" if is_short else "the device"
    return f"{why} has room for {budgets[1]}{taken}, after {budgets[0]}: {_moved_in_words(before, after)}"


def bounded_in_words(before: Plan, after: Plan, most_activations: int) -> str:
    """Say in one line for which bound of activations model data made room, and how many states have moved."""
    budgets = [_in_words(plan.budget.device) for plan in (before, after)]
    return (
        f"this batch takes up to {format_bytes(most_activations)} of activations, by an estimate from the sizes of the "
        f"weights, which leaves {budgets[1]} to model data, after {budgets[0]}, until a step has shown what it takes: "
        f"{_moved_in_words(before, after)}"
    )


def micro_batches_in_words(before: Plan, after: Plan) -> str:
    """Say in one line how many micro-batches steps turned out to have, and how many states have moved."""
    was, now = (plan.demand.micro_batches for plan in (before, after))
    return f"steps have {now} micro-batches, and the plan was for {was}: {_moved_in_words(before, after)}"


def has_room_for(plan: Plan, optim_states: Sequence[int]) -> bool:
    """Whether the plan counts these numbers of states per element, for the chunks that have a home for any."""
    pairs = zip(plan.demand.chunks, optim_states, strict=True)
    return all(chunk.optim_states == number for chunk, number in pairs if Kind.OPTIM in chunk.home_bytes)


def states_in_words(optim_states: Sequence[int]) -> str:
    """How many states per element an optimizer keeps, in runs of chunks that have equally many."""
    runs = [f"{number} of {len(list(its))} chunks" for number, its in groupby(optim_states)]
    return f"states per element: {', '.join(runs)}"


def optimizer_in_words(before: Plan, after: Plan) -> str:
    """Say in one line that the optimizer has states that the plan did not count, and how many states have moved."""
    return f"the optimizer keeps other states than the plan was for: {_moved_in_words(before, after)}"


def _moved_in_words(before: Plan, after: Plan) -> str:
    pairs = zip(before.placement.homes, after.placement.homes, strict=True)
    # A kind that only one of the plans has was allocated or given back, as after unfreezing, and not moved.
    moves = [homes[kind] for had, homes in pairs for kind in had if kind in homes and had[kind] is not homes[kind]]
    slots = [sum(plan.placement.num_slots) for plan in (before, after)]
    return (
        f"{moves.count(Tier.HOST)} states moved to the host, {moves.count(Tier.DEVICE)} onto the device, slots "
        f"{slots[0]} -> {slots[1]}"
    )


def peak_in_words(plan: Plan, peak: str | None) -> str:
    """The event with the most activations on rank 0, for a line that rank 0 prints. Empty if it is unknown."""
    return "" if peak is None else f" (the most at {peak}{' on rank 0' if plan.world_size > 1 else ''})"


def _in_words(num_bytes: int | None) -> str:
    return "any amount" if num_bytes is None else format_bytes(num_bytes)


def _wants_more(plan: Plan, budget_bytes: int) -> bool:
    """Whether the plan could use more memory: states rest on the host, or the budget is nearly used up by slots."""
    return plan.host_bytes > 0 or plan.device_bytes > budget_bytes * (1 - 2 * _MARGIN)
