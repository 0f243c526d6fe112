"""Slots: equal pieces of device memory, each of which can hold one chunk's payload.

[Note: Held slots] The parameters of a fetched chunk are views of its slot. A view that user code or an un-hooked
autograd node keeps beyond the chunk's release shows up in the storage's use count; such a slot must not be written
again until the view dies. The use count is local to a rank. It also depends on the moment, since a collective's worker
thread drops its references late. So it never decides *which chunk* leaves, only whether this rank may reuse the memory
at once or must take a spare slot.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from gemini.memory.modes import unseen
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Region, drop_copies, ready, wait_on_stream
from gemini.observe import Occupied
from gemini.placement.demand import Kind, Tier

_use_count = torch._C._storage_Use_Count


class SharedStorage:
    """Counts foreign references to a storage: its use count now minus that at construction.

    Construct it while only our own tensors refer to the storage.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.storage = tensor.untyped_storage()._cdata
        self._num_ours = _use_count(self.storage)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in this storage."""
        return bool(tensor.untyped_storage()._cdata == self.storage)

    def num_holders(self) -> int:
        """References to the storage besides our own. Call it only while no parameter is bound to the slot."""
        return _use_count(self.storage) - self._num_ours


class Slot(SharedStorage):
    """One slot. `chunk` is the index of the chunk whose payload it holds, None if the slot is free."""

    def __init__(self, tier: MemoryTier, num_bytes: int, kind: str) -> None:
        self._tier = tier
        self._kind = kind
        # (num_bytes,) uint8; None once it was given back
        self.region: Region | None = Region(Tier.DEVICE, tier.allocate(num_bytes, kind))
        super().__init__(self.region.flat)
        self.tickets = self.region.tickets  # of whatever is in the slot
        self.num_bytes = num_bytes
        self.chunk: int | None = None
        self.place = -1  # order among its pool's slots; -1 while it is in no pool
        self.views: dict[int, tuple[Region, tuple[Tensor, ...]]] = {}  # by chunk: its payload and its parameters' views

    def remember(self, chunk: int, payload: Region, views: tuple[Tensor, ...]) -> None:
        """Cache a chunk's payload and views in this slot: making them costs more than the rest of a fetch."""
        self.views[chunk] = payload, views
        # The cached tensors are references of ours: without this they would count as foreign, and the slot as held.
        self._num_ours += 1 + len(payload.parts) + len(views)

    def occupy(self, chunk: int) -> None:
        """The slot, which is free, gets the payload of the chunk with this index."""
        self.chunk = chunk
        if heard := self._tier.ledger.heard:
            heard.tell(Occupied(self._kind, id(self), self.num_bytes, chunk))

    def vacate(self) -> None:
        """The chunk has left the slot. Of a pool's slot `SlotPool.vacate` says so: the pool must find it first."""
        self.chunk = None
        if heard := self._tier.ledger.heard:
            heard.tell(Occupied(self._kind, id(self), self.num_bytes, None))

    def stand_at(self, place: int) -> None:
        """Take this place in the order of a pool's slots; -1: leave the pool. Only the pool calls it."""
        self.place = place

    def wipe(self) -> None:
        """Poison the memory: its content is not valid any more."""
        if self.region is not None:
            self._tier.poison(ready(self.region))

    def close(self) -> None:
        """Give the memory back."""
        region, self.region = self.region, None  # first: memory that an interrupted close gave back is not given twice
        if region is not None:
            # The cached views would keep the memory.
            self.views.clear()
            self._tier.free(ready(region), self._kind)

    def __del__(self) -> None:
        """Give back a slot that an interrupt kept out of its pool: the ledger would count it for ever."""
        # `region` is missing if its allocation failed.
        if getattr(self, "region", None) is not None:
            # The cycle collector may call this inside any operation of the user's.
            with unseen():
                self.close()


def wait_until_free(memory: SharedStorage, timeout_s: float) -> bool:
    """Wait until nothing foreign refers to the memory; False after `timeout_s`.

    A collective's worker thread drops its references some time after the collective is done.
    """
    deadline: float | None = None
    while memory.num_holders() > 0:
        now = time.monotonic()
        deadline = now + timeout_s if deadline is None else deadline
        if now >= deadline:
            return False
        time.sleep(0.0002)  # releases the GIL, which the worker thread needs
    return True


class KeptSlot(Slot):
    """A slot that one chunk never leaves. Its home shard is a part of the slot and survives a wipe of the rest."""

    def __init__(self, tier: MemoryTier, num_bytes: int, home: slice, dtype: torch.dtype) -> None:
        """home: the bytes of the home shard."""
        super().__init__(tier, num_bytes, "slots")
        assert self.region is not None
        self.shard = self.region[home].view(dtype)
        self._around: tuple[Tensor, ...] = self.region.flat[: home.start], self.region.flat[home.stop :]
        # This replaces the count of `Slot`, after which the shard and its surroundings became references of ours.
        self._num_ours = _use_count(self.storage)
        # The ledger counts the shard as parameters, as it would in a home of its own.
        tier.ledger.recount("slots", Kind.PARAM, self.shard.nbytes)

    def wipe(self) -> None:
        # The shard shares the tickets of the whole slot, so this waits for copies of the rest, too.
        wait_on_stream(self.shard)
        for part in self._around:
            self._tier.poison(part)

    def close(self) -> None:
        if self.region is not None:
            self._tier.ledger.recount(Kind.PARAM, "slots", self.shard.nbytes)
        super().close()
        # Views of ours would keep the memory for as long as somebody knows the slot.
        self._around = ()
        vars(self).pop("shard", None)


class SlotPool:
    """The slots of one size. Slots that foreign views hold wait in `held` until the views die.

    From the first use on there are always `count` slots beside the held ones: a rank with one more or less would evict
    other chunks than the other ranks. The first free slot in order is taken, or the one whose last copy began first:
    what comes into a slot waits for its copies, and the copy out of another slot may have ended long ago.
    """

    def __init__(self, tier: MemoryTier, num_bytes: int, count: int, kind: str) -> None:
        self.tier = tier
        self.num_bytes = num_bytes
        self.kind = kind
        self.count = count
        self.slots: list[Slot] = []  # in order of their places
        self.held: list[Slot] = []
        self._num_places = 0
        self._free: list[tuple[int, Slot]] = []  # heap by place; has every free slot, and also stale entries

    def first_free(self) -> Slot | None:
        """A free slot, or None; the caller sets its `chunk`. Raises BudgetError if a held slot cannot be replaced."""
        # A held slot whose views have died comes back before `fill` takes new memory in its place.
        if self.held:
            self._reclaim()
        if len(self.slots) < self.count:
            self.fill()
        while self._free:
            # Entries are not removed when a slot is taken or leaves the pool: skip the stale ones.
            place, slot = self._free[0]
            if slot.chunk is None and slot.place == place:
                tickets = slot.tickets
                if tickets.write is None and not tickets.reads:
                    return slot
                free = [each for each in self.slots if each.chunk is None]
                return min(free, key=lambda each: (each.tickets.last_number(), each.place))
            heappop(self._free)
        return None

    def vacate(self, slot: Slot) -> None:
        """Mark a slot as free."""
        # Rebuild the heap before stale entries outnumber the slots: a slot adds an entry each time that it is vacated.
        if len(self._free) > 2 * len(self.slots):
            self._find_free()
        heappush(self._free, (slot.place, slot))  # first: after an interrupt in between no free slot is missing
        slot.vacate()

    def _find_free(self) -> None:
        self._free = [(slot.place, slot) for slot in self.slots if slot.chunk is None]
        heapify(self._free)

    def _join(self, slot: Slot) -> None:
        """Add a free slot, as the last in order."""
        slot.stand_at(self._num_places)
        self._num_places += 1
        self.slots.append(slot)
        heappush(self._free, (slot.place, slot))

    def fill(self) -> None:
        """Take the memory of slots that are missing. Raises BudgetError."""
        while len(self.slots) < self.count:
            self._join(Slot(self.tier, self.num_bytes, self.kind))

    def set_aside(self, slot: Slot) -> None:
        """Take a held slot out of the pool until its views die."""
        self.held.append(slot)  # first: an interrupt in between must not lose the slot
        self.slots.remove(slot)
        slot.stand_at(-1)

    def _reclaim(self) -> None:
        """Take back held slots whose views have died: into the pool if it lacks a slot, else to the tier."""
        for slot in [slot for slot in self.held if slot.num_holders() <= 0]:
            self.held.remove(slot)
            if len(self.slots) < self.count:
                self._join(slot)
            else:
                slot.close()

    def resize(self, count: int) -> None:
        """Set the number of slots, which must be free. Surplus ones are given back; `fill` takes missing ones."""
        self._reclaim()
        surplus, self.slots, self.count = self.slots[count:], self.slots[:count], count
        self._find_free()
        for slot in surplus:
            slot.close()

    def rest(self) -> None:
        """Give back the memory of all slots, which must be free. `fill` takes as many again."""
        self._reclaim()
        slots, self.slots = self.slots, []
        self._find_free()
        for slot in slots:
            slot.close()

    def empty(self) -> None:
        """Free all slots, whatever they hold, and replace those that an unfinished collective still holds."""
        for position, slot in enumerate(list(self.slots)):
            drop_copies(slot.tickets)
            slot.vacate()
            if slot.num_holders() > 0:
                self.slots.remove(slot)  # first: a slot without memory is never in the pool
                slot.close()
                other = Slot(self.tier, self.num_bytes, self.kind)
                other.stand_at(slot.place)
                self.slots.insert(position, other)
        self._find_free()

    def close(self) -> None:
        """Give all memory back."""
        for slot in self.slots + self.held:
            slot.close()
        # With a count of 0 no later `fill` takes memory again.
        self.slots, self.held, self.count = [], [], 0
        self._free.clear()


class SlotPools(list[SlotPool]):
    """The slots of one kind: a pool for regular chunks, and one for tensors that are larger than a chunk."""

    def __init__(self, tier: MemoryTier, kind: str) -> None:
        super().__init__()
        self._tier = tier
        self._kind = kind

    def open(self, sizes: Iterable[int], counts: Iterable[int]) -> None:
        """Set the bytes and number of the slots of both sizes. No memory is taken yet."""
        pairs = zip(sizes, counts, strict=True)
        self[:] = [SlotPool(self._tier, num_bytes, count, self._kind) for num_bytes, count in pairs]

    def fill(self) -> None:
        """Take the memory of all slots that are missing. Raises BudgetError."""
        for pool in self:
            pool.fill()

    def resize(self, counts: Iterable[int]) -> None:
        """Set the number of slots of each size. All slots must be free."""
        for pool, count in zip(self, counts, strict=True):
            pool.resize(count)

    def rest(self) -> None:
        """Give back the memory of all slots, which must be free; `fill` takes it again."""
        for pool in self:
            pool.rest()

    def empty(self) -> None:
        """Free all slots, whatever they hold."""
        for pool in self:
            pool.empty()

    def idle(self) -> Iterator[Region]:
        """The memory of all free slots."""
        for slot in (slot for pool in self for slot in pool.slots if slot.chunk is None):
            if slot.region is not None:
                yield slot.region

    def held_bytes(self) -> int:
        """Bytes of retired slots that live views still keep allocated."""
        return sum(slot.num_bytes for pool in self for slot in pool.held)

    def close(self) -> None:
        """Give all memory back."""
        for pool in self:
            pool.close()
