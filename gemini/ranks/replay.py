"""What ranks have agreed to do: the collectives of the last pass of a kind, for as long as all keep to them.

[Note: Following] On gloo, comparing tags before a collective makes every rank wait for the slowest, once more than
the collective itself does. But all ranks made the same collectives in the last pass, compared one by one, so all
expect the same of this one. They compare what they expect at its start, and whatever is the expected one then goes
without tags. A rank that is about to launch something else meets the others in the store first. If all ranks leave
the schedule at the same point they go on together, with tags. If not, the others wait in a collective that this rank
never joins, so no data is taken for other data, and the watchdog finds different ways at one number of collective.
"""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32


class Collective(NamedTuple):
    """What identifies a collective within a pass."""

    kind: int
    chunk: int
    position: int


class ScheduleReplay:
    """The collectives of the running pass against those of the last one of its kind."""

    def __init__(self) -> None:
        self.follows = False  # the running pass has been the expected one so far
        self._expected: dict[str, list[Collective]] = {}
        self._kind: str | None = None  # of the running pass
        self._made: list[Collective] = []

    def begin(self, kind: str) -> int | None:
        """A pass begins. A number that is equal where ranks expect the same; None if there is nothing to expect."""
        self._kind, self._made = kind, []
        expected = self._expected.get(kind)
        self.follows = bool(expected)
        return crc32(repr(expected).encode()) if expected else None

    def end(self) -> None:
        """The running pass, if any, is complete: the next one of its kind is expected to be the same."""
        if self._kind is not None and not (self.follows and self._made == self._expected[self._kind]):
            self._expected[self._kind] = self._made
        self.leave()

    def leave(self) -> None:
        """What comes now, until the next pass begins, is not expected, and the running pass not remembered."""
        self.follows, self._kind = False, None

    def matches(self, collective: Collective) -> bool:
        """Record what is made next. True if all ranks have agreed on it."""
        if self._kind is not None:
            self._made.append(collective)
        if self.follows:
            expected, position = self._expected[str(self._kind)], len(self._made) - 1
            self.follows = position < len(expected) and expected[position] == collective
        return self.follows
