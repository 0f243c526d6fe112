"""The schedule that ranks have agreed on: the collectives of the last pass of a kind, for as long as all follow them.

[Note: Following] On gloo, comparing tags before a collective makes every rank wait for the slowest, once more than the
collective itself does. But all ranks made the same collectives in the last pass, compared one by one, so they expect
the same in this one. They compare their expectations at its start, and each collective that is the expected one then
goes without tags. A rank that is about to launch another one first meets the other ranks in the store. If all ranks
leave the schedule at the same point they go on together, with tags. If not, the others wait in a collective that this
rank never joins. So no data is taken for other data, and the watchdog finds two different collectives with one number.
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
    """Compares the collectives of the running pass with those of the last pass of its kind."""

    def __init__(self) -> None:
        self.follows = False  # all collectives of the running pass so far were the expected ones
        self._expected: dict[str, list[Collective]] = {}
        self._kind: str | None = None  # of the running pass
        self._made: list[Collective] = []

    def begin(self, kind: str) -> int | None:
        """Begin a pass. Returns a digest that is equal on ranks that expect the same; None if nothing is expected."""
        self._kind, self._made = kind, []
        expected = self._expected.get(kind)
        self.follows = bool(expected)
        return crc32(repr(expected).encode()) if expected else None

    def end(self) -> None:
        """Complete the running pass, if any: the next pass of its kind is expected to be the same."""
        # A pass that ended early has followed the schedule to its own end, but the next one is expected to be as short.
        if self._kind is not None and not (self.follows and self._made == self._expected[self._kind]):
            self._expected[self._kind] = self._made
        self.drop()

    def drop(self) -> None:
        """Forget the running pass: until the next one begins nothing is expected or recorded."""
        self.follows, self._kind = False, None

    def matches(self, collective: Collective) -> bool:
        """Record the next collective. True if all ranks have agreed on it."""
        if self._kind is not None:
            self._made.append(collective)
        if self.follows:
            expected, position = self._expected[str(self._kind)], len(self._made) - 1
            # Once left, the schedule stays left until the pass ends: what follows would be compared at shifted places.
            self.follows = position < len(expected) and expected[position] == collective
        return self.follows
