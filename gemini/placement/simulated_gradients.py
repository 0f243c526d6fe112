"""Gradients of a simulated run: open in slots, spilled, reduced, at rest. No tensor, no device, no other rank.

They follow the books of `gradient.py` and the rules of `gradient_rules.py`, as a run does, for ranks that all get the
same gradients in the same order; bytes that a run moves or takes are counted here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import ClassVar

from gemini.placement.decisions import Decisions
from gemini.placement.demand import FLOAT32, Dtype, Kind, Tier, update_tier
from gemini.placement.gradient import Gradient, GradState, ReducedState, SumRule
from gemini.placement.gradient_rules import MAX_WAITING, GradientBooks, GradientRules, PlaceRules
from gemini.placement.needs import num_replica_tiles, num_tiles, num_tiles_across
from gemini.placement.packing import ChunkFacts
from gemini.placement.payload_rules import PayloadRules
from gemini.placement.simulate import Exchange, MoveReason, Traffic


class SimulatedSlot:
    """Any of the gradient slots. It holds no bytes."""

    views: ClassVar = defaultdict[int, tuple[None, tuple[()]]](lambda: (None, ()))


_SLOT = SimulatedSlot()


class SimulatedPool:
    """The gradient slots of one size."""

    def __init__(self, count: int) -> None:
        self.inside: dict[int, None] = {}  # chunks
        self._count = count

    def first_free(self) -> SimulatedSlot | None:
        """See `GradientPool`."""
        return _SLOT if len(self.inside) < self._count else None


class SimulatedGradient(Gradient):
    """The books of one trainable chunk's gradient, and the tiers of its memory."""

    home: Tier | None = None
    wide: Tier | None = None

    def note_memory(self, home: Tier | None, wide: Tier | None, *, has_whole: bool) -> None:
        """The plan has this memory for it."""
        self.home, self.wide, self.has_whole = home, wide, has_whole


class SimulatedPlaces(PlaceRules):
    """The gradients of all trainable chunks, by index, and the bytes that cross a link when they move."""

    def __init__(
        self, plan: Decisions, gradients: Mapping[int, SimulatedGradient], payloads: PayloadRules, traffic: Traffic
    ) -> None:
        self._pools_by_size = [SimulatedPool(count) for count in plan.placement.num_gradient_slots]
        super().__init__(gradients, self._pools_by_size, payloads)
        self._gradients = gradients
        self._facts = plan.packing.chunks
        self._tiers = plan.placement.homes
        self._traffic = traffic
        # Those whose plan has no memory for the gradient beside the parameters.
        self._lends = [
            facts.may_lend_home and not demand.home_bytes.get(Kind.GRAD)
            for facts, demand in zip(self._facts, plan.demand.chunks, strict=True)
        ]
        # What a step allocates on the device beyond the plan has to fit into these.
        self._free = plan.spare_device_bytes
        self._held = {Tier.DEVICE: 0, Tier.HOST: 0}  # bytes in use that the plan has not counted
        self._peaks = dict(self._held)  # their peaks
        self._lent: set[int] = set()  # chunks whose parameter home holds the gradient
        self.note_lendable()

    @property
    def state(self) -> Hashable:
        """The part of the state that lasts from step to step."""
        # What is lent is left out: an update restores all homes, so none is lent between steps.
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
        if gradient.reduced_state is ReducedState.WIDE:
            assert gradient.wide is not None
            return gradient.wide
        return self._resting(chunk)

    def num_bytes(self, chunk: int) -> int:
        """Bytes of the part of the reduced gradient that this rank updates with."""
        gradient, facts = self._gradients[chunk], self._facts[chunk]
        dtype = FLOAT32 if gradient.reduced_state is ReducedState.WIDE else facts.dtypes.rest
        if gradient.in_groups and not gradient.awaits_replicas:
            return facts.optim_layout.shard_numel * dtype.itemsize
        return self._bytes_in(chunk, dtype)

    def reclaim(self, chunk: int) -> None:
        """Move the gradient out of the parameter home if it is there: the parameters are needed before the step."""
        if self.is_lent(chunk):
            self.move_out(chunk)

    # -- what a run does

    def is_lent(self, chunk: int) -> bool:
        """See `PlaceRules`."""
        return chunk in self._lent

    def consumed(self, chunk: int) -> None:
        """See `PlaceRules`."""
        self._lent.discard(chunk)

    def _lends_home(self, chunk: int) -> bool:
        return self._lends[chunk]

    def _release_slot(self, chunk: int) -> None:
        self.payloads.release(chunk)

    def _release_resident(self, chunk: int) -> bool:
        return True  # a user's views are in no plan

    def _lend(self, chunk: int) -> None:
        self._lent.add(chunk)

    def _take_memory(self, chunk: int, *, wide: bool) -> None:
        num_bytes = self._bytes_in(chunk, FLOAT32 if wide else self._facts[chunk].dtypes.rest)
        tier = self._allocate(self._resting(chunk), num_bytes)
        if wide:
            self._gradients[chunk].wide = tier
        else:
            self._gradients[chunk].home = tier

    def _move_to_wide(self, chunk: int) -> None:
        num_bytes = self._bytes_in(chunk, self._facts[chunk].dtypes.rest)
        self._traffic.copy(self._resting(chunk), self.tier_of(chunk), num_bytes, MoveReason.GRADIENT)

    def _copy_out(self, chunk: int) -> None:
        num_bytes = self._bytes_in(chunk, self._facts[chunk].dtypes.rest)
        self._traffic.copy(self._tiers[chunk][Kind.PARAM], self._resting(chunk), num_bytes, MoveReason.GRADIENT)

    def _remake(self, chunk: int) -> None:
        tiers = self._tiers[chunk]
        # Where the tiers differ the host rounds: the fp32 master crosses the link towards the host, and only the
        # rounded weights cross it towards the device.
        is_there = tiers[Kind.PARAM] is Tier.HOST
        dtype = FLOAT32 if is_there else self._facts[chunk].dtypes.weight
        # A master on the disk is read in place where the host rounds it for the device.
        source = tiers[Kind.MASTER] if is_there else update_tier(tiers[Kind.MASTER])
        self._traffic.copy(source, tiers[Kind.PARAM], self._bytes_in(chunk, dtype), MoveReason.UPDATE)

    def _resting(self, chunk: int) -> Tier:
        home = self._gradients[chunk].home
        return self._tiers[chunk][Kind.PARAM] if home is None else home

    def _bytes_in(self, chunk: int, dtype: Dtype) -> int:
        return self._facts[chunk].rest_numel * dtype.itemsize

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

    # -- open gradients

    def close(self, chunk: int) -> None:
        """See `PlaceRules`."""
        gradient = self._books[chunk]
        self._pools_by_size[gradient.oversize].inside.pop(chunk, None)
        gradient.become(GradState.CLOSED)

    def _zero_rest_of_home(self, chunk: int) -> None:
        """No bytes move."""

    def _inside(self, oversize: bool) -> Iterable[int]:
        return self._pools_by_size[oversize].inside

    def _spill(self, victim: int, wanted: int) -> SimulatedSlot:
        gradient, num_bytes = self._books[victim], self._facts[victim].payload_bytes
        self._traffic.copy(Tier.DEVICE, Tier.HOST, num_bytes, MoveReason.SPILL)
        self.hold(Tier.HOST, num_bytes)
        gradient.become(GradState.SPILLED, spilled=Tier.HOST)
        del self._pools_by_size[gradient.oversize].inside[victim]
        return _SLOT

    def _unspill(self, chunk: int, slot: object) -> None:
        self._occupy(chunk)
        self._traffic.copy(Tier.HOST, Tier.DEVICE, self._facts[chunk].payload_bytes, MoveReason.SPILL)
        self.hold(Tier.HOST, -self._facts[chunk].payload_bytes)

    def _open_in_slot(self, chunk: int, slot: object, resumes: bool, zero: bool) -> None:
        self._occupy(chunk)
        if resumes:
            tier, num_bytes = self.tier_of(chunk), self.num_bytes(chunk)
            self._traffic.copy(tier, Tier.DEVICE, num_bytes, MoveReason.GRADIENT)

    def _open_at_home(self, chunk: int, zero: bool) -> None:
        self._books[chunk].become(GradState.AT_HOME)

    def _occupy(self, chunk: int) -> None:
        gradient = self._books[chunk]
        self._pools_by_size[gradient.oversize].inside[chunk] = None
        gradient.become(GradState.IN_SLOT, slot=_SLOT)


class Gradients(GradientRules):
    """The gradients of all trainable chunks of a plan, by index."""

    def __init__(
        self,
        plan: Decisions,
        payloads: PayloadRules,
        traffic: Traffic,
        use: Callable[[int, int], None],
        leave_node: Callable[[], None],
    ) -> None:
        """use: `use(chunk, num_bytes)` updates a chunk with a gradient that the backward uses up.

        leave_node: lifts the pins of the node that has made the gradient.
        """
        self.of = _books_of(plan)
        self.places = SimulatedPlaces(plan, self.of, payloads, traffic)
        has_several = (plan.settings.gradient_accumulation_steps or 1) > 1
        books = GradientBooks(self.of, is_alone=plan.world_size == 1, has_several=has_several)
        # Fetches that are collectives give all ranks common points at which to reduce.
        gathers = plan.settings.stage == 3 and not books.is_alone and not payloads.is_resident
        # By chunk: positions of the weights whose gradients wait in `.grad`, the chunk that has waited longest first.
        self._waits: dict[int, list[int]] = {}
        super().__init__(books, self.places, self._waits, gathers=gathers)
        self._facts: Sequence[ChunkFacts] = plan.packing.chunks
        self._stage = plan.settings.stage
        self._scratch_bytes = plan.demand.scratch_bytes
        self._payloads = payloads
        self._traffic = traffic
        self._frees = [chunk.frees_gradient for chunk in plan.demand.chunks]
        self._update, self._lift_pins = use, leave_node

    # -- a backward

    def begin_backward(self, backward: int) -> None:
        """Begin backward number `backward` since the last step."""
        self._begin(backward, uses_up=any(self._frees))

    def arrive(self, chunk: int, position: int) -> None:
        """Autograd has made the gradient of the weight at `position` of the chunk."""
        gradient, waiting = self.of[chunk], self._waits
        # Gradients of a fine chunk wait until all of them can be copied by one call.
        if not self._facts[chunk].is_fine or (chunk not in waiting and not gradient.may_wait(self._backward)):
            self._accept(chunk, [position])
            return
        waiting.setdefault(chunk, []).append(position)
        # Waiting gradients take memory beyond the gradient slots, so few chunks may have them.
        if len(waiting) > MAX_WAITING:
            self.collect(next(iter(waiting)))
        if len(waiting.get(chunk, ())) >= gradient.expected:
            self.collect(chunk)

    def collect(self, chunk: int) -> None:
        """See `GradientRules`."""
        self._accept(chunk, self._waits.pop(chunk))

    def _accept(self, chunk: int, positions: Sequence[int]) -> None:
        self.open(chunk)
        for position in positions:
            self.of[chunk].note_fired(position)
        self.arrived(chunk)

    def end_backward(self) -> None:
        """Reduce all open gradients."""
        # What still waits has to be in the payloads before these are reduced.
        for chunk in list(self._waits):
            self.collect(chunk)
        self.end()

    def join_replicas(self) -> None:
        """Count what replicas exchange before gradients are used. See [Note: One exchange with replicas]."""
        for chunk in self._books.take_awaiting():
            facts, tier = self._facts[chunk], self.places.tier_of(chunk)
            is_wide = self.of[chunk].reduced_state is ReducedState.WIDE
            rests = FLOAT32 if is_wide else facts.dtypes.rest
            self._traffic.copy(tier, Tier.DEVICE, self.places.num_bytes(chunk), MoveReason.GRADIENT)
            if facts.in_groups:
                tiles = num_tiles_across(facts, rests, self._scratch_bytes)
                self._traffic.exchange(Exchange.MEAN_ACROSS, facts.rest_numel * rests.itemsize, tiles)
            else:
                tiles = num_replica_tiles(facts.layout, rests, self._scratch_bytes)
                self._traffic.exchange_with_replicas(facts.layout, rests, tiles)
            self.of[chunk].note_mean_of_all()
            self._traffic.copy(Tier.DEVICE, tier, self.places.num_bytes(chunk), MoveReason.GRADIENT)

    def end_step(self) -> None:
        """Drop all gradients after a step used them."""
        for gradient in self.of.values():
            if gradient.reduced_state is not ReducedState.NONE:
                gradient.become_reduced(ReducedState.NONE)
            none = bytes(len(gradient.got))
            gradient.note_leftovers(none, none, none)
        self.places.note_step()
        self._books.forget_step(has_zeros=False)

    # -- what a run does: ranks get the same gradients in the same order

    def _complete_on_all_ranks(self) -> Sequence[int]:
        changed = sorted(self._books.changed)
        self._books.changed.clear()
        return [chunk for chunk in changed if self.of[chunk].is_complete]

    def _open_on_any_rank(self, when: str, is_off: bool) -> tuple[Sequence[int], bool]:
        self._books.has_told_parts = True
        return [chunk for chunk, gradient in self.of.items() if gradient.is_open], is_off

    def _keep_unsynced(self) -> None:
        raise AssertionError("no prediction has backwards under no_sync()")

    def _latest(self, points: Sequence[int], ranking: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        return points, ranking

    def _reduce_apart(self, chunk: int) -> bool:
        return False  # `_start` counts tiles

    def _start(self, chunk: int) -> bool:
        if self._books.is_alone:
            return False
        facts, tiles = self._facts[chunk], self._num_tiles(chunk)
        layout = facts.grad_layout
        if self._books.defers(chunk, self._backward):
            self._books.note_mean_of_group(chunk)
            layout = layout.of_group
        self._traffic.reduce(layout, facts.dtypes, tiles)
        self.of[chunk].become(GradState.REDUCING)
        # At stage 0 the reduced shards are gathered at once, and tiles wait for each other: nothing stays in flight.
        return self._stage > 0 and tiles == 1

    def _rest(self, chunk: int) -> None:
        facts = self._facts[chunk]
        if self._stage == 0 and not self._books.is_alone:
            # The mean travels in the dtype in which it rests, not in that of the reduction.
            num_bytes = facts.grad_layout.traveling_bytes(facts.layout.numel, facts.dtypes.rest.itemsize)
            self._traffic.exchange(Exchange.WHOLE_GRADIENT, num_bytes, self._num_tiles(chunk))
        super()._rest(chunk)

    def _merge(self, chunk: int, is_first: bool) -> None:
        # A sum on the host is added there, so only the new gradient crosses the link.
        self._traffic.copy(Tier.DEVICE, self.places.tier_of(chunk), self._bytes_of_mean(chunk), MoveReason.GRADIENT)

    def _leave_node(self) -> None:
        self._lift_pins()

    def _takes(self, chunk: int) -> bool:
        return self._frees[chunk]

    def _leave_slot(self, chunk: int) -> None:
        self._payloads.release(chunk)
        self._payloads.outdate(chunk)

    def _use(self, chunk: int) -> None:
        self.of[chunk].note_used()
        self._update(chunk, self._bytes_of_mean(chunk))

    def _num_tiles(self, chunk: int) -> int:
        return num_tiles(self._facts[chunk], self._stage, self._scratch_bytes)

    def _bytes_of_mean(self, chunk: int) -> int:
        """Bytes of what was reduced on the device."""
        its = self._facts[chunk]
        arriving = its.dtypes.arriving(self._books.is_alone)
        # At stage 0 every rank keeps the whole mean, at all other stages its own part.
        return (its.layout.numel if self._stage == 0 else its.grad_layout.shard_numel) * arriving.itemsize


def _books_of(plan: Decisions) -> dict[int, SimulatedGradient]:
    """The books of all trainable chunks of a plan, by index."""
    found: dict[int, SimulatedGradient] = {}
    is_alone = plan.world_size == 1
    flags = iter(plan.trained)  # in the order of the chunks; those of the spec are from when the model was wrapped
    for index, (chunk, facts) in enumerate(zip(plan.demand.chunks, plan.packing.chunks, strict=True)):
        trained = bytes(islice(flags, len(facts.names)))
        if Kind.GRAD not in chunk.home_bytes:
            continue
        # A chunk without elements has a home of 0 bytes. Any other chunk with 0 planned bytes has none: its gradient
        # rests in the parameter home, or is offloaded.
        has_home = chunk.home_bytes[Kind.GRAD] > 0 or not (facts.may_lend_home or facts.layout.numel)
        home = plan.placement.homes[index][Kind.GRAD] if has_home else None
        dtypes = facts.dtypes
        sums = SumRule.planned(plan.world_size, dtypes)
        gradient = SimulatedGradient(
            index,
            facts.oversize,
            sums,
            trained,
            is_alone=is_alone,
            is_chosen=facts.is_chosen,
            has_replicas=facts.may_await_replicas,
            in_groups=facts.in_groups,
        )
        # Gradients are written to a home only if it is on the device, has the dtype of the weight, and has room for a
        # whole payload.
        keeps_whole = plan.settings.stage <= 1 or is_alone
        wide = home if plan.demand.holds_sums and dtypes.widens else None
        gradient.note_memory(home, wide, has_whole=keeps_whole and dtypes.rests_as_is and home is Tier.DEVICE)
        found[index] = gradient
    return found
