"""How many micro-batches a step has, as the steps show which were made."""

from __future__ import annotations

_STEADY_STEPS = 2
"""With one number of micro-batches, before a plan follows it; twice as many after each plan.

The last step of an epoch may have fewer, and a training that goes back and forth would do nothing but move states.
"""


class MicroBatches:
    """Of one model. Ranks agree on each number that is noted."""

    def __init__(self, number: int) -> None:
        """number: that the plan in force is for."""
        self._followed = self._last = number
        self._num_alike = 0
        self._needed = _STEADY_STEPS

    def note_step(self, number: int) -> None:
        """A step has added up so many backwards. Local."""
        self._num_alike = self._num_alike + 1 if number == self._last else 1
        self._last = number

    @property
    def have_changed(self) -> bool:
        """Steps keep to another number than was followed last."""
        return self._last != self._followed and self._num_alike >= self._needed and self._last > 0

    def follow(self) -> int:
        """The number to follow now. Local."""
        self._followed, self._needed = self._last, 2 * self._needed
        return self._followed
