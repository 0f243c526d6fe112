"""Payloads that are prefetched: each is on its way into a slot, in a lane of its own, before an operator needs it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gemini.chunks.chunk import Chunk
from gemini.memory.slot import Slot
from gemini.observe import Moving


@dataclass
class Arrival:
    """A payload on its way into a slot. The slot is the chunk's already; the chunk is RELEASED until then."""

    chunk: Chunk
    slot: Slot
    moving: Moving
    finish: Callable[[], None]
    lane: int


class Ahead:
    """One model's prefetches in flight on this rank, in the order of their start, which is equal on all ranks."""

    def __init__(self, most: int) -> None:
        """most: the number of payloads that may be in flight at once."""
        self.most = most
        self._by_chunk: dict[int, Arrival] = {}

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._by_chunk

    @property
    def is_full(self) -> bool:
        """No prefetch may be started now."""
        return len(self._by_chunk) >= self.most

    def free_lane(self) -> int:
        """The first lane without a prefetch. Lane 0 is left to fetches that an operator waits for."""
        # A lane names the buffers for tags, and for what gloo sends, of an all-gather. They are in use until it has
        # finished.
        taken = {arrival.lane for arrival in self._by_chunk.values()}
        return next(lane for lane in range(1, self.most + 1) if lane not in taken)

    def add(self, arrival: Arrival) -> None:
        """Note a prefetch that was started."""
        self._by_chunk[arrival.chunk.index] = arrival

    def pop(self, chunk: int) -> Arrival | None:
        """Remove and return the chunk's prefetch; None if it has none."""
        return self._by_chunk.pop(chunk, None)

    def pop_all_but(self, chunks: Collection[int]) -> list[Arrival]:
        """Remove and return the prefetches of all other chunks."""
        for chunk in self._by_chunk:
            if chunk not in chunks:
                break
        # No prefetch is superfluous, as at nearly every touch.
        else:
            return []
        return [self._by_chunk.pop(chunk) for chunk in list(self._by_chunk) if chunk not in chunks]

    def clear(self) -> None:
        """Forget all prefetches, after a failed step."""
        self._by_chunk.clear()
