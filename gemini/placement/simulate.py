"""A step without tensors: which payload and which gradient home is where, and the bytes that move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from gemini.placement.demand import FLOAT32, ChunkDtypes, Dtype, Kind, Tier, update_tier
from gemini.placement.gradient_rules import (
    LendingHistory,
    SumRule,
    is_resident_for_good,
    lies_beside_gradient,
    may_stay,
)
from gemini.placement.next_use import TOUCHES_AHEAD, Events, EvictionQueue, NextUse
from sharding import ShardLayout

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

    GATHER: shards of parameters become a payload. REDUCE: gradients become shards of their mean. REPLICAS: groups that
    hold the same shards add their sums up. WHOLE_GRADIENT and WHOLE_WEIGHT: every rank computed a part, and all ranks
    gather the whole.
    """

    GATHER = "gather"
    REDUCE = "reduce"
    REPLICAS = "reduce over replicas"
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

    def reduce(self, layout: ShardLayout, dtypes: ChunkDtypes, launches: int) -> None:
        """Count the reduction of a gradient: in the group of ranks that share the shards, then over the replicas."""
        self.exchange(Exchange.REDUCE, layout.numel * dtypes.travel.itemsize, launches)
        if layout.num_replicas > 1:
            # A sum is sent in the dtype in which it is added, and comes back in that in which it rests.
            summed = FLOAT32 if dtypes.travel.is_half else dtypes.travel
            self.exchange(Exchange.REPLICAS, layout.shard_numel * (summed.itemsize + dtypes.rest.itemsize), launches)

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


# -- Reduced gradients of a simulated run: where they rest, and the bytes that cross a link when they move.
#
# It keeps the books of `runtime/grad_homes.py` without tensors. Both ask `gradient_rules.py` what is to be done.


@dataclass
class Gradient:
    """The numbers of one trainable chunk's gradient on this rank: those of `ChunkGradient` in runtime/gradient.py."""

    home: Tier | None  # tier of its own home; None: it rests in the parameter home
    sums: SumRule
    expected: int  # weights whose gradients complete the chunk
    state: str = "closed"  # or "at home", "in slot", "spilled", "reducing"
    fired: set[int] = field(default_factory=set)  # weights whose gradients are in the open payload
    got: set[int] = field(default_factory=set)  # weights with a gradient since the last step
    is_reduced: bool = False
    is_used: bool = False  # the backward has updated the weights with it
    is_wide: bool = False  # the reduced gradient is in fp32 beside its home
    wide: Tier | None = None  # tier of the fp32 memory, once it was allocated
    first_backward: int = 0  # the backward of this step that was reduced first
    in_pieces: bool = False  # a gradient came more than once in a backward

    @property
    def is_open(self) -> bool:
        """There is a local gradient, and its reduction has not begun."""
        return self.state not in ("closed", "reducing")


class Homes:
    """The reduced gradients of all trainable chunks, by index."""

    def __init__(
        self, plan: Plan, gradients: Mapping[int, Gradient], payloads: SimulatedPayloads, traffic: Traffic
    ) -> None:
        self._facts = plan.packing.chunks
        self._tiers = plan.placement.homes
        self._gradients = gradients
        self._payloads = payloads
        self._traffic = traffic
        # Those whose plan has no memory for the gradient beside the parameters.
        self._lends_home = [
            facts.may_lend_home and not demand.home_bytes.get(Kind.GRAD)
            for facts, demand in zip(self._facts, plan.demand.chunks, strict=True)
        ]
        # Device bytes that the plan leaves of its budget. What a step allocates there beyond the plan has to fit into
        # them.
        self._free = None if plan.budget.device is None else plan.budget.device - plan.device_bytes
        self._held = {Tier.DEVICE: 0, Tier.HOST: 0}  # bytes in use that the plan has not counted
        self._peaks = dict(self._held)  # their peaks
        self.lent: set[int] = set()  # chunks whose parameter home holds the gradient
        self._lending = LendingHistory()

    @property
    def state(self) -> Hashable:
        """The part of the state that lasts from step to step."""
        # `lent` is left out: an update restores all homes, so none is lent between steps.
        return self._lending.used_after, tuple(self._held.items())

    def hold(self, tier: Tier, num_bytes: int) -> None:
        """Count bytes that the plan does not have: allocated, or freed if negative."""
        self._held[tier] += num_bytes
        self._peaks[tier] = max(self._peaks[tier], self._held[tier])

    def take_peaks(self) -> dict[Tier, int]:
        """The peak of such bytes since the last call."""
        # What was allocated for good is held from the next step's start, so its peak begins there and not at 0.
        peaks, self._peaks = self._peaks, dict(self._held)
        return peaks

    def tier_of(self, chunk: int) -> Tier:
        """The tier on which the reduced gradient is."""
        gradient = self._gradients[chunk]
        if gradient.is_wide:
            assert gradient.wide is not None
            return gradient.wide
        return self._resting(chunk)

    def num_bytes(self, chunk: int) -> int:
        """Bytes of the part of the reduced gradient that this rank updates with."""
        facts = self._facts[chunk]
        itemsize = FLOAT32.itemsize if self._gradients[chunk].is_wide else facts.dtypes.rest.itemsize
        return facts.optim_layout.shard_numel * itemsize

    def merge(self, chunk: int, source: Dtype, numel: int, backward: int) -> None:
        """Set or add what backward number `backward` has reduced on the device.

        source: the dtype of those `numel` elements.
        """
        gradient = self._gradients[chunk]
        is_first = not gradient.is_reduced
        # Pieces of one backward are added in 16 bits, as autograd adds them. Another micro-batch is added in fp32.
        if not (is_first or gradient.first_backward == backward):
            self._widen(chunk)
        # A wide sum has memory of its own, so the parameter home is free for the parameters again.
        if gradient.is_wide:
            self.restore(chunk)
        elif is_first:
            self._make_room(chunk)
            gradient.is_reduced, gradient.first_backward = True, backward
        # A sum on the host is added there, so only the new gradient crosses the link.
        self._traffic.copy(Tier.DEVICE, self.tier_of(chunk), numel * source.itemsize, MoveReason.GRADIENT)

    def reclaim(self, chunk: int) -> None:
        """Move the gradient out of the parameter home, because the parameters are needed before the step."""
        if chunk in self.lent:
            # Asked before `_take_home`, which changes where the gradient rests.
            lent = self._resting(chunk)
            self._take_home(chunk)
            self._traffic.copy(lent, self._resting(chunk), self.num_bytes(chunk), MoveReason.GRADIENT)
            self.restore(chunk)

    def restore(self, chunk: int) -> None:
        """Recreate the parameters from the master, in the home that held the gradient until now."""
        if chunk not in self.lent:
            return
        numel, tiers = self._facts[chunk].optim_layout.shard_numel, self._tiers[chunk]
        # Where the tiers differ the host rounds: the fp32 master crosses the link towards the host, and only the
        # rounded weights cross it towards the device.
        is_there = tiers[Kind.PARAM] is Tier.HOST
        dtype = FLOAT32 if is_there else self._facts[chunk].dtypes.weight
        # A master on the disk is read in place where the host rounds it for the device.
        source = tiers[Kind.MASTER] if is_there else update_tier(tiers[Kind.MASTER])
        self._traffic.copy(source, tiers[Kind.PARAM], numel * dtype.itemsize, MoveReason.UPDATE)
        self.lent.discard(chunk)

    def before_reduction(self, chunk: int) -> None:
        """Release a kept slot whose home will be lent, unless the chunk is used after its reduction."""
        payloads = self._payloads
        # Whether a kept slot is released decides whether the next fetch is a collective. So all ranks decide here, in
        # one way, from history that they share.
        if not self._lends_home[chunk] or not payloads.is_kept(chunk):
            return
        is_in_use = bool(payloads.pins[chunk]) or payloads.is_coming(chunk)
        is_gathered = payloads.is_there(chunk) and chunk not in self.lent
        if self._lending.releases(chunk, payloads.num_gathers[chunk], is_in_use=is_in_use, is_gathered=is_gathered):
            payloads.release(chunk)

    def end_step(self) -> None:
        """Begin another step: reductions from now on belong to it."""
        for chunk in self._gradients:
            if self._lends_home[chunk]:
                self._lending.note(chunk, self._payloads.num_gathers[chunk])
        self._lending.end_step()

    def _resting(self, chunk: int) -> Tier:
        home = self._gradients[chunk].home
        return self._tiers[chunk][Kind.PARAM] if home is None else home

    def _widen(self, chunk: int) -> None:
        gradient, facts = self._gradients[chunk], self._facts[chunk]
        if gradient.is_wide or not facts.dtypes.widens:
            return
        # The fp32 memory is kept for later steps, so only the first one allocates it.
        if gradient.wide is None:
            gradient.wide = self._allocate(self._resting(chunk), facts.optim_layout.shard_numel * FLOAT32.itemsize)
        self._traffic.copy(self._resting(chunk), gradient.wide, self.num_bytes(chunk), MoveReason.GRADIENT)
        gradient.is_wide = True

    def _make_room(self, chunk: int) -> None:
        if self._gradients[chunk].home is not None or chunk in self.lent:
            return
        if self._can_lend_now(chunk):
            self.lent.add(chunk)
        else:
            self._take_home(chunk)

    def _can_lend_now(self, chunk: int) -> bool:
        payloads = self._payloads
        # A gather on its way sends the home to the other ranks, so nothing may overwrite it.
        if not self._lends_home[chunk] or payloads.is_coming(chunk):
            return False
        if payloads.at_home[chunk]:
            return not payloads.pins[chunk]
        return lies_beside_gradient(has_own_slot=payloads.is_kept(chunk), is_gathered=payloads.is_there(chunk))

    def _take_home(self, chunk: int) -> None:
        self._gradients[chunk].home = self._allocate(self._resting(chunk), self.num_bytes(chunk))

    def _allocate(self, tier: Tier, num_bytes: int) -> Tier:
        """Allocate bytes for good on this tier, or on the host if the device is full. Returns the tier.

        Gradients are never on the disk: beside parameters that rest there they take the host.
        """
        tier = update_tier(tier)
        if tier is Tier.DEVICE and self._free is not None:
            if self._free < num_bytes:
                tier = Tier.HOST
            else:
                self._free -= num_bytes
        self.hold(tier, num_bytes)
        return tier
