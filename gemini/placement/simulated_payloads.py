"""The payloads of a simulated run: which ones are in slots, which come and which leave. No tensor, no device.

What `manager/params.py` does to memory is done to numbers here, with the same `NextUse` and the same `EvictionQueue`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING

from gemini.placement.demand import Kind, Tier
from gemini.placement.eviction import EvictionQueue
from gemini.placement.next_use import TOUCHES_AHEAD, NextUse
from gemini.placement.trace import Events
from gemini.placement.traffic import Exchange, Purpose, Traffic

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


class Payloads:
    """Of all chunks of a plan, by index."""

    def __init__(self, plan: Plan, traffic: Traffic) -> None:
        self._facts = plan.packing.chunks
        self._tiers = [homes[Kind.PARAM] for homes in plan.placement.homes]
        self._kept = plan.placement.kept
        self._num_slots = plan.placement.num_slots
        self._traffic = traffic
        whole = [chunk.home_layout.world_size == 1 for chunk in self._facts]
        self.at_home = [is_whole and tier is Tier.DEVICE for is_whole, tier in zip(whole, self._tiers, strict=True)]
        for_good = [
            at_home and not (facts.lends_home and chunk.is_frozen is False)
            for at_home, facts, chunk in zip(self.at_home, self._facts, plan.demand.chunks, strict=True)
        ]
        stay = [facts.is_fine and i in self._kept and not facts.lends_home for i, facts in enumerate(self._facts)]
        self.is_resident = all(good or stays for good, stays in zip(for_good, stay, strict=True))
        self._stay = [i for i, good in enumerate(for_good) if self.is_resident and not good]
        self.events = Events()
        self.next_use = NextUse(self.events)
        self.next_use.outdated = {i for i, chunk in enumerate(plan.demand.chunks) if not chunk.is_frozen}
        self.pins = [0] * len(self._facts)
        self.num_gathers = [0] * len(self._facts)
        self._gathered: set[int] = set()
        self._inside: tuple[dict[int, None], dict[int, None]] = {}, {}  # of the pools' slots, by size
        self._queues = EvictionQueue(self.next_use, self._may_leave), EvictionQueue(self.next_use, self._may_leave)
        self.max_prefetch = 0 if all(whole) else plan.settings.max_prefetch
        self._ahead: dict[int, None] = {}  # on their way, in slots of their own or in those of a pool

    @property
    def state(self) -> Hashable:
        """What is in slots between two steps."""
        return frozenset(self._gathered)

    def is_there(self, chunk: int) -> bool:
        """The chunk is in a slot."""
        return chunk in self._gathered

    def is_coming(self, chunk: int) -> bool:
        """The chunk is on its way into a slot."""
        return chunk in self._ahead

    def is_kept(self, chunk: int) -> bool:
        """The chunk has a slot of its own."""
        return chunk in self._kept

    def gather_stale(self) -> None:
        """The model's forward begins: chunks that stay until the next update are there from now on."""
        for chunk in self._stay:
            if chunk not in self._gathered:
                self.next_use.touch(chunk)
                self._depart(chunk)
                self._arrive(chunk)

    def fetch(self, chunk: int) -> None:
        """A chunk that can leave is used, and was touched."""
        self._queue(chunk).note(chunk)
        if chunk in self._gathered:
            return
        if chunk in self._ahead:
            self._finish(chunk)
            return
        found = self._find_slot(chunk)
        assert found, f"chunk {chunk} finds no slot that is not in use"
        self._depart(chunk)
        self._arrive(chunk)

    def open_own_part(self, chunk: int) -> None:
        """A released chunk that each rank holds whole and has updated in part: this rank's part comes into a slot."""
        self.next_use.touch(chunk)
        found = self._find_slot(chunk)
        assert found, f"chunk {chunk} finds no slot that is not in use"
        facts = self._facts[chunk]
        self.num_gathers[chunk] += 1
        num_bytes = facts.layout.shard_numel * facts.dtypes.weight.itemsize
        self._traffic.copy(self._tiers[chunk], Tier.DEVICE, num_bytes, Purpose.UPDATE)
        self._arrive(chunk)

    def to_gather(self) -> Iterator[int]:
        """What comes next, one chunk after the other, as far as a slot is free for it by then, on several ranks.

        Each starts with `gather_ahead` before the one after it is asked for.
        """
        if not self.max_prefetch:
            return
        coming = self.next_use.coming(self.max_prefetch * TOUCHES_AHEAD)
        for chunk in [each for each in self._ahead if each not in coming]:
            self._finish(chunk)
        for chunk in coming:
            if len(self._ahead) >= self.max_prefetch:
                return
            if chunk in self._gathered or self.at_home[chunk] or chunk in self._ahead:
                continue
            if not self._find_slot(chunk, ahead=True):
                return
            yield chunk

    def gather_ahead(self, chunk: int) -> None:
        """What `to_gather` came to starts."""
        self._ahead[chunk] = None
        self._depart(chunk)

    def finish_ahead(self) -> None:
        """All that was started ahead has arrived."""
        for chunk in list(self._ahead):
            self._finish(chunk)

    def _finish(self, chunk: int) -> None:
        del self._ahead[chunk]
        self._arrive(chunk)

    def pin(self, chunk: int) -> None:
        """Something uses the chunk from now on."""
        self.pins[chunk] += 1

    def unpin(self, chunks: Sequence[int]) -> None:
        """One thing less uses each of these."""
        for chunk in chunks:
            self._queue(chunk).note(chunk)
            self.pins[chunk] -= 1

    def release(self, chunk: int) -> None:
        """The chunk leaves its slot, if it is in one: what is there is stale, or another one needs it."""
        self._gathered.discard(chunk)
        self._inside[self._facts[chunk].oversize].pop(chunk, None)

    def _queue(self, chunk: int) -> EvictionQueue:
        return self._queues[self._facts[chunk].oversize]

    def _may_leave(self, chunk: int) -> bool:
        return chunk in self._gathered and not self.pins[chunk] and chunk not in self._kept

    def _find_slot(self, chunk: int, ahead: bool = False) -> bool:
        """Make a slot free for the chunk. ahead: not if that evicts something that is used before the chunk is."""
        if chunk in self._kept:
            return True
        size = self._facts[chunk].oversize
        inside = self._inside[size]
        if len(inside) + self._num_coming(size) < self._num_slots[size]:
            return True
        victim = self._queues[size].first(self._num_slots[size], lambda: inside)
        if victim is None and not ahead:
            self.finish_ahead()
            victim = self._queues[size].first(self._num_slots[size], lambda: inside)
        if victim is None:
            return False
        if ahead and self.next_use.next_use(victim) <= self.next_use.next_use(chunk):
            return False
        self.release(victim)
        return True

    def _num_coming(self, size: bool) -> int:
        """Into slots of a pool."""
        return sum(chunk not in self._kept and self._facts[chunk].oversize is size for chunk in self._ahead)

    def _depart(self, chunk: int) -> None:
        """The bytes that the chunk's payload is made of start to move."""
        facts = self._facts[chunk]
        itemsize = facts.dtypes.weight.itemsize
        self.num_gathers[chunk] += 1
        self._traffic.copy(self._tiers[chunk], Tier.DEVICE, facts.home_layout.shard_numel * itemsize, Purpose.PAYLOAD)
        if facts.home_layout.world_size > 1:
            self._traffic.exchange(Exchange.GATHER, facts.payload_bytes)

    def _arrive(self, chunk: int) -> None:
        self._gathered.add(chunk)
        if chunk not in self._kept:
            self._inside[self._facts[chunk].oversize][chunk] = None
        self._queue(chunk).note(chunk)
