"""Which chunk leaves when another needs its slot: the first in the order of `NextUse` that is not in use.

Each size of slots has a heap of (rank, chunk) with lazy deletion: a chunk is pushed when its rank or its pins have
changed, and outdated entries are dropped when they reach the top. A fetch then costs the logarithm of the number of
slots instead of their number. The run and the prediction of a run use the same queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush

from gemini.placement.next_use import NextUse


class EvictionQueue:
    """The chunks in slots of one size, by index. Its answers follow from touches and pins alone, alike on all ranks."""

    def __init__(self, next_use: NextUse, may_leave: Callable[[int], bool]) -> None:
        """may_leave: whether a chunk is in a slot of this size and not in use."""
        self._next_use = next_use
        self._may_leave = may_leave
        self._heap: list[tuple[int, int]] = []  # (rank, chunk)
        self._epoch = -1  # the epoch of `NextUse` in which the heap's ranks hold
        self._changed: dict[int, None] = {}  # touched, unpinned or arrived since the heap was last used

    def note(self, chunk: int) -> None:
        """The chunk was touched or unpinned, or has arrived in its slot."""
        self._changed[chunk] = None

    def first(self, num_slots: int, inside: Callable[[], Iterable[int]]) -> int | None:
        """The chunk to evict; None while all are in use. The same chunk is returned until it has left.

        num_slots: slots of this size. inside: the chunks in them, some of which may be in use.
        """
        heap, next_use, may_leave = self._heap, self._next_use, self._may_leave
        # Another epoch may change every rank, so rebuild. Rebuild as well when outdated entries outnumber the slots:
        # otherwise the heap would grow with every touch.
        if self._epoch != next_use.epoch or len(heap) + len(self._changed) > 16 + 2 * num_slots:
            heap[:] = [(next_use.rank(chunk), chunk) for chunk in inside() if may_leave(chunk)]
            heapify(heap)
            self._epoch = next_use.epoch
        else:
            for chunk in self._changed:
                if may_leave(chunk):
                    # An older entry of the chunk stays in the heap. Its rank is outdated, by which it is recognised at
                    # the top.
                    heappush(heap, (next_use.rank(chunk), chunk))
        self._changed.clear()
        # Drop entries of chunks that have left, are in use, or were touched since they were pushed.
        while heap:
            rank, chunk = heap[0]
            if may_leave(chunk) and rank == next_use.rank(chunk):
                # The entry is not popped: a gather ahead leaves this chunk in its slot if it is used before the
                # gathered one.
                return chunk
            heappop(heap)
        return None
