"""Positions: points in a step's schedule, as numbers for tags and as words for errors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from gemini.placement.trace import Events, Phase, StepEvent

_WORDS = {
    Phase.FORWARD: "forward of {}",
    Phase.BACKWARD: "backward of {}",
    Phase.TOUCH: "use of a parameter of {}",
    Phase.STEP: "the optimizer step",
    Phase.BUILD: "building of {}",
    Phase.RECOMPUTE: "recomputed forward of {}",
}


class Recording(Protocol):
    """Is told of every event of a step."""

    def reached(self, event: StepEvent) -> None:
        """`event` begins."""


class StepPosition:
    """The current position in the step. Operator 0 is the model itself."""

    def __init__(self, operators: Sequence[str]) -> None:
        self.operators = list(operators)
        self.now = 0  # in this process; it is in the tags of collectives
        self.events = Events()
        self._recording: Recording | None = None  # measures the events of the running step, if it is recorded

    @property
    def operator(self) -> int:
        """The operator of the current position."""
        return self.now // len(Phase)

    def add(self, operator: str) -> int:
        """Add an operator to the table; returns its number."""
        self.operators.append(operator)
        return len(self.operators) - 1

    def set(self, operator: int, phase: Phase) -> None:
        """Move to `phase` of `operator`, and count that as an event."""
        # One number holds both, because a tag has one field for the moment. `describe` takes it apart.
        self.now = operator * len(Phase) + phase
        self.events.reach(operator, phase)
        if self._recording is not None:
            self._recording.reached(self.events.now)

    def return_to(self, position: int) -> None:
        """Be at `position` again, which `now` was before a use that has ended. That is no event."""
        self.now = position

    def reset(self) -> None:
        """Be where a step begins: the running one failed."""
        self.now = 0

    @property
    def is_recorded(self) -> bool:
        """Whether a recording of the running step has begun."""
        return self._recording is not None

    def begin_recording(self, recording: Recording) -> None:
        """Tell `recording` of every event from now on."""
        self._recording = recording

    def end_recording(self) -> None:
        """Tell the recording of no event any more. Without one nothing happens."""
        self._recording = None

    def here(self) -> str:
        """The current position in words."""
        return self.describe(self.now)

    def describe(self, position: int) -> str:
        # In an error the position may be another rank's, whose table has operators that this one lacks.
        operator, phase = divmod(position, len(Phase))
        name = self.operators[operator] if operator < len(self.operators) else f"operator {operator}"
        return _WORDS[Phase(phase)].format(name or "the model")
