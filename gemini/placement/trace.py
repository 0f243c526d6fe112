"""The trace of a pass over a model, in numbers: which chunks it touches at which event, in which order.

An event names an operator, the phase that it begins, and its *occurrence*: how often this operator began this phase
before in the running pass. A backward goes through the forwards in reverse, so it counts down from their number, and
both events of one call have the same occurrence. Events have no running index: what a pass leaves out or adds shifts no
other event. Therefore the trace of one pass predicts passes with other lengths, idle experts and frozen parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """What an operator does at a position."""

    FORWARD = 0
    BACKWARD = 1
    TOUCH = 2  # a released parameter was used outside its operator
    STEP = 3
    BUILD = 4
    RECOMPUTE = 5  # a forward inside a backward


# A checkpointed region is recomputed where its backward begins, so recomputations come in reverse too.
_IN_REVERSE = Phase.BACKWARD, Phase.RECOMPUTE


class PassKind(IntEnum):
    """The kinds of passes. Each has a trace of its own, because one kind says nothing about the order of another."""

    TRAINING = 0  # a forward with gradients, or several, and the backward
    EVALUATION = 1  # a forward without gradients
    BACKWARD = 2  # a backward that follows no forward of the model, such as the second one through a graph


class StepEvent(NamedTuple):
    """An operator begins a phase. `operator` is its place in the table of positions."""

    operator: int
    phase: Phase
    occurrence: int  # of this event in the running pass, from 0; negative for backwards beyond the pass's forwards


class Touch(NamedTuple):
    """A chunk is used at an event."""

    event: StepEvent
    chunk: int


Counts = dict[tuple[int, Phase], int]
"""The number of events of a pass so far, by operator and phase."""


class Events:
    """Counts the events of the running pass. `now` is the latest event. Outside of passes every occurrence is 0."""

    def __init__(self) -> None:
        self.now = StepEvent(0, Phase.FORWARD, 0)
        self._counts: Counts | None = None

    def reach(self, operator: int, phase: Phase) -> None:
        """The operator begins the phase."""
        # Events outside of passes are in no trace, so nothing has to tell two of them apart.
        if self._counts is None:
            self.now = StepEvent(operator, phase, 0)
            return
        count = self._counts.get((operator, phase), 0)
        self._counts[operator, phase] = count + 1
        if phase in _IN_REVERSE:
            # After forwards 0, 1 and 2 of an operator its backwards are 2, 1 and 0: each has the number of the forward
            # that it belongs to.
            count = self._counts.get((operator, Phase.FORWARD), 0) - 1 - count
        self.now = StepEvent(operator, phase, count)

    def begin(self) -> Counts | None:
        """Begin a pass. Returns the counts of the pass around it, for `resume`."""
        # An evaluation inside a training pass must not raise the numbers of that pass's events.
        outside, self._counts = self._counts, {}
        return outside

    def resume(self, outside: Counts | None) -> None:
        """End the pass and continue with the counts of the one around it. None: there is none."""
        self._counts = outside


@dataclass(frozen=True)
class Trace:
    """The trace of a model's training passes on this rank: `model.chunk_manager.trace`.

    Args:
        operators: names of the operators, in the numbering of events; number 0 is the model itself.
        touches: which chunk is used at which event, in order. Several ranks do not record chunks that stay.
        non_model_bytes: the peak of activations and workspace between each event and the next. Empty if it was not
            recorded, see `ChunkManager.recorder`.
    """

    operators: tuple[str, ...]
    touches: tuple[Touch, ...]
    non_model_bytes: Mapping[StepEvent, int]

    @property
    def peak(self) -> tuple[StepEvent, int] | None:
        """The event with the most non-model bytes, and that number. None if nothing was recorded."""
        return max(self.non_model_bytes.items(), key=lambda pair: pair[1], default=None)

    def describe(self, event: StepEvent) -> str:
        """The event in words. Local; raises nothing."""
        name = self.operators[event.operator] or "the model"
        # A backward beyond the pass's forwards belongs to no call that a number could name.
        number = f" {event.occurrence}" if event.occurrence >= 0 else ""
        return f"{event.phase.name.lower()}{number} of {name}"


def merged(expected: Sequence[Touch], passed: Sequence[Touch]) -> list[Touch]:
    """Merge two sequences: `passed` is a subsequence of the result, and touches that it lacks stay where they were.

    A touch of `passed` that `expected` lacks comes right after the touch before it. A touch at another place in
    `passed` than in `expected` moves to where `passed` has it. Neither sequence has a touch twice.
    """
    # Find the touches that both sequences have in the same order. They anchor the merge.
    place = {touch: at for at, touch in enumerate(expected)}
    at = 0
    in_order = set()  # membership only
    for touch in passed:
        if place.get(touch, -1) >= at:
            at = place[touch] + 1
            in_order.add(touch)
    others = set(passed) - in_order  # membership only
    # Before each anchor insert what `expected` has there, except for touches that move.
    at = 0
    merged_touches: list[Touch] = []
    for touch in passed:
        if touch in in_order:
            # Touches that `passed` has elsewhere are left out here, and come where `passed` has them.
            merged_touches += [each for each in expected[at : place[touch]] if each not in others]
            at = place[touch] + 1
        merged_touches.append(touch)
    return merged_touches + [each for each in expected[at:] if each not in others]
