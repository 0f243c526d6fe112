"""Observes how many micro-batches a step has."""

from __future__ import annotations

_STEADY_STEPS = 2
"""Steps with an unchanged micro-batch count before replanning; doubles after each replan.

The last step of an epoch may have fewer micro-batches, and a training whose count alternates would only move states.
"""


class MicroBatches:
    """The micro-batches of one model's steps. Ranks agree on each number that is noted."""

    def __init__(self, number: int) -> None:
        """number: the count that the plan in force is for."""
        self._followed = self._last = number
        self._num_alike = 0
        self._needed = _STEADY_STEPS

    def note_step(self, number: int) -> None:
        """A step has added up `number` backwards. Local."""
        self._num_alike = self._num_alike + 1 if number == self._last else 1
        self._last = number

    @property
    def have_changed(self) -> bool:
        """Whether steps keep to another count than the plan's."""
        # A step without a backward (count 0) is no reason for a plan.
        return self._last != self._followed and self._num_alike >= self._needed and self._last > 0

    def follow(self) -> int:
        """The count that the plan is to follow now. Local."""
        self._followed, self._needed = self._last, 2 * self._needed
        return self._followed
