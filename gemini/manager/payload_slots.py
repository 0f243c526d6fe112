"""The slots of payloads: which one a chunk gets, and how a chunk leaves its slot.

Release is lazy: a chunk that nobody pins stays in its slot until another needs it. Which one leaves follows from the
sequence of touches alone (`placement.next_use`), equal on all ranks. Whether this rank may use the memory again at once
is another question, see [Note: Held slots].
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.chunks.chunk import Chunk
from gemini.chunks.param_state import ParamState
from gemini.errors import BudgetError, SlotError
from gemini.manager.binding import Binding
from gemini.manager.slot_errors import slot_is_held, slots_are_in_use
from gemini.manager.victims import Victims
from gemini.memory.memory import Memory
from gemini.memory.slot import KeptSlot, SharedStorage, Slot, wait_until_free
from gemini.observe import Observer
from gemini.placement.demand import Kind
from gemini.placement.next_use import NextUse
from gemini.ranks.communicator import Communicator

_FREE_WITHIN_S = 2.0  # a gloo worker drops its references within tens of ms: longer is a view that someone keeps


class PayloadSlots:
    """Owner of one model's payload slots on this rank: those of the pools, and those that chunks keep."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        memory: Memory,
        communicator: Communicator,
        binding: Binding,
        observer: Observer,
        next_use: NextUse,
        victims: Victims,
    ) -> None:
        self.pools = memory.slots
        self.left: list[KeptSlot] = []  # kept slots that were replaced while views still held them
        self._chunks = chunks
        self._device = memory.device
        self._position = communicator.position
        self._wait_s = _FREE_WITHIN_S if communicator.world_size > 1 else 0.0
        self._binding = binding
        self._observer = observer
        self._next_use = next_use
        self._victims = victims

    def free_slot(self, chunk: Chunk, ahead: bool = False) -> Slot | None:
        """A slot for the chunk, out of which another may be evicted. None if all are in use.

        ahead: None, too, rather than evict a chunk that is used earlier.
        """
        if chunk.own_slot is not None:
            return chunk.own_slot
        slot = self._replaced(chunk, None)
        if slot is not None:
            return slot
        victim = self._victims.first(self.pools[chunk.oversize], chunk.oversize)
        if victim is None:
            return None
        if ahead and self._next_use.next_use(victim.index) <= self._next_use.next_use(chunk.index):
            return None
        slot = victim.slot
        assert slot is not None
        if self.release(victim, chunk):
            return slot
        slot = self._replaced(chunk, victim)
        assert slot is not None
        return slot

    def _replaced(self, chunk: Chunk, victim: Chunk | None) -> Slot | None:
        """A free slot of the chunk's pool, or None. A held slot is replaced by a spare if the budget has one."""
        try:
            return self.pools[chunk.oversize].first_free()
        except BudgetError:
            whose = "another chunk" if victim is None else f"chunk {victim.index} ({victim.names()})"
            raise self._held(f"{whose} must leave its slot for chunk {chunk.index} ({chunk.names()})") from None

    def all_in_use(self, chunk: Chunk) -> SlotError:
        """The error for a chunk that gets no slot."""
        has_budget = self._device.capacity_bytes is not None
        pool = self.pools[chunk.oversize]
        return slots_are_in_use(self._position.here(), chunk, pool, self._chunks, has_budget)

    def _held(self, what: str) -> SlotError:
        return slot_is_held(self._position.here(), what, self._device.capacity_bytes)

    def release(self, chunk: Chunk, successor: Chunk | None = None) -> bool:
        """Take a gathered chunk out of its slot. False if a view holds the slot, which is then set aside.

        successor: the chunk that overwrites the slot next. Without one the slot is poisoned, on tiers that can.
        """
        assert chunk.slot is not None
        slot = chunk.slot
        what = "release" if successor is None else "evict"
        reason = self._position.here if successor is None else f"room for chunk {successor.index}"
        home = chunk.homes[Kind.PARAM].tier
        moving = self._observer.moving(what, chunk.index, "slot", home, chunk.payload_bytes, reason)
        with moving:
            is_free = self._leave(chunk, slot)
            if is_free and successor is None:
                slot.wipe()
        return is_free

    def _leave(self, chunk: Chunk, slot: Slot) -> bool:
        self._binding.write_back(chunk)
        self._binding.unbind(chunk)
        # [Note: Version bump] autograd saves a leaf (x @ w, w.norm()) without holding its storage. With a higher
        # version, a save that bypassed our hooks becomes autograd's own error instead of a wrong gradient.
        chunk.bump_versions()
        chunk.become(ParamState.HOLDS_GRAD if chunk.holds_grad else ParamState.RELEASED)
        if slot is chunk.own_slot:
            slot.vacate()
        else:
            self.pools[chunk.oversize].vacate(slot)
        if self.nobody_holds(slot):
            return True
        if slot is chunk.own_slot:
            # An update would write to the home in this slot, which the view shows.
            self._keep_another(chunk)
        else:
            self.pools[chunk.oversize].set_aside(slot)
        return False

    def nobody_holds(self, memory: SharedStorage) -> bool:
        """Whether no view holds the memory. A finished collective may hold it for a moment longer: wait for that."""
        return memory.num_holders() <= 0 or wait_until_free(memory, self._wait_s)

    def _keep_another(self, chunk: Chunk) -> None:
        """Give the chunk another slot and home, which no view shows. The old slot is given back when its views die."""
        before = chunk.own_slot
        assert before is not None
        try:
            chunk.keep_slot(self._device)
        except BudgetError:
            raise self._held(f"chunk {chunk.index} ({chunk.names()}) must leave its slot for an update") from None
        self.left.append(before)

    def close_left(self) -> None:
        """Give back the kept slots that were replaced and whose views have died."""
        for slot in [slot for slot in self.left if slot.num_holders() <= 0]:
            self.left.remove(slot)
            slot.close()

    def fill(self) -> None:
        """Take the memory of all slots. Raises BudgetError."""
        self.pools.fill()

    def rest(self) -> None:
        """Give back the memory of the pools' slots, which must be free, until `fill`."""
        self.pools.rest()

    def reset(self) -> None:
        """Free all slots after a failed step, and replace those that a collective may still write to."""
        self.pools.empty()
        for chunk in self._chunks:
            if chunk.own_slot is not None:
                chunk.own_slot.vacate()
                if chunk.own_slot.num_holders() > 0:
                    chunk.renew_own_slot(self._device)

    def held_bytes(self) -> int:
        """Bytes of retired slots that live views still keep allocated."""
        return self.pools.held_bytes() + sum(slot.num_bytes for slot in self.left)

    def close(self) -> None:
        """Give all slots back, and with kept ones the homes inside."""
        self.pools.close()
        for slot in [*self.left, *(chunk.own_slot for chunk in self._chunks if chunk.own_slot is not None)]:
            slot.close()
        self.left = []
