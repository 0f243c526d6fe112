"""Selects the chunk that leaves its slot when another chunk needs one, by `placement.eviction`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from gemini.chunks.chunk import Chunk
from gemini.memory.slot import SlotPool
from gemini.placement.eviction import EvictionQueue
from gemini.placement.next_use import NextUse


class Victims:
    """The evictions of one model. They follow from touches and pins alone, which are equal on all ranks."""

    def __init__(self, chunks: Sequence[Chunk], next_use: NextUse) -> None:
        self._chunks = chunks
        # This is a function of the chunks, and no method: the queue must not refer back to this object, since objects
        # of a model refer downwards only (`tests/test_objects.py`).
        may_leave = partial(_may_leave, chunks)
        self._queues = EvictionQueue(next_use, may_leave), EvictionQueue(next_use, may_leave)  # by size

    def note(self, chunk: Chunk) -> None:
        """The chunk was touched, or has arrived in its slot."""
        self._queues[chunk.oversize].note(chunk.index)

    def unpin(self, chunks: Iterable[Chunk]) -> None:
        """Lift one pin of each chunk. See [Note: Pins] in step.py."""
        for chunk in chunks:
            # Noted first: after an interrupt in between the queue still knows the chunk.
            self.note(chunk)
            chunk.lift_pin()

    def first(self, pool: SlotPool, oversize: bool) -> Chunk | None:
        """The chunk that leaves the pool next; None while all are in use. It is returned again until it has left.

        oversize: the pool is that of the larger slots.
        """

        def inside() -> Iterator[int]:
            return (slot.chunk for slot in pool.slots if slot.chunk is not None)

        index = self._queues[oversize].first(len(pool.slots), inside)
        return None if index is None else self._chunks[index]


def _may_leave(chunks: Sequence[Chunk], index: int) -> bool:
    """Whether the chunk is in a slot of a pool and nothing uses it now."""
    chunk = chunks[index]
    # A kept slot is no room for another chunk.
    return chunk.slot is not None and not chunk.pins and chunk.own_slot is None
