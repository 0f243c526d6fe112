"""Slots: equal pieces of device memory, each of which can hold one chunk's payload.

[Note: Held slots] Parameters of a fetched chunk are views of its slot. A view that user code or an un-hooked
autograd node keeps beyond the chunk's release shows up in the storage's use count; such a slot must not be
written again until the view dies. The use count is local to a rank and, with a collective's worker thread
dropping its references late, also to the moment; so it never decides *which chunk* leaves, only whether this
rank may reuse the memory at once or has to take a spare slot.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from gemini.memory.modes import unseen
from gemini.memory.tier import MemoryTier
from gemini.placement.demand import Kind

_use_count = torch._C._storage_Use_Count


class SharedStorage:
    """Memory that our own tensors, all of those that there are now, share with views that users may keep."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = tensor.untyped_storage()._cdata
        self._base_count = _use_count(self._storage)

    def is_of(self, tensor: Tensor) -> bool:
        """The tensor lies in this memory."""
        return bool(tensor.untyped_storage()._cdata == self._storage)

    def num_holders(self) -> int:
        """References to the memory beyond our own."""
        return _use_count(self._storage) - self._base_count


class Slot:
    """One slot. `chunk` is the index of the chunk whose payload it holds, None if free."""

    def __init__(self, tier: MemoryTier, num_bytes: int, kind: str) -> None:
        self._tier = tier
        self._kind = kind
        self.buffer: Tensor | None = tier.take(num_bytes, kind)  # (num_bytes,) uint8
        self.num_bytes = num_bytes
        self.chunk: int | None = None
        self.storage = self.buffer.untyped_storage()._cdata
        self.views: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}  # chunk -> payload and its parameters' views
        self._num_cached = 0
        self._base_count = _use_count(self.storage)

    def remember(self, chunk: int, payload: Tensor, views: tuple[Tensor, ...]) -> None:
        """Cache the views of a chunk in this slot: making them costs more than a fetch's other Python."""
        self.views[chunk] = (payload, views)
        self._num_cached += 1 + len(views)

    def wipe(self) -> None:
        """The content is gone."""
        if self.buffer is not None:
            self._tier.poison(self.buffer)

    def close(self) -> None:
        """Give the memory back."""
        buffer, self.buffer = self.buffer, None  # first: memory that an interrupted close gave back is not given twice
        if buffer is not None:
            self.views.clear()
            self._tier.give(buffer, self._kind)

    def __del__(self) -> None:
        """A slot that an interrupt kept out of its pool is not counted any more."""
        if getattr(self, "buffer", None) is not None:
            with unseen():  # the collector of cycles may call it in the middle of anything
                self.close()

    def num_holders(self) -> int:
        """References to the slot's memory beyond our own; call it when no parameter is bound to the slot."""
        return _use_count(self.storage) - self._base_count - self._num_cached


def settle(memory: Slot | SharedStorage, timeout_s: float) -> bool:
    """True once nobody holds the memory; waits for finished collectives, whose worker drops references late."""
    deadline = time.monotonic() + timeout_s
    while memory.num_holders() > 0:
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0002)  # releases the GIL, which the worker thread needs
    return True


class KeptSlot(Slot):
    """A slot that one chunk never leaves; the chunk's home shard is a part of it and outlives what the rest holds."""

    def __init__(self, tier: MemoryTier, num_bytes: int, home: slice, dtype: torch.dtype) -> None:
        """home: the bytes that are the home shard."""
        super().__init__(tier, num_bytes, "slots")
        assert self.buffer is not None
        self.home = self.buffer[home]  # uint8
        self.shard = self.home.view(dtype)
        self._around = self.buffer[: home.start], self.buffer[home.stop :]
        self._base_count = _use_count(self.storage)
        tier.ledger.recount("slots", Kind.PARAM, self.home.nbytes)

    def wipe(self) -> None:
        for part in self._around:
            self._tier.poison(part)

    def close(self) -> None:
        if self.buffer is not None:
            self._tier.ledger.recount(Kind.PARAM, "slots", self.home.nbytes)
        super().close()


class SlotPool:
    """The slots of one size. Slots that are held from outside wait in `held` until their views die.

    From the first use on there are always `count` slots beside the held ones: a rank with one more or less would
    evict other chunks.
    """

    def __init__(self, tier: MemoryTier, num_bytes: int, count: int, kind: str) -> None:
        self.tier = tier
        self.num_bytes = num_bytes
        self.kind = kind
        self.count = count
        self.slots: list[Slot] = []
        self.held: list[Slot] = []

    def free(self) -> Slot | None:
        """A free slot, or None. Raises BudgetError if one that is held cannot be replaced."""
        self._reclaim()
        self.fill()
        return next((slot for slot in self.slots if slot.chunk is None), None)

    def fill(self) -> None:
        """Take the memory of slots that are missing. Raises BudgetError."""
        while len(self.slots) < self.count:
            self.slots.append(Slot(self.tier, self.num_bytes, self.kind))

    def set_aside(self, slot: Slot) -> None:
        """Take a held slot out of the pool until its views die."""
        self.held.append(slot)  # first: an interrupt in between must not lose the slot
        self.slots.remove(slot)

    def _reclaim(self) -> None:
        if not self.held:
            return
        for slot in [slot for slot in self.held if slot.num_holders() <= 0]:
            self.held.remove(slot)
            if len(self.slots) < self.count:
                self.slots.append(slot)
            else:
                slot.close()

    def resize(self, count: int) -> list[Slot]:
        """Have `count` slots from now on; all are free. Gives surplus ones back and returns them, takes none yet."""
        self._reclaim()
        surplus, self.slots, self.count = self.slots[count:], self.slots[:count], count
        for slot in surplus:
            slot.close()
        return surplus

    def empty(self) -> None:
        """Free all slots, whatever they hold; those that a collective without an end still holds are replaced."""
        for position, slot in enumerate(list(self.slots)):
            slot.chunk = None
            if slot.num_holders() > 0:
                self.slots.remove(slot)  # first: a slot without memory is never in the pool
                slot.close()
                self.slots.insert(position, Slot(self.tier, self.num_bytes, self.kind))

    def close(self) -> None:
        """Give all memory back."""
        for slot in self.slots + self.held:
            slot.close()
        self.slots, self.held, self.count = [], [], 0
