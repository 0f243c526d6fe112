"""The budget that one model's data should have now: of free memory, read at each step, and after a shortage.

[Note: Shortage] A forward or backward that the device had no memory for ends with an exception, like any other: the
gradients since the last step are dropped, on all ranks, and weights and optimizer state are those of that step. What
ran out is found where the model is used next. torch counts the times that a device ran out, whoever catches the
exception; ranks compare their counts after a failure and at every step, and if one has grown, model data gives up a
part of the device before anything runs. It does not come back with the next reading, which would be as wrong as the
one before.
"""

from __future__ import annotations

import torch

from gemini.dist_logger import get_dist_logger
from gemini.manager.chunk_manager import ChunkManager
from gemini.monitor.live import LiveBytes
from gemini.placement.budget import Budget, FreeBytes
from gemini.placement.following import ShortageCap, budget_after_shortage, budget_to_follow, peak_in_words
from gemini.placement.plan import Plan
from gemini.placement.sizes import format_bytes


class FreeMemory:
    """Of one model. Everything that it decides follows from numbers that all ranks have agreed on."""

    def __init__(self, manager: ChunkManager) -> None:
        self._manager = manager
        self._live = manager.live
        self._communicator = manager.communicator
        self._failures = manager.step.failures
        self._seen: LiveBytes | None = None
        self._refused_bytes: int | None = None  # of the device: the last budget that could not be followed
        self._cap = ShortageCap()
        self.activations: int | None = None
        """The most bytes that a step was seen to take besides model data."""
        self.is_short = False
        """The device ran out of memory, and model data has not made room since."""

    def look(self) -> bool:
        """Take what the last step has read. Collective after a failure, which all ranks have had.

        False if there is nothing that `wanted` could follow from, as in most uses of a model.
        """
        seen = self._live.take()
        if seen is not None:
            self._cap.step()
        if self._failures.take():
            words = torch.tensor(self._live.shortage(), dtype=torch.int64, device=self._communicator.device)
            self._communicator.all_reduce_max_(words, "shortage of memory")
            self._live.agree_on_shortage(words.tolist())
            after = self._live.take()
            seen = after if after is not None and after.is_short else seen
        if seen is not None:
            self._live.forgive()
            self.is_short = self.is_short or seen.is_short
        self._seen = seen
        self.activations = self.activations if seen is None else seen.activations
        return seen is not None or self.is_short

    def wanted(self, plan: Plan) -> Budget | None:
        """The budget of the plan to come. None: the plan may stay. Local."""
        seen, is_short = self._seen, self.is_short
        self._seen, self.is_short = None, False
        if seen is None and not is_short:
            return None
        now = plan.budget
        if seen is not None and plan.settings.model_data_memory is None:
            now = Budget.of(plan.settings, FreeBytes(seen.free, plan.budget.host, seen.activations))
        if is_short:
            budget = budget_after_shortage(plan, now)
            if budget is None:
                self._tell_least(plan)
            else:
                self._cap.set(budget.device)
            return budget
        budget = budget_to_follow(plan, self._cap.bound(now))
        refused = self._refused_bytes
        if budget is None or (refused is not None and budget.device is not None and budget.device <= refused):
            return None
        return budget

    def restart(self) -> None:
        """Another plan is in force, which keeps to the budget."""
        self._refused_bytes = None
        self._live.restart()

    def forget(self) -> None:
        """The user has set other budgets."""
        self._refused_bytes, self.is_short, self._cap = None, False, ShortageCap()

    def refuse(self, budget: Budget, why: str) -> None:
        """No plan keeps to this budget: the plan in force stays, which is told once. Local.

        An exception would end a training that may well go on: whoever took the device's memory may give it back.
        """
        self._refused_bytes = budget.device
        words = f"the device has room for {budget.device} bytes of model data, but states stay where they are: {why}"
        get_dist_logger().warning(words, ranks=[0])

    def find_peak(self, has_failed: bool) -> str | None:
        """The event of a step with the most activations on this rank, in words; None if none was recorded. Local.

        has_failed: see `Recorder.find_peak`.
        """
        event = self._manager.recorder.find_peak(has_failed=has_failed)
        return None if event is None else self._manager.trace.describe(event)

    def _tell_least(self, plan: Plan) -> None:
        words = (
            f"the device ran out of memory{peak_in_words(plan, self.find_peak(has_failed=True))}, and the "
            f"{format_bytes(plan.device_bytes)} of model data on it cannot be less: make the batch smaller, or "
            "checkpoint activations"
        )
        get_dist_logger().warning(words, ranks=[0])
