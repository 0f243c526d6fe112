"""The store of parameters: fetches payloads into slots, prefetches the next ones, evicts by next use."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gemini.errors import BudgetError, GeminiError, SlotError, closed
from gemini.memory.memory import RankMemory
from gemini.memory.modes import untracked, unwrapped
from gemini.memory.slot import KeptSlot, SharedStorage, Slot, SlotPool, wait_until_free
from gemini.memory.transfer import Region, wait_on_stream
from gemini.observe import Observer, OpenMove
from gemini.placement.demand import Kind, Tier
from gemini.placement.gradient_rules import is_resident_for_good, may_stay
from gemini.placement.next_use import TOUCHES_AHEAD, EvictionQueue, NextUse
from gemini.ranks.communicator import Communicator
from gemini.runtime.binding import Binding
from gemini.runtime.chunk import Chunk, ParamState

# -- The errors for a chunk that gets no slot.


def slot_is_held(where: str, what: str, chunk: Chunk | None, budget_bytes: int | None) -> SlotError:
    """The error for memory that a chunk must leave while a view keeps it.

    what: which chunk must leave, and for what. chunk: that chunk, if it is known.
    """
    # A larger budget gives homes on the device to other weights first. Libraries that keep views, as peft does of
    # adapters on experts in one tensor, keep them of small weights: these can stay where their views are.
    largest = "" if chunk is None else 1 + max(managed.numel for managed in chunk.parameters)
    place = "the memory that the device has left" if budget_bytes is None else f"{budget_bytes} bytes"
    more = "free memory there" if budget_bytes is None else "allow more with model_data_memory= or device_memory="
    return SlotError(
        f"{where}: {what}, but a view of one of its parameters is still alive, and there is no spare slot "
        f"in {place}. Do not keep views of parameters (or .data of them) beyond their operator; or keep weights that "
        f"are this small on the device, where they may be viewed, with param_persistence_threshold={largest}; or {more}"
    )


def slots_are_in_use(where: str, chunk: Chunk, pool: SlotPool, chunks: Sequence[Chunk], has_budget: bool) -> SlotError:
    """The error for a pool all of whose slots are in use at this moment."""
    users = "; ".join(f"chunk {s.chunk} ({chunks[s.chunk].names()})" for s in pool.slots if s.chunk is not None)
    if has_budget:
        more = f"Allow {pool.num_bytes} bytes more with model_data_memory= or device_memory="
    # A built-in policy gives every chunk a slot if nothing limits model data: this is the user's own policy.
    else:
        more = "Nothing limits model data here: let place() of tensor_placement_policy= give more num_slots"
    return SlotError(
        f"{where} needs chunk {chunk.index} ({chunk.names()}), but all {len(pool.slots)} slots of "
        f"{pool.num_bytes} bytes are in use at this moment by {users}. {more}, or make chunk_size= smaller"
    )


# -- Selects the chunk that leaves its slot when another chunk needs one: asks an `EvictionQueue`.


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


# -- Payloads that are prefetched: each is on its way into a slot, in a lane of its own, before an operator needs it.


@dataclass
class Arrival:
    """A payload on its way into a slot. The slot is the chunk's already; the chunk is RELEASED until then."""

    chunk: Chunk
    slot: Slot
    moving: OpenMove
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


# -- The slots of payloads: which one a chunk gets, and how a chunk leaves its slot.
#
# Release is lazy: a chunk that nobody pins stays in its slot until another needs it. Which one leaves follows from the
# sequence of touches alone (`placement.next_use`), equal on all ranks. Whether this rank may use the memory again at
# once is another question, see [Note: Held slots].


_FREE_WITHIN_S = 2.0  # a gloo worker drops its references within tens of ms: longer is a view that someone keeps


class PayloadSlots:
    """Owner of one model's payload slots on this rank: those of the pools, and those that chunks keep."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        memory: RankMemory,
        communicator: Communicator,
        binding: Binding,
        observer: Observer,
        next_use: NextUse,
        victims: Victims,
    ) -> None:
        self.pools = memory.slots
        self.left: list[KeptSlot] = []  # kept slots that were replaced while views still held them
        self.is_closed = False
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
        if ahead and not self._next_use.is_later(victim.index, chunk.index):
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
            what = f"{whose} must leave its slot for chunk {chunk.index} ({chunk.names()})"
            raise self._held(what, victim) from None

    def all_in_use(self, chunk: Chunk) -> GeminiError:
        """The error for a chunk that gets no slot."""
        if self.is_closed:
            return closed(f"{self._position.here()} needs the weights of {chunk.names()}")
        has_budget = self._device.capacity_bytes is not None
        pool = self.pools[chunk.oversize]
        return slots_are_in_use(self._position.here(), chunk, pool, self._chunks, has_budget)

    def _held(self, what: str, chunk: Chunk | None) -> SlotError:
        return slot_is_held(self._position.here(), what, chunk, self._device.capacity_bytes)

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
            what = f"chunk {chunk.index} ({chunk.names()}) must leave its slot for an update"
            raise self._held(what, chunk) from None
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
        self.is_closed = True
        self.pools.close()
        for slot in [*self.left, *(chunk.own_slot for chunk in self._chunks if chunk.own_slot is not None)]:
            slot.close()
        self.left = []


# -- Fetch: brings a chunk's payload into a slot, from this rank's home and the other ranks'.
#
# Payloads are prefetched a few touches before they are used (`Settings.max_prefetch` says how many), as long as the
# pass is predicted: their gather, or their copy from the host, runs beside the kernels of the operators before. Which
# slot a chunk gets, and which chunk leaves for it, says `PayloadSlots`.


class ParamStore:
    """Fetches and prefetches payloads into the slots of one model, and releases them."""

    def __init__(
        self,
        chunks: Sequence[Chunk],
        memory: RankMemory,
        communicator: Communicator,
        binding: Binding,
        observer: Observer,
        max_prefetch: int,
    ) -> None:
        """max_prefetch: payloads that may be on their way at once before they are asked for."""
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
        self.ahead = Ahead(max_prefetch)
        self._at_home: frozenset[int] = frozenset()  # chunks whose home is their payload: they need no slot
        self.observer = observer

    def note_forward(self, runs: bool) -> None:
        """A forward runs from now on, or the outermost one has ended."""
        self.in_step = runs

    def note_placement(self) -> None:
        """Chunks have new homes, and none is in a slot."""
        self.next_use.note_trained({chunk.index for chunk in self.chunks if chunk.trainable})
        self.slot_by_storage.clear()
        at_home = [(chunk.payload, chunk) for chunk in self.chunks if chunk.payload is not None]
        self._at_home = frozenset(chunk.index for _, chunk in at_home)
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
            if chunk.payload is not None or index in self.ahead or index in self._at_home:
                continue
            with untracked():
                slot = self.slots.free_slot(chunk, ahead=True)
            if slot is None:
                return
            yield chunk, slot

    def fetch_ahead(self, chunk: Chunk, slot: Slot) -> None:
        """Start to fetch a chunk that `slots_ahead` named. Collective where parameters are sharded."""
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

    # -- around an update

    def before_update(self, chunk: Chunk) -> None:
        """The home will get new values: drop a payload in a slot. Called before, since both may be one memory."""
        if chunk.may_leave:
            self.slots.release(chunk)
        # A chunk that stays has its home inside its slot, in which parameters keep their views: it is only marked as
        # stale.
        elif chunk.slot is not None:
            self.binding.outdate(chunk)

    def after_update(self, chunk: Chunk) -> None:
        """The chunk's home has new values: a payload at home gets a new version."""
        chunk.note_update()
        if chunk.state is ParamState.RESIDENT:
            # Autograd has saved resident weights as they are. Only a higher version makes it refuse a graph from before
            # the update. Without the line after it the next write-back would take this bump for an edit of the user's.
            chunk.bump_versions()
            self.binding.rebase_versions(chunk)

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


# -- Chunks that stay: gathered at the root's forward, all together, and used like chunks at home until the next update.
#
# [Note: Staying chunks] With several ranks at stage 3 a chunk may keep a slot of its own. It then needs only one gather
# after each update; the machinery around its operators (hooks, pins, handles, parameters that become plain and fetch
# themselves again) only decides when. For operators with tiny parameters that machinery costs more than the gather:
# some 15 us a parameter, in which gloo moves 16 KiB. So if every chunk is at home, or keeps a slot and holds many small
# parameters, the root gathers everything that updates have made stale. Then nothing leaves before the next update, and
# [Note: Resident models] applies. Parameters stay views of the slot for good. An update raises their version counters,
# as it does for a parameter at home. So autograd refuses a graph from before the update, and a view that a user keeps
# shows the new weights after the next gather, as in plain PyTorch.


def mark_staying(chunks: Sequence[Chunk]) -> bool:
    """Decide which chunks stay. True if no payload leaves between forward and update; equal on all ranks."""
    all_stay = all(_is_at_home(chunk) or _may_stay(chunk) for chunk in chunks)
    for chunk in chunks:
        # All or nothing: if one chunk can leave, the operators' hooks stay on for all.
        chunk.stays = all_stay and (not _is_at_home(chunk))
    return all_stay


def make_plain(chunks: Sequence[Chunk], params: ParamStore) -> None:
    """Gather what updates have made stale, and make all parameters plain. Collective."""
    stale = [chunk for chunk in chunks if chunk.stays and chunk.state is ParamState.RELEASED]
    if stale:
        params.fetch_all(stale)
    # Updates of weights at home may still be under way.
    wait_on_stream(*(chunk.homes[Kind.PARAM] for chunk in chunks if chunk.state is ParamState.RESIDENT))
    for chunk in chunks:
        params.binding.bind(chunk)


def _is_at_home(chunk: Chunk) -> bool:
    """Whether the chunk is resident for good: a home that may be lent is not."""
    # Not `lends_home`, which is known only once gradients have their homes: training takes these later.
    at_home = chunk.state is ParamState.RESIDENT
    return is_resident_for_good(
        is_payload_at_home=at_home, may_lend_home=chunk.may_lend_home, is_trained=chunk.trainable
    )


def _may_stay(chunk: Chunk) -> bool:
    has_own_slot = chunk.own_slot is not None
    return may_stay(is_fine=chunk.is_fine, has_own_slot=has_own_slot, may_lend_home=chunk.may_lend_home)
