"""Makes the plan in force follow what steps show: free memory, a batch's activations, micro-batches per step.

All ranks have agreed on whatever it follows, so they come to the same plan. States move before a forward, between
steps.
"""

from __future__ import annotations

from gemini.access.free_memory import FreeMemory
from gemini.access.replanning import OPTIM_CHANGED, Replanning
from gemini.dist_logger import get_dist_logger
from gemini.errors import BudgetError
from gemini.manager.chunk_manager import ChunkManager
from gemini.memory.collector import uncollected
from gemini.placement.budget import is_less
from gemini.placement.demand import Kind
from gemini.placement.following import (
    bounded_in_words,
    followed_in_words,
    has_room_for,
    micro_batches_in_words,
    optimizer_in_words,
    states_in_words,
)
from gemini.placement.plan import Plan

BUDGETED = "change of budgets", "All ranks must allow the same bytes at the same step"
_ADDED_UP = "change of micro-batches", "All ranks must run as many backwards between two steps"


class LivePlan:
    """The changes of one model's plan that steps ask for."""

    def __init__(self, manager: ChunkManager, replanning: Replanning, free: FreeMemory) -> None:
        self._manager = manager
        self._replanning = replanning
        self._free = free
        self._device = manager.memory.device

    def follow(self) -> bool:
        """Put another plan in force if steps ask for one; True if there is another one. Collective then."""
        # All run, whatever the first ones return: a step may show several changes.
        follows = [self._follow_memory(), self._follow_micro_batches(), self._follow_states()]
        return any(follows)

    def _follow_memory(self) -> bool:
        """Follow a device that has more or less room by now, or that ran out of memory."""
        before, free = self._manager.plan, self._free
        # `is_possible` looks at all chunks, so it comes last: a loop with GatheredParameters asks for each parameter.
        if not free.look() or not self._replanning.is_possible:
            return False
        is_short = free.is_short  # `wanted` resets it
        with uncollected():  # the least budget of the plan may have to be found
            budget = free.wanted(before)
        if budget is None:
            return False
        try:
            plan = self._replanning.fitting(budget=budget)
        except BudgetError as error:
            free.refuse(budget, str(error))
            return False
        # Under a smaller budget something may have to go although no home moves: sums of gradients that no plan counts,
        # see `ChunkManager._carry_out`.
        if _are_alike(plan, before) and not is_less(plan.budget.device, before.budget.device):
            # The policy wants no more of the device than before: nothing has to move.
            self._manager.adopt(plan)
            return True
        if not self._keep_to(plan, f"{'shortage of' if is_short else 'free'} memory"):
            return False
        peak, now = free.find_peak(is_short), self._manager.plan
        words = followed_in_words(before, now, free.activations, is_short, peak, free.room)
        (get_dist_logger().warning if is_short else get_dist_logger().info)(words, ranks=[0])
        return True

    def _follow_micro_batches(self) -> bool:
        """Follow steps that add up another number of backwards than the plan is for.

        If no such plan fits, the one in force stays: sums take what memory they find beside it.
        """
        before, steps = self._manager.plan, self._manager.micro_batches
        if not steps.have_changed or not self._replanning.is_possible:
            return False
        # The number is noted even if nothing comes of it: one that no plan fits must not be tried at every forward.
        number = steps.follow()
        # A number that the user has set counts, whatever steps show.
        if before.settings.gradient_accumulation_steps is not None or number == before.demand.micro_batches:
            return False
        try:
            plan = self._replanning.fitting(micro_batches=number)
        except BudgetError:
            return False
        if _are_alike(plan, before):
            # Nothing moves, but the new plan predicts other steps.
            self._manager.adopt(plan)
            return True
        with self._replanning.between_steps("following micro-batches"):
            if self._manager.try_plan(plan, f"steps of {number} micro-batches", *_ADDED_UP) is not None:
                return False
        if plan.placement != before.placement:
            get_dist_logger().info(micro_batches_in_words(before, plan), ranks=[0])
        return True

    def _follow_states(self) -> bool:
        """Follow an optimizer that has, or needs, other numbers of states than the plan counts.

        If no such plan fits, the one in force stays, and states that it has no room for rest on the host.
        """
        before, optimizer = self._manager.plan, self._manager.optimizer
        if optimizer is None or not optimizer.states.have_changed or not self._replanning.is_possible:
            return False
        # This, too, is noted even if nothing comes of it.
        optimizer.states.note_followed()
        numbers = optimizer.states.state_counts(self._manager.chunks)
        if has_room_for(before, numbers):
            return False
        try:
            plan = self._replanning.fitting()
        except BudgetError:
            return False
        with self._replanning.between_steps("following the optimizer's states"), uncollected():
            if self._manager.try_plan(plan, states_in_words(numbers), *OPTIM_CHANGED) is not None:
                return False
        get_dist_logger().info(optimizer_in_words(before, plan), ranks=[0])
        return True

    def make_room(self) -> None:
        """Make room for the first batch's activations, if a bound is known. See [Note: First batch]. Collective."""
        before, free = self._manager.plan, self._free
        if not self._replanning.is_possible:
            return
        found = free.bounded(before)
        if found is None:
            return
        budget, most_activations = found
        try:
            plan = self._replanning.fitting(budget=budget)
        # As a bound may be far too high, it refuses nothing: the step may fit nevertheless.
        except BudgetError:
            return
        if not self._keep_to(plan, "a bound of activations"):
            return
        get_dist_logger().info(bounded_in_words(before, self._manager.plan, most_activations), ranks=[0])

    def _keep_to(self, plan: Plan, why: str) -> bool:
        """Put a plan in force that keeps to another budget. Collective.

        False if the free memory has been taken since: all states are where they were, and a warning says so. An
        exception would end a training that may well go on.
        """
        shown = f"{why}: room for {plan.budget.device} bytes of model data"
        with self._replanning.between_steps("following free memory"), uncollected():
            refused = self._manager.try_plan(plan, shown, *BUDGETED)
            self._device.trim()  # torch's allocator would keep from others what the model gave up
        if refused is None:
            self._free.restart()
        elif refused.is_shortage:
            self._free.stay(self._manager.plan, refused)
        # The host has no memory for the states that would leave the device.
        else:
            self._free.refuse(plan.budget, str(refused))
        return refused is None


def _are_alike(plan: Plan, before: Plan) -> bool:
    """Whether both plans put everything in the same places, with the same bytes."""
    # Homes on the same tiers may differ in bytes: by sums of micro-batches, or by the number of optimizer states.
    return plan.placement == before.placement and _bytes_of(plan) == _bytes_of(before)


def _bytes_of(plan: Plan) -> tuple[int, list[dict[Kind, int]]]:
    return plan.demand.scratch_bytes, [chunk.home_bytes for chunk in plan.demand.chunks]
