"""The budget that one model's data should have now, from the free memory at each step, and after a shortage.

[Note: Shortage] A forward or backward that finds no device memory ends with an exception like any other: on all ranks
the gradients since the last step are dropped, and weights and optimizer state are those of that step. So they are
after a step that finds no memory: it takes all of it before it changes anything. The shortage is
found at the next use of the model. torch counts how often a device ran out of memory, whoever catches the exception.
Ranks compare their counts after a failure and at every step; if one has grown, model data gives up a part of the device
before anything runs. The next reading does not give it back: it would be as wrong as the one before.

[Note: First batch] Until a step has shown its activations, model data leaves a part of the device to them by default. A
first batch that needs more would run out of memory, and its step would be dropped. So the first forward with gradients
asks for an upper bound of what its batch takes (gemini/model/first_batch.py). If that is more than the default leaves,
chunks make room before the forward runs. The bound may be twice what the step takes, or more, so nothing else follows
from it: it gives no room to model data, it refuses nothing, and the first step's figures replace it. Ranks compare
their bounds once in such a forward, and never after the first step.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from gemini.dist_logger import get_dist_logger
from gemini.errors import BudgetError
from gemini.manager.chunk_manager import ChunkManager
from gemini.monitor.live import LiveBytes
from gemini.placement.budget import Budget, FreeBytes
from gemini.placement.following import (
    ShortageCap,
    budget_after_shortage,
    budget_for_bound,
    budget_to_follow,
    peak_in_words,
)
from gemini.placement.plan import Plan
from gemini.placement.sizes import format_bytes

_MOST_BOUNDS = 8  # forwards with gradients that may ask for one: a script may never step


class FreeMemory:
    """The budgets of one model. Every decision follows from numbers that all ranks have agreed on."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._live = manager.live
        self._communicator = manager.communicator
        self._failures = manager.step.failures
        self._seen: LiveBytes | None = None
        self._refused_bytes: int | None = None  # device budget that no plan could keep to
        self._cap = ShortageCap()
        self._is_first = True  # no reading of a step was followed so far
        self._has_told_least = False
        self.room: int | None = None
        """What the device had for model data by the last reading. None: any amount, or it was not read."""
        self.activations: int | None = None
        """The most bytes that a step took besides model data, as far as steps have shown."""
        self._num_bounds_due = _MOST_BOUNDS
        self.most_activations: int | None = None
        """This rank's bound of what the batch of the coming forward takes besides model data; None: unknown."""
        self.is_short = False
        """The device ran out of memory, and model data has not given up room since."""

    def look(self) -> bool:
        """Read what the last step has measured. Collective after a failure, which all ranks have had.

        False if `wanted` has nothing to follow, as in most uses of a model.
        """
        seen = self._live.pop_agreed()
        if seen is not None:
            # Only steps leave a reading, and the cap counts steps.
            self._cap.step()
        if self._failures.pop_failure():
            # The failed step made no agreed reading, so ranks compare their counts of shortages here.
            words = torch.tensor(self._live.shortage(), dtype=torch.int64, device=self._communicator.device)
            self._communicator.all_reduce_max_(words, "shortage of memory")
            self._live.agree_on_shortage(words.tolist())
            # A failure for another reason brings no new reading: only steps are followed.
            after = self._live.pop_agreed()
            seen = after if after is not None and after.is_short else seen
        if seen is not None:
            # `is_short` has these failures on all ranks now. The next step must not report them once more.
            self._live.forgive()
            self.is_short = self.is_short or seen.is_short
        self._seen = seen
        if seen is not None:
            self.activations, self._num_bounds_due = seen.activations, 0
        return seen is not None or self.is_short

    def wanted(self, plan: Plan) -> Budget | None:
        """The budget for the next plan; None if the plan may stay. Local."""
        seen, is_short = self._seen, self.is_short
        # A reading is followed once, whatever comes of it: not again at each forward until the next step.
        self._seen, self.is_short, self.room = None, False, None
        if seen is None and not is_short:
            return None
        # A fixed `model_data_memory` follows no readings, but a shortage makes it smaller, too.
        now = plan.budget
        if seen is not None and plan.settings.model_data_memory is None:
            now = Budget.of(plan.settings, FreeBytes(seen.free, plan.budget.host, seen.activations))
        # A shortage outweighs the reading, which was wrong. The cap keeps later readings below the new budget.
        if is_short:
            budget = budget_after_shortage(plan, now)
            if budget is None:
                self._tell_least(plan)
            else:
                self._cap.set(budget.device)
            return budget
        now, is_first = self._cap.bound(now), self._is_first
        self._is_first, self.room = False, now.device
        budget = budget_to_follow(plan, now, is_first)
        self._note_lack(plan, budget)
        refused = self._refused_bytes
        # Not asked for again: no plan keeps to the refused budget or less.
        if budget is None or (refused is not None and budget.device is not None and budget.device <= refused):
            return None
        return budget

    def asks_for_bound(self, plan: Plan) -> bool:
        """No step has shown its activations yet, and the budget depends on them. Local, and equal on all ranks."""
        return self._num_bounds_due > 0 and plan.budget.device is not None and plan.settings.model_data_memory is None

    def note_bound(self, most_activations: int | None) -> None:
        """What the coming forward takes at most besides model data, on this rank. None: unknown. Local."""
        self.most_activations = most_activations

    def bounded(self, plan: Plan) -> tuple[Budget, int] | None:
        """The budget for the next plan, and what the batch takes at most; None if the plan may stay. Collective.

        Called only if `asks_for_bound`. See [Note: First batch].
        """
        # The bound is of this batch only, so it is used up here.
        most, self.most_activations = self.most_activations, None
        words = torch.tensor(self._live.bound(most), dtype=torch.int64, device=self._communicator.device)
        self._communicator.all_reduce_max_(words, "activations of the first batch")
        # Counted after the collective: a rank that failed on its way here has not counted either.
        self._num_bounds_due -= 1
        agreed = self._live.agree_on_bound(words.tolist())
        if agreed is None:
            return None
        # Both budgets follow from the same reading, so that they differ by the bound alone.
        known = FreeBytes(agreed.free, plan.budget.host)
        bounded_budget = Budget.of(plan.settings, replace(known, most_activations=agreed.activations))
        # The bound asks for no more than the default leaves to activations.
        if bounded_budget == Budget.of(plan.settings, known):
            return None
        budget = budget_for_bound(plan, bounded_budget)
        return None if budget is None or agreed.activations is None else (budget, agreed.activations)

    def budget_after_shortage(self, plan: Plan) -> Budget | None:
        """The budget in place of `plan`'s, for which a device had no memory. None: it cannot be less.

        Local, and equal on all ranks. The next step does not find this shortage again.
        """
        # The figures are not needed: the call counts the shortage as handled.
        self._live.shortage()
        budget = budget_after_shortage(plan, plan.budget)
        if budget is not None:
            self._cap.set(budget.device)
        return budget

    def restart(self) -> None:
        """Another plan, which keeps to the budget, is in force."""
        self._refused_bytes = None

    def reset_shortage(self) -> None:
        """The user has set other budgets: forget shortages and refusals."""
        self._refused_bytes, self.is_short, self._cap = None, False, ShortageCap()

    def refuse(self, budget: Budget, why: str) -> None:
        """No plan keeps to this budget: warn once, and let the plan in force stay. Local.

        An exception would end a training that may well go on: the process that took the device's memory may give it
        back.
        """
        self._refused_bytes = budget.device
        words = f"the device has room for {budget.device} bytes of model data, but states stay where they are: {why}"
        get_dist_logger().warning(words, ranks=[0])

    def stay(self, plan: Plan, refusal: BudgetError) -> None:
        """The device has no memory for more than `plan`, the plan in force, whatever was read: rank 0 warns. Local.

        Nothing is lost, and no step ran short: the next reading does not find this shortage again.
        """
        # As above, this call counts the shortage as handled.
        self._live.shortage()
        # The device has what the plan in force takes. The rest of its budget may not be there.
        self._cap.set(plan.device_bytes)
        get_dist_logger().warning(f"states stay where they are: {refusal}", ranks=[0])

    def find_peak(self, has_failed: bool) -> str | None:
        """The event of a step with the most activations on this rank, in words; None if none was recorded. Local.

        has_failed: see `Recorder.find_peak`.
        """
        event = self._manager.recorder.find_peak(has_failed=has_failed)
        return None if event is None else self._manager.trace.describe(event)

    def _note_lack(self, plan: Plan, budget: Budget | None) -> None:
        """Tell once, until there is room again, that `plan` takes more of the device than there is and stays.

        budget: of the plan to come, which tells of itself. None: `plan` stays.
        """
        lacks = self.room is not None and self.room < (plan.device_bytes if budget is None else budget.device or 0)
        if lacks and budget is None and not self._has_told_least:
            words = (
                f"the device has room for {format_bytes(self.room or 0)} of model data, and the "
                f"{format_bytes(plan.device_bytes)} that tensor_placement_policy={plan.policy!r} has there cannot be "
                "less: training goes on for as long as the device has memory for what a step takes"
            )
            get_dist_logger().warning(words, ranks=[0])
        self._has_told_least = lacks

    def _tell_least(self, plan: Plan) -> None:
        words = (
            f"the device ran out of memory{peak_in_words(plan, self.find_peak(has_failed=True))}, and the "
            f"{format_bytes(plan.device_bytes)} of model data on it cannot be less: make the batch smaller, or "
            "checkpoint activations"
        )
        get_dist_logger().warning(words, ranks=[0])
