"""The chunk that is evicted is the one that a look at all slots would find, whatever was touched and pinned before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from gemini.memory.memory import EmulatedTier
from gemini.memory.slot import Slot, SlotPool
from gemini.placement.next_use import Events, NextUse, Phase
from gemini.runtime.chunk import ChunkUse, ParamState
from gemini.runtime.params import Victims

NUM_CHUNKS = 7


@dataclass(eq=False)
class FakeChunk(ChunkUse):
    """What `Victims` asks of a chunk."""

    index: int
    oversize: bool = False
    state: ParamState = ParamState.RELEASED
    own_slot: None = None
    slot: Slot | None = None


class Cache:
    """Chunks that come to slots and leave them, as the parameter store has them do it."""

    def __init__(self, num_slots: int) -> None:
        self.chunks = [FakeChunk(index) for index in range(NUM_CHUNKS)]
        self.events = Events()
        self.uses = NextUse(self.events)
        self.victims = Victims(cast(Any, self.chunks), self.uses)
        self.pool = SlotPool(EmulatedTier(), 8, num_slots, "slots")

    def touch(self, chunk: FakeChunk, pins: bool) -> None:
        self.events.reach(chunk.index, Phase.FORWARD)
        self.uses.touch(chunk.index)
        self.victims.note(cast(Any, chunk))
        if chunk.state is ParamState.RELEASED:
            slot = self.pool.first_free()
            assert slot is next((slot for slot in self.pool.slots if slot.chunk is None), None), "the first in order"
            if slot is None:
                slot = self.evict()
            if slot is None:
                return
            slot.chunk, chunk.slot, chunk.state = chunk.index, slot, ParamState.GATHERED
            self.victims.note(cast(Any, chunk))
        if pins:
            chunk.pin()

    def evict(self) -> Slot | None:
        expected = min(self.unpinned(), key=lambda chunk: (self.uses.rank(chunk.index), chunk.index), default=None)
        victim = self.victims.first(self.pool, False)
        assert cast(Any, victim) is expected
        return None if expected is None else self.leave(expected)

    def leave(self, chunk: FakeChunk) -> Slot:
        slot, chunk.slot, chunk.state = chunk.slot, None, ParamState.RELEASED
        assert slot is not None
        self.pool.vacate(slot)
        return slot

    def unpinned(self) -> Iterator[FakeChunk]:
        return (chunk for chunk in self.chunks if chunk.slot is not None and not chunk.pins)


@given(
    st.integers(1, 5),
    st.lists(
        st.tuples(st.sampled_from(["touch", "pin", "unpin", "leave", "begin", "end"]), st.integers(0, NUM_CHUNKS - 1)),
        max_size=120,
    ),
)
def test_the_victim_is_the_one_that_a_search_finds(num_slots: int, events: list[tuple[str, int]]) -> None:
    cache = Cache(num_slots)
    for event, index in events * 2:  # the second time follows the record of the first for a while
        chunk = cache.chunks[index]
        if event in ("touch", "pin"):
            cache.touch(chunk, pins=event == "pin")
        elif event == "unpin" and chunk.pins:
            cache.victims.unpin([cast(Any, chunk)])
        elif event == "leave" and chunk in cache.unpinned():
            cache.leave(chunk)
        elif event == "begin":
            cache.uses.begin_pass()
        elif event == "end":
            cache.uses.end_pass()
    for chunk in cache.chunks:
        cache.victims.unpin([cast(Any, chunk)] * chunk.pins)
    while next(cache.unpinned(), None) is not None:
        cache.evict()
