"""Fetch: brings a chunk's payload into a slot, from this rank's home and the other ranks'.

Several ranks start to gather payloads a few touches before they are used (`Settings.max_prefetch` says how many), as
long as the pass is predicted. One rank does not prefetch from the host: its copies run in order with its kernels, so it
would wait for them earlier and no shorter. Which slot a chunk gets, and which chunk leaves for it: payload_slots.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.chunks.param_state import ParamState
from gemini.manager.ahead import Ahead, Arrival
from gemini.manager.binding import Binding
from gemini.manager.payload_slots import PayloadSlots
from gemini.manager.victims import Victims
from gemini.memory.memory import Memory
from gemini.memory.modes import untracked, unwrapped
from gemini.memory.region import Region
from gemini.memory.slot import Slot
from gemini.memory.transfer import wait_on_stream
from gemini.observe import Observer
from gemini.placement.demand import Kind, Tier
from gemini.placement.next_use import TOUCHES_AHEAD, NextUse
from gemini.ranks.communicator import Communicator


class ParamStore:
    """Fetches and prefetches payloads into the slots of one model, and releases them."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        memory: Memory,
        communicator: Communicator,
        binding: Binding,
        observer: Observer,
        max_prefetch: int,
    ) -> None:
        """max_prefetch: payloads that may be gathered ahead at once, if any are gathered."""
        self.chunks = chunks
        self.memory = memory
        self.device, self.host = memory.device, memory.host
        self.communicator = communicator
        self.binding = binding
        self.next_use = NextUse(communicator.position.events)
        self.victims = Victims(chunks, self.next_use)
        who_leaves = self.next_use, self.victims
        self.slots = PayloadSlots(chunks, memory, communicator, binding, observer, *who_leaves)
        self.in_step = False  # a forward runs: operators may find their parameters plain
        self.slot_by_storage: dict[int, Slot] = {}
        self.resident_by_storage: dict[int, Chunk] = {}  # homes that are payloads
        self.ahead = Ahead(max_prefetch if any(chunk.home_layout.world_size > 1 for chunk in chunks) else 0)
        self.observer = observer

    def note_forward(self, runs: bool) -> None:
        """A forward runs from now on, or the outermost one has ended."""
        self.in_step = runs

    def note_placement(self) -> None:
        """Chunks have new homes, and none is in a slot."""
        self.next_use.note_trained({chunk.index for chunk in self.chunks if chunk.trainable})
        self.slot_by_storage.clear()
        at_home = ((chunk.payload, chunk) for chunk in self.chunks if chunk.payload is not None)
        self.resident_by_storage.clear()  # not another dict: saved tensors look up in this one
        self.resident_by_storage.update((payload.untyped_storage()._cdata, chunk) for payload, chunk in at_home)

    # -- fetch and prefetch

    def fetch(self, chunk: Chunk) -> Tensor:
        """The payload, (numel,) on the device, of a chunk that can leave. Collective where parameters are sharded.

        `Payloads.fetch` calls it and does the rest of a fetch.
        """
        self.victims.note(chunk)
        if chunk.payload is None:  # else it is in its slot
            with untracked():
                arrival = self.ahead.pop(chunk.index)
                if arrival is None:
                    slot = self.slots.free_slot(chunk) or self._slot_after_prefetch(chunk)
                    arrival = self._depart(chunk, slot)
                self._arrive(arrival)
        assert chunk.payload is not None
        return chunk.payload

    def open_own_part(self, chunk: Chunk) -> Region:
        """Copy only this rank's updated shard into the payload, (numel,) on the device, of a chunk that is held whole.

        The caller must all-gather next: the other ranks' parts are stale.
        """
        self.next_use.touch(chunk.index)
        with untracked():
            slot = self.slots.free_slot(chunk) or self._slot_after_prefetch(chunk)
            self._arrive(self._depart(chunk, slot, only_own=True))
        return chunk.region()

    def fetch_all(self, chunks: Sequence[Chunk]) -> None:
        """Fetch released chunks with slots of their own, all in flight at once. Collective."""
        self.finish_prefetch()
        arrivals = []
        with untracked():
            for lane, chunk in enumerate(chunks):
                self.next_use.touch(chunk.index)
                assert chunk.own_slot is not None
                arrivals.append(self._depart(chunk, chunk.own_slot, lane))
            for arrival in arrivals:
                self._arrive(arrival)

    def slots_ahead(self) -> Iterable[tuple[Chunk, Slot]]:
        """The chunks to prefetch, in order of use, each with a slot that is free before it is used. Local.

        The caller starts each prefetch with `fetch_ahead` before it asks for the next one.
        """
        coming = self.next_use.coming(self.ahead.most * TOUCHES_AHEAD)
        self._finish_all_but(coming)  # a prefetch whose use was left out
        return () if self.ahead.is_full else self._slots_for(coming)

    def _slots_for(self, coming: Sequence[int]) -> Iterator[tuple[Chunk, Slot]]:
        for index in coming:
            if self.ahead.is_full:
                return
            chunk = self.chunks[index]
            if chunk.payload is not None or index in self.ahead:
                continue
            with untracked():
                slot = self.slots.free_slot(chunk, ahead=True)
            if slot is None:
                return
            yield chunk, slot

    def fetch_ahead(self, chunk: Chunk, slot: Slot) -> None:
        """Start to gather a chunk that `slots_ahead` named. Collective."""
        with untracked():
            self.ahead.add(self._depart(chunk, slot, self.ahead.free_lane(), "prefetch"))

    def finish_prefetch(self) -> None:
        """Finish all prefetches. Local: launches nothing."""
        self._finish_all_but(())

    def _finish_all_but(self, chunks: Sequence[int]) -> None:
        arrivals = self.ahead.pop_all_but(chunks)
        if arrivals:
            with untracked():
                for arrival in arrivals:
                    self._arrive(arrival)

    def chunk_at(self, tensor: Tensor) -> Chunk | None:
        """The chunk in whose payload a tensor of any origin lies."""
        tensor = unwrapped(tensor)
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        slot = self.slot_by_storage.get(storage)
        return self.resident_by_storage.get(storage) if slot is None or slot.chunk is None else self.chunks[slot.chunk]

    def is_coming(self, chunk: Chunk) -> bool:
        """The chunk's prefetch is in flight."""
        return chunk.index in self.ahead

    def _depart(self, chunk: Chunk, slot: Slot, lane: int = 0, what: str = "fetch", only_own: bool = False) -> Arrival:
        chunk.count_gather()
        if self.slots.left:
            self.slots.close_left()
        # A spare slot may have joined the pool since the last fetch.
        self.slot_by_storage[slot.storage] = slot
        payload = chunk.payload_in(slot)
        slot.occupy(chunk.index)
        home = chunk.homes[Kind.PARAM].tier
        where = self.communicator.position.here
        moving = self.observer.moving(what, chunk.index, home, "slot", chunk.payload_bytes, where, blocks=2)
        with moving:
            start = self._start_own_part if only_own else self._start_gather
            return Arrival(chunk, slot, moving, start(chunk, payload, lane), lane)

    def _arrive(self, arrival: Arrival) -> None:
        chunk = arrival.chunk
        with arrival.moving:
            arrival.finish()
            chunk.become(ParamState.GATHERED, arrival.slot)
            self.victims.note(chunk)

    def _start_own_part(self, chunk: Chunk, payload: Region, lane: int) -> Callable[[], None]:
        """Copy what this rank updates from a whole home to the payload."""
        home = chunk.homes[Kind.PARAM]
        for piece in chunk.layout.slices(chunk.rank):
            self.memory.transfer.copy(payload[piece.in_payload], home[piece.in_payload])
        return lambda: wait_on_stream(payload)

    def _start_gather(self, chunk: Chunk, payload: Region, lane: int) -> Callable[[], None]:
        """Fill the payload from this rank's home and, if sharded, the other ranks'. Collective then."""
        home = chunk.homes[Kind.PARAM]
        if chunk.home_layout.world_size == 1:
            self.memory.transfer.copy(payload, home)
            return lambda: wait_on_stream(payload)
        shard = home.flat if home.tier is Tier.DEVICE else None
        if shard is None:
            # The shard goes to its place in the payload, so the all-gather runs in place.
            own = home.parts or home.cut(piece.in_shard for piece in chunk.layout.slices(chunk.rank))
            for target, part in zip(payload.parts, own, strict=True):
                self.memory.transfer.copy(target, part)
        else:
            wait_on_stream(home)
        wait_on_stream(payload)
        return self.communicator.start_all_gather(payload.flat, shard, chunk.layout, chunk.index, lane)

    def _slot_after_prefetch(self, chunk: Chunk) -> Slot:
        """A slot for a chunk for which none could leave. Local.

        Chunks whose prefetch is in flight cannot leave: let them arrive, and look again.
        """
        self.finish_prefetch()
        slot = self.slots.free_slot(chunk)
        if slot is None:
            raise self.slots.all_in_use(chunk)
        return slot

    def forget_slots(self) -> None:
        """Nothing is in a slot. What an interrupt keeps out of its pool must die with its frame (`Slot.__del__`)."""
        self.slot_by_storage.clear()

    def release_all(self) -> None:
        """Release every gathered chunk."""
        self.finish_prefetch()
        for chunk in self.chunks:
            if chunk.slot is not None:
                self.slots.release(chunk)
            # An update has outdated the chunk: its parameters still show the slot.
            elif chunk.stays:
                self.binding.unbind(chunk)

    def reset(self) -> None:
        """Empty every slot after a failed step, and expect nothing, equally on all ranks."""
        self.ahead.clear()
        self.binding.reset()
        self.release_all()
        self.slots.reset()
        self.next_use.reset_trace()
        self.in_step = False  # last: what is interrupted in here is done again
