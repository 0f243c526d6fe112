"""Payloads that are gathered ahead: on their way into a slot before anybody has asked for them, each in a lane."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from gemini.chunks.chunk import Chunk
from gemini.memory.slot import Slot
from gemini.observe import Moving


@dataclass
class Arrival:
    """A payload on its way into a slot; the slot is the chunk's already, the chunk is released until it is there."""

    chunk: Chunk
    slot: Slot
    moving: Moving
    finish: Callable[[], None]
    lane: int


class Ahead:
    """Those of one model on this rank, in the order in which they were started, which is equal on all ranks."""

    def __init__(self, most: int) -> None:
        """most: payloads that may be on their way at once."""
        self.most = most
        self._by_chunk: dict[int, Arrival] = {}

    def __contains__(self, chunk: int) -> bool:
        return chunk in self._by_chunk

    @property
    def is_full(self) -> bool:
        """No more may be started now."""
        return len(self._by_chunk) >= self.most

    def free_lane(self) -> int:
        """The first lane that nothing is on its way in. Lane 0 is for what was asked for."""
        taken = {arrival.lane for arrival in self._by_chunk.values()}
        return next(lane for lane in range(1, self.most + 1) if lane not in taken)

    def add(self, arrival: Arrival) -> None:
        """The payload has been started."""
        self._by_chunk[arrival.chunk.index] = arrival

    def take(self, chunk: int) -> Arrival | None:
        """The chunk's payload, if it is on its way; it is not one of these any more."""
        return self._by_chunk.pop(chunk, None)

    def take_all_but(self, chunks: Collection[int]) -> list[Arrival]:
        """The payloads of all other chunks, likewise."""
        for chunk in self._by_chunk:
            if chunk not in chunks:
                break
        else:  # as at nearly every touch
            return []
        return [self._by_chunk.pop(chunk) for chunk in list(self._by_chunk) if chunk not in chunks]

    def clear(self) -> None:
        """After a failed step: nothing is on its way."""
        self._by_chunk.clear()
