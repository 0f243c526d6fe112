"""What a pass over a model is, in numbers: which chunks it touches at which event, in which order.

An event is an operator that begins a phase, and a number of the operator's own: how often it began that phase before in
the running pass. A backward counts down from the operator's forwards, as it goes through them in reverse, so that both
events of one call have one number. It is never a running index: what a pass leaves out, or does besides, shifts no
other event. So a trace of one pass predicts passes with other lengths, idle experts and frozen parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple


class Phase(IntEnum):
    """What an operator is doing at a position."""

    FORWARD = 0
    BACKWARD = 1
    TOUCH = 2  # a released parameter was used outside its operator
    STEP = 3
    BUILD = 4
    RECOMPUTE = 5  # a forward inside a backward


_IN_REVERSE = Phase.BACKWARD, Phase.RECOMPUTE


class PassKind(IntEnum):
    """What is traced apart, because nothing of one kind says what comes next in another."""

    TRAINING = 0  # a forward with gradients, or several, and the backward
    EVALUATION = 1  # a forward without gradients
    BACKWARD = 2  # one that follows no forward of the model, such as the second one through a graph


class StepEvent(NamedTuple):
    """An operator, by its place in the table of positions, begins a phase."""

    operator: int
    phase: Phase
    occurrence: int  # of the operator's call in the running pass, from 0; below it for what comes after all calls


class Touch(NamedTuple):
    """A chunk is used at an event."""

    event: StepEvent
    chunk: int


Counts = dict[tuple[int, Phase], int]
"""Events of a pass so far, by operator and phase."""


class Events:
    """Counts the events of the running pass. `now` is the last one; outside of passes all have number 0."""

    def __init__(self) -> None:
        self.now = StepEvent(0, Phase.FORWARD, 0)
        self._counts: Counts | None = None

    def reach(self, operator: int, phase: Phase) -> None:
        """The operator begins the phase."""
        if self._counts is None:
            self.now = StepEvent(operator, phase, 0)
            return
        count = self._counts.get((operator, phase), 0)
        self._counts[operator, phase] = count + 1
        if phase in _IN_REVERSE:
            count = self._counts.get((operator, Phase.FORWARD), 0) - 1 - count
        self.now = StepEvent(operator, phase, count)

    def begin(self) -> Counts | None:
        """A pass begins. Returns the counts of the one outside it, for `resume`."""
        outside, self._counts = self._counts, {}
        return outside

    def resume(self, outside: Counts | None) -> None:
        """The pass is over, and the one outside it goes on, if there is one."""
        self._counts = outside


@dataclass(frozen=True)
class Trace:
    """What the training passes of a model did, on this rank: `model.chunk_manager.trace`.

    Args:
        operators: the model's, by the number that events name them with; number 0 is the model itself.
        touches: which chunk is used at which event, in order. With several ranks none of chunks that stay.
        non_model_bytes: by event, the most bytes of activations and workspace beside the model data, up to the next
            event. Empty where none were recorded, see `ChunkManager.recorder`.
    """

    operators: tuple[str, ...]
    touches: tuple[Touch, ...]
    non_model_bytes: Mapping[StepEvent, int]

    @property
    def peak(self) -> tuple[StepEvent, int] | None:
        """The event with the most non-model bytes, and these. None without any."""
        return max(self.non_model_bytes.items(), key=lambda pair: pair[1], default=None)

    def describe(self, event: StepEvent) -> str:
        """The event in words. Local; raises nothing."""
        name = self.operators[event.operator] or "the model"
        number = f" {event.occurrence}" if event.occurrence >= 0 else ""
        return f"{event.phase.name.lower()}{number} of {name}"


def merged(expected: Sequence[Touch], passed: Sequence[Touch]) -> list[Touch]:
    """Both sequences in one. `passed` is a part of it, in order, and what `passed` lacks stays where it was.

    A touch of `passed` that `expected` lacks comes right after the touch before it. One that comes earlier or later in
    `passed` than in `expected` moves to where `passed` has it. Neither sequence has a touch twice.
    """
    place = {touch: at for at, touch in enumerate(expected)}
    at = 0
    in_order = set()  # membership only
    for touch in passed:
        if place.get(touch, -1) >= at:
            at = place[touch] + 1
            in_order.add(touch)
    others = set(passed) - in_order  # membership only
    at = 0
    both: list[Touch] = []
    for touch in passed:
        if touch in in_order:
            both += [each for each in expected[at : place[touch]] if each not in others]
            at = place[touch] + 1
        both.append(touch)
    return both + [each for each in expected[at:] if each not in others]
