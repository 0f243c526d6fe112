"""A step without tensors: which payload is where, and the bytes that move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from gemini.placement.demand import Kind, Tier
from gemini.placement.gradient_rules import is_resident_for_good, may_stay
from gemini.placement.next_use import TOUCHES_AHEAD, Events, EvictionQueue, NextUse

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


# -- Counts the bytes that cross the links and that ranks exchange in a step, by purpose, without moving any.


class MoveReason(StrEnum):
    """Why bytes cross the link between the tiers.

    PAYLOAD: parameters are fetched into a slot. GRADIENT: a reduced gradient comes to rest, or a sum is resumed. SPILL:
    an open gradient leaves its slot for another one, and comes back. UPDATE: states travel to the update and home.
    """

    PAYLOAD = "payload"
    GRADIENT = "gradient"
    SPILL = "spill"
    UPDATE = "update"


class Exchange(StrEnum):
    """The collectives on model data.

    GATHER: shards of parameters become a payload. REDUCE: gradients become shards of their mean. WHOLE_GRADIENT and
    WHOLE_WEIGHT: every rank computed a part, and all ranks gather the whole.
    """

    GATHER = "gather"
    REDUCE = "reduce"
    WHOLE_GRADIENT = "gather of reduced gradients"
    WHOLE_WEIGHT = "gather of updated weights"


class Traffic:
    """The traffic of one rank, counted."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[str, MoveReason]] = Counter()  # bytes by link ("host->device") and purpose
        self.launches: Counter[Exchange] = Counter()
        self.exchanged: Counter[Exchange] = Counter()  # bytes of payloads that are filled or sent

    def copy(self, source: Tier, target: Tier, num_bytes: int, purpose: MoveReason) -> None:
        """Count a copy. A copy within one tier crosses no link and is not counted."""
        # Without bytes no entry is made, so that `copies` names only links over which something goes.
        if source is not target and num_bytes:
            self.copies[f"{source}->{target}", purpose] += num_bytes

    def exchange(self, what: Exchange, num_bytes: int, launches: int = 1) -> None:
        """Count collectives in which all ranks together fill, or send, a payload of `num_bytes`."""
        self.launches[what] += launches
        self.exchanged[what] += num_bytes

    def clear(self) -> None:
        """Count from zero."""
        self.copies.clear()
        self.launches.clear()
        self.exchanged.clear()


# -- The payloads of a simulated run: which ones are in slots, which come and which leave. No tensor, no device.
#
# It keeps the books of `runtime/params.py` without tensors. Both ask `NextUse`, `EvictionQueue` and
# `gradient_rules.py` what is to be done.


class SimulatedPayloads:
    """The payloads of all chunks of a plan, by index."""

    def __init__(self, plan: Plan, traffic: Traffic) -> None:
        self._facts = plan.packing.chunks
        self._tiers = [homes[Kind.PARAM] for homes in plan.placement.homes]
        self._kept = plan.placement.kept
        self._num_slots = plan.placement.num_slots
        self._traffic = traffic
        whole = [chunk.home_layout.world_size == 1 for chunk in self._facts]
        # A whole home on the device is the payload itself: no fetch, no slot.
        self.at_home = [is_whole and tier is Tier.DEVICE for is_whole, tier in zip(whole, self._tiers, strict=True)]
        # The model is resident if no payload ever leaves: it is at home and the home is not lent, or it is a fine chunk
        # that keeps its slot and is gathered once after each update.
        for_good = [
            is_resident_for_good(
                is_payload_at_home=at_home, may_lend_home=facts.may_lend_home, is_trained=chunk.is_frozen is False
            )
            for at_home, facts, chunk in zip(self.at_home, self._facts, plan.demand.chunks, strict=True)
        ]
        stay = [
            may_stay(is_fine=facts.is_fine, has_own_slot=i in self._kept, may_lend_home=facts.may_lend_home)
            for i, facts in enumerate(self._facts)
        ]
        self.is_resident = all(good or stays for good, stays in zip(for_good, stay, strict=True))
        # All or nothing: if one chunk can leave, the operators' hooks are on for all, and chunks are gathered one by
        # one.
        self._stay = [i for i, good in enumerate(for_good) if self.is_resident and not good]
        self.events = Events()
        self.next_use = NextUse(self.events)
        self.next_use.note_trained({i for i, chunk in enumerate(plan.demand.chunks) if not chunk.is_frozen})
        self.pins = [0] * len(self._facts)
        self.num_gathers = [0] * len(self._facts)
        self._gathered: set[int] = set()
        self._inside: tuple[dict[int, None], dict[int, None]] = {}, {}  # chunks in slots of the pools, by size
        # One queue for each size of slots: a chunk only makes room for one of its own size.
        self._queues = EvictionQueue(self.next_use, self._may_leave), EvictionQueue(self.next_use, self._may_leave)
        self.max_prefetch = plan.settings.prefetch_depth(plan.world_size)
        self._ahead: dict[int, None] = {}  # chunks on their way, into kept slots or slots of a pool

    @property
    def state(self) -> Hashable:
        """The chunks that are in slots between two steps."""
        # Which slot a chunk is in does not matter: slots of one size are equal.
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
        """Gather all chunks that stay until the next update, as the model's forward begins."""
        for chunk in self._stay:
            if chunk not in self._gathered:
                self.next_use.touch(chunk)
                self._depart(chunk)
                self._arrive(chunk)

    def fetch(self, chunk: int) -> None:
        """Bring a chunk that can leave into a slot, after it was touched."""
        # The touch has changed the chunk's next use, and with it its rank in the queue.
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
        """Copy this rank's updated part into a slot. Each rank holds the chunk whole and has updated only a part."""
        self.next_use.touch(chunk)
        found = self._find_slot(chunk)
        assert found, f"chunk {chunk} finds no slot that is not in use"
        facts = self._facts[chunk]
        # As in the run this counts as a gather, because the all-gather that the caller launches next fills the rest of
        # the slot.
        self.num_gathers[chunk] += 1
        num_bytes = facts.layout.shard_numel * facts.dtypes.weight.itemsize
        self._traffic.copy(self._tiers[chunk], Tier.DEVICE, num_bytes, MoveReason.UPDATE)
        self._arrive(chunk)

    def to_gather(self) -> Iterator[int]:
        """The chunks to fetch ahead, as long as a slot is free for the next one.

        The caller starts each with `gather_ahead` before it asks for the next, which changes the free slots.
        """
        if not self.max_prefetch:
            return
        coming = self.next_use.coming(self.max_prefetch * TOUCHES_AHEAD)
        # A gather whose chunk is no longer expected still occupies its slot. Finish it, so that the chunk can leave.
        for chunk in [each for each in self._ahead if each not in coming]:
            self._finish(chunk)
        for chunk in coming:
            # The bound counts what is on its way, since each gather has a lane of its own.
            if len(self._ahead) >= self.max_prefetch:
                return
            if chunk in self._gathered or self.at_home[chunk] or chunk in self._ahead:
                continue
            if not self._find_slot(chunk, ahead=True):
                return
            yield chunk

    def gather_ahead(self, chunk: int) -> None:
        """Start the gather of a chunk that `to_gather` has returned."""
        self._ahead[chunk] = None
        self._depart(chunk)

    def finish_ahead(self) -> None:
        """Finish all gathers that were started ahead."""
        for chunk in list(self._ahead):
            self._finish(chunk)

    def _finish(self, chunk: int) -> None:
        del self._ahead[chunk]
        self._arrive(chunk)

    def pin(self, chunk: int) -> None:
        """Count one more use of the chunk, which cannot leave meanwhile."""
        self.pins[chunk] += 1

    def unpin(self, chunks: Sequence[int]) -> None:
        """Count one use less of each of these chunks."""
        for chunk in chunks:
            self._queue(chunk).note(chunk)
            self.pins[chunk] -= 1

    def release(self, chunk: int) -> None:
        """Take the chunk out of its slot, if it is in one, because it is stale or another chunk needs the slot."""
        self._gathered.discard(chunk)
        self._inside[self._facts[chunk].oversize].pop(chunk, None)

    def _queue(self, chunk: int) -> EvictionQueue:
        return self._queues[self._facts[chunk].oversize]

    def _may_leave(self, chunk: int) -> bool:
        # A kept slot belongs to its chunk, so that leaving it makes no room for another one.
        return chunk in self._gathered and not self.pins[chunk] and chunk not in self._kept

    def _find_slot(self, chunk: int, ahead: bool = False) -> bool:
        """Make a slot free for the chunk, and return whether there is one. ahead: evict only what is used later."""
        if chunk in self._kept:
            return True
        size = self._facts[chunk].oversize
        inside = self._inside[size]
        if len(inside) + self._num_coming(size) < self._num_slots[size]:
            return True
        victim = self._queues[size].first(self._num_slots[size], lambda: inside)
        # Gathers on their way may occupy the last slots. Once finished, they can be evicted.
        if victim is None and not ahead:
            self.finish_ahead()
            victim = self._queues[size].first(self._num_slots[size], lambda: inside)
        if victim is None:
            return False
        if ahead and not self.next_use.is_later(victim, chunk):
            return False
        self.release(victim)
        return True

    def _num_coming(self, size: bool) -> int:
        """The number of gathers on their way into slots of this pool."""
        return sum(chunk not in self._kept and self._facts[chunk].oversize is size for chunk in self._ahead)

    def _depart(self, chunk: int) -> None:
        """Count the bytes of the chunk's fetch, which starts now."""
        facts = self._facts[chunk]
        itemsize = facts.dtypes.weight.itemsize
        self.num_gathers[chunk] += 1
        # Each rank copies its own part over the link. The other parts come from the other ranks.
        self._traffic.copy(
            self._tiers[chunk], Tier.DEVICE, facts.home_layout.shard_numel * itemsize, MoveReason.PAYLOAD
        )
        if facts.home_layout.world_size > 1:
            self._traffic.exchange(Exchange.GATHER, facts.payload_bytes)

    def _arrive(self, chunk: int) -> None:
        self._gathered.add(chunk)
        if chunk not in self._kept:
            self._inside[self._facts[chunk].oversize][chunk] = None
        self._queue(chunk).note(chunk)
