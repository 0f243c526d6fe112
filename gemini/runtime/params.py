"""The store of parameters: fetches payloads into slots, prefetches the next ones, evicts by next use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from gemini.placement.needs import across_layout
from gemini.placement.payload_rules import PayloadRules
from gemini.ranks.communicator import Communicator
from gemini.runtime.binding import Binding
from gemini.runtime.chunk import Chunk, ParamState
from sharding import Piece, ShardLayout

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


# -- The memory of payload slots, and how a chunk leaves its slot.
#
# `PayloadRules` says which chunk leaves, equally on all ranks. Whether this rank may use the memory again at once is
# another question, see [Note: Held slots].


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

    def free(self, chunk: Chunk, victim: Chunk | None = None) -> Slot:
        """A free slot of the chunk's pool, which `victim` may have left for it. Raises SlotError if a view holds it."""
        try:
            slot = self.pools[chunk.oversize].first_free()
        except BudgetError:
            whose = "another chunk" if victim is None else f"chunk {victim.index} ({victim.names()})"
            raise self._held(f"{whose} must leave its slot for chunk {chunk.index} ({chunk.names()})", victim) from None
        if slot is None:
            raise self.refusal(chunk)
        return slot

    def refusal(self, chunk: Chunk) -> GeminiError:
        """The error for a chunk that gets no slot."""
        if self.is_closed:
            return closed(f"{self._position.here()} needs the weights of {chunk.names()}")
        has_budget = self._device.capacity_bytes is not None
        pool = self.pools[chunk.oversize]
        return slots_are_in_use(self._position.here(), chunk, pool, self._chunks, has_budget)

    def _held(self, what: str, chunk: Chunk | None) -> SlotError:
        return slot_is_held(self._position.here(), what, chunk, self._device.capacity_bytes)

    def vacate(self, chunk: Chunk, successor: Chunk | None = None) -> bool:
        """Take a gathered chunk out of its slot. False if a view holds the slot, which is then set aside.

        successor: the chunk that overwrites the slot next. Without one the slot is poisoned, on tiers that can.
        """
        assert chunk.slot is not None
        slot = chunk.slot
        what = "release" if successor is None else "evict"
        reason = self._position.here if successor is None else f"room for chunk {successor.index}"
        home = chunk.homes[Kind.PARAM].tier
        with self._observer.moving(what, chunk.index, "slot", home, chunk.payload_bytes, reason):
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
            if chunk.secondary_layout is not None and slot.region is not None:
                wait_on_stream(slot.region)  # the copy to the second copy in the node may still read it
            is_free = wait_until_free(slot, self._wait_s)
            if not is_free and slot is chunk.own_slot:
                # An update would write to the home in this slot, which the view shows.
                self._keep_another(chunk)
            elif not is_free:
                self.pools[chunk.oversize].set_aside(slot)
            elif successor is None:
                slot.wipe()
        return is_free

    def nobody_holds(self, memory: SharedStorage) -> bool:
        """Whether no view holds the memory. A finished collective may hold it for a moment longer: wait for that."""
        return wait_until_free(memory, self._wait_s)

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
# pass is predicted: their gather, or their copy from the host, runs beside the kernels of the operators before.


@dataclass
class Arrival:
    """A payload on its way into a slot. The slot is the chunk's already; the chunk is RELEASED until then."""

    slot: Slot
    moving: OpenMove
    finish: Callable[[], None]


class ParamStore:
    """Carries `PayloadRules` out for one model: brings payloads into slots, and takes them out.

    The rules call `depart`, `arrive`, `evict` and `refusal` (`PayloadEffects`), with indices of chunks. Whoever has the
    rules move payloads does so inside of `untracked`.
    """

    def __init__(
        self,
        chunks: Sequence[Chunk],
        memory: RankMemory,
        communicator: Communicator,
        binding: Binding,
        observer: Observer,
        rules: PayloadRules,
    ) -> None:
        self.chunks = chunks
        self.memory = memory
        self.device, self.host = memory.device, memory.host
        self.communicator = communicator
        self.binding = binding
        self.rules = rules
        self.next_use = rules.next_use
        self.slots = PayloadSlots(chunks, memory, communicator, binding, observer)
        self.in_step = False  # a forward runs: operators may find their parameters plain
        self.slot_by_storage: dict[int, Slot] = {}
        self.resident_by_storage: dict[int, Chunk] = {}  # homes that are payloads
        self._arrivals: dict[int, Arrival] = {}  # by chunk
        self.observer = observer

    def note_forward(self, runs: bool) -> None:
        """A forward runs from now on, or the outermost one has ended."""
        self.in_step = runs

    def note_placement(self) -> None:
        """Chunks have new homes, which the rules follow, and none is in a slot."""
        for chunk in self.chunks:
            chunk.stays = chunk.index in self.rules.staying
        self.slot_by_storage.clear()
        at_home = [(chunk.payload, chunk) for chunk in self.chunks if chunk.payload is not None]
        self.resident_by_storage.clear()  # not another dict: saved tensors look up in this one
        self.resident_by_storage.update((payload.untyped_storage()._cdata, chunk) for payload, chunk in at_home)

    def chunk_at(self, tensor: Tensor) -> Chunk | None:
        """The chunk in whose payload a tensor of any origin lies."""
        tensor = unwrapped(tensor)
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()._cdata
        slot = self.slot_by_storage.get(storage)
        return self.resident_by_storage.get(storage) if slot is None or slot.chunk is None else self.chunks[slot.chunk]

    # -- what the rules call

    def depart(
        self, chunk: int, lane: int, *, ahead: bool = False, only_own: bool = False, nearby: bool = False
    ) -> None:
        """Start to bring a payload, or this rank's updated part of it, into a slot. Collective if it is sharded.

        The other ranks' parts are stale after `only_own`. Raises SlotError if the pool has no free slot and no spare.
        """
        its = self.chunks[chunk]
        slot = its.own_slot or self.slots.free(its)
        if self.slots.left:
            self.slots.close_left()
        # A spare slot may have joined the pool since the last fetch.
        self.slot_by_storage[slot.storage] = slot
        payload = slot.views[chunk][0] if chunk in slot.views else its.payload_in(slot)
        slot.occupy(chunk)
        what, tier = "prefetch" if ahead else "fetch", its.homes[Kind.PARAM].tier
        here = self.communicator.position.here
        moving = self.observer.moving(what, chunk, tier, "slot", its.payload_bytes, here, blocks=2)
        with moving:
            home = its.homes[Kind.PARAM]
            finish: Callable[[], None] = partial(wait_on_stream, payload)
            if its.secondary_layout is not None:
                finish = (self._start_nearby if nearby else self._start_and_keep)(its, payload, lane)
            elif only_own:
                # What this rank updates of a whole home.
                for piece in its.layout.slices(its.rank):
                    self.memory.transfer.copy(payload[piece.in_payload], home[piece.in_payload])
            elif its.home_layout.world_size == 1:
                self.memory.transfer.copy(payload, home)
            else:
                shard = home.flat if home.tier is Tier.DEVICE else None
                if shard is None:
                    # The shard goes to its place in the payload, so the all-gather runs in place.
                    own = home.parts or home.cut(piece.in_shard for piece in its.layout.slices(its.rank))
                    for target, part in zip(payload.parts, own, strict=True):
                        self.memory.transfer.copy(target, part)
                    wait_on_stream(payload)
                elif home.tickets.pending or payload.tickets.pending:
                    wait_on_stream(home, payload)
                finish = self.communicator.start_all_gather(payload.flat, shard, its.fetch_layout, chunk, lane)
            self._arrivals[chunk] = Arrival(slot, moving, finish)

    def arrive(self, chunk: int) -> None:
        """Finish what `depart` started. Local: launches nothing."""
        arrival = self._arrivals.pop(chunk)
        with arrival.moving:
            arrival.finish()
            self.chunks[chunk].become(ParamState.GATHERED, arrival.slot)

    def refusal(self, chunk: int) -> Exception:
        """The error for a chunk that gets no slot."""
        return self.slots.refusal(self.chunks[chunk])

    def evict(self, chunk: int, successor: int) -> None:
        """Take a chunk out of its slot. Raises SlotError if a view holds it and the budget has no spare."""
        victim, other = self.chunks[chunk], self.chunks[successor]
        if not self.slots.vacate(victim, other):
            self.slots.free(other, victim)  # takes the spare

    # The second copy in a node lies behind the parameter home, which is a shard then. What arrives from all ranks fills
    # it, until the next update.

    def _start_and_keep(self, chunk: Chunk, payload: Region, lane: int) -> Callable[[], None]:
        """Fill the payload from all ranks, and from it this rank's part of the second copy. Collective."""
        home, layout = chunk.homes[Kind.PARAM], chunk.secondary_layout
        assert layout is not None
        numel = chunk.home_layout.shard_numel
        own = chunk.layout.slices(chunk.rank)
        if chunk.in_groups:
            finish = self._start_across(chunk, layout, payload, lane)
        else:
            finish = self._start_from(home[:numel], payload, chunk.fetch_layout, own, chunk.index, lane)

        def keep() -> None:
            finish()
            for piece in layout.slices(chunk.secondary_rank):
                self.memory.transfer.copy(home[numel:][piece.in_shard], payload[piece.in_payload])

        return keep

    def _start_across(self, chunk: Chunk, layout: ShardLayout, payload: Region, lane: int) -> Callable[[], None]:
        """Fill the payload where all ranks share the weights' homes, in groups. Collective.

        Each rank gets the part of its group's shard that the others with its place have, and then the group's shards.
        So each element comes over the slower link once for each place, and not once for each rank.
        """
        home = chunk.homes[Kind.PARAM]
        for piece in chunk.layout.slices(chunk.rank):
            self.memory.transfer.copy(payload[piece.in_payload], home[piece.in_shard])
        wait_on_stream(payload)
        for piece in layout.slices(chunk.secondary_rank):
            if piece.numel:
                part = payload.flat[piece.in_payload]
                self.communicator.gather_across(part, across_layout(piece.numel, chunk.num_groups), chunk.index)
        return self.communicator.start_all_gather(payload.flat, None, layout, chunk.index, lane)

    def _start_nearby(self, chunk: Chunk, payload: Region, lane: int) -> Callable[[], None]:
        """Fill the payload from the second copy. Collective over the node."""
        layout = chunk.secondary_layout
        assert layout is not None
        secondary = chunk.homes[Kind.PARAM][chunk.home_layout.shard_numel :]
        own = layout.slices(chunk.secondary_rank)
        return self._start_from(secondary, payload, layout, own, chunk.index, lane)

    def _start_from(
        self, shard: Region, payload: Region, layout: ShardLayout, own: Sequence[Piece], chunk: int, lane: int
    ) -> Callable[[], None]:
        """Fill the payload from this rank's `shard`, whose places in it are `own`, and the other ranks'. Collective."""
        if shard.tier is Tier.DEVICE:
            wait_on_stream(shard, payload)
            return self.communicator.start_all_gather(payload.flat, shard.flat, layout, chunk, lane)
        for piece in own:
            self.memory.transfer.copy(payload[piece.in_payload], shard[piece.in_shard])
        wait_on_stream(payload)
        return self.communicator.start_all_gather(payload.flat, None, layout, chunk, lane)

    # -- what leaves

    def finish_prefetch(self) -> None:
        """Finish all prefetches. Local: launches nothing."""
        if self.rules.ahead:
            with untracked():
                self.rules.finish_ahead(self)

    def is_pinned(self, chunk: Chunk) -> bool:
        """Something uses the chunk's payload now."""
        return self.rules.pins[chunk.index] > 0

    def is_coming(self, chunk: Chunk) -> bool:
        """The chunk's prefetch is in flight."""
        return self.rules.is_coming(chunk.index)

    def release(self, chunk: Chunk) -> None:
        """Take a gathered chunk out of its slot."""
        self.rules.release(chunk.index)
        self.slots.vacate(chunk)

    def forget_slots(self) -> None:
        """Nothing is in a slot. What an interrupt keeps out of its pool must die with its frame (`Slot.__del__`)."""
        self.slot_by_storage.clear()

    # -- around an update

    def make_stale(self, chunk: Chunk) -> None:
        """The home will get new values: drop a payload in a slot. Called before, since both may be one memory."""
        if chunk.secondary_layout is not None:
            self.rules.outdate(chunk.index)
        if chunk.slot is None:
            return
        # A chunk that stays has its home inside its slot, in which parameters keep their views: it is only marked as
        # stale.
        if chunk.stays:
            self.rules.release(chunk.index)
            self.binding.outdate(chunk)
        else:
            self.release(chunk)

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
                self.release(chunk)
            # An update has outdated the chunk: its parameters still show the slot.
            elif chunk.stays:
                self.binding.unbind(chunk)

    def reset(self) -> None:
        """Empty every slot after a failed step, and expect nothing, equally on all ranks."""
        self._arrivals.clear()
        self.rules.reset()
        self.binding.reset()
        self.release_all()
        self.slots.reset()
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


def make_plain(chunks: Sequence[Chunk], params: ParamStore) -> None:
    """Gather what updates have made stale, and make all parameters plain. Collective."""
    with untracked():
        params.rules.gather_stale(params)
    # Updates of weights at home may still be under way.
    wait_on_stream(*(chunk.homes[Kind.PARAM] for chunk in chunks if chunk.state is ParamState.RESIDENT))
    for chunk in chunks:
        params.binding.bind(chunk)
