"""Spans: the elements of a longer piece that an update touches. Thousands of runs then need no tensors of their own."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import Any


class Spans:
    """Runs of elements [start, start + numel), in order and without overlap."""

    __slots__ = ("_memo", "numels", "starts")

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """runs: (start, numel). Raises ValueError if they overlap or are out of order."""
        pairs = [(start, numel) for start, numel in runs if numel]
        end = 0
        for start, numel in pairs:
            if start < end or numel < 0:
                raise ValueError(f"spans must be in order and apart, found one from {start} on after one to {end}")
            end = start + numel
        self.starts = tuple(start for start, _ in pairs)
        self.numels = tuple(numel for _, numel in pairs)
        # By name, the last key and its result only: a table of addresses is dropped when its tensors have moved.
        self._memo: dict[str, tuple[Hashable, Any]] = {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.numels, strict=True)

    @property
    def end(self) -> int:
        """The end of the last run."""
        return self.starts[-1] + self.numels[-1] if self.starts else 0

    def within(self, start: int, end: int) -> Spans:
        """The parts of the runs in [start, end), counted from `start`."""
        # The usual case returns the same object, which keeps its remembered tables from step to step.
        if start <= 0 and end >= self.end:
            return self

        def cut() -> Spans:
            borders = ((max(s, start), min(s + n, end)) for s, n in self)
            return Spans((first - start, last - first) for first, last in borders if first < last)

        found: Spans = self.remembered("within", (start, end), cut)
        return found

    def remembered(self, name: str, key: Hashable, make: Any) -> Any:
        """`make()`, or its last result if `key` has not changed: the tables of kernels are the same in most steps."""
        before = self._memo.get(name)
        if before is None or before[0] != key:
            before = self._memo[name] = key, make()
        return before[1]
