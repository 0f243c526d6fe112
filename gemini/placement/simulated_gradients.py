"""Gradients of a simulated run: open in slots, spilled, reduced, at rest. No tensor, no device, no other rank.

They follow the books and the rules of `gradient_rules.py`, as a run does, for ranks that all get the same gradients in
the same order; bytes that a run moves or takes are counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from gemini.placement.demand import FLOAT32, Dtype, Kind, Tier, update_tier
from gemini.placement.gradient_rules import (
    MAX_WAITING,
    Gradient,
    GradState,
    HomeRules,
    PayloadNow,
    ReducedState,
    SlotRules,
    SumRule,
)
from gemini.placement.needs import num_tiles
from gemini.placement.next_use import ReductionOrder
from gemini.placement.packing import ChunkFacts
from gemini.placement.simulate import Exchange, MoveReason, SimulatedPayloads, Traffic

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


class SimulatedGradient(Gradient):
    """The books of one trainable chunk's gradient, and the tiers of its memory."""

    home: Tier | None = None
    wide: Tier | None = None

    def note_memory(self, home: Tier | None, wide: Tier | None, *, has_whole: bool) -> None:
        """The plan has this memory for it."""
        self.home, self.wide, self.has_whole = home, wide, has_whole


class SimulatedHomes(HomeRules):
    """The reduced gradients of all trainable chunks, by index, and the bytes that cross a link when they move."""

    def __init__(
        self, plan: Plan, gradients: Mapping[int, SimulatedGradient], payloads: SimulatedPayloads, traffic: Traffic
    ) -> None:
        super().__init__(gradients)
        self._gradients = gradients
        self._facts = plan.packing.chunks
        self._tiers = plan.placement.homes
        self._payloads = payloads
        self._traffic = traffic
        # Those whose plan has no memory for the gradient beside the parameters.
        self._lends = [
            facts.may_lend_home and not demand.home_bytes.get(Kind.GRAD)
            for facts, demand in zip(self._facts, plan.demand.chunks, strict=True)
        ]
        # Device bytes that the plan leaves of its budget. What a step allocates there beyond the plan has to fit into
        # them.
        self._free = None if plan.budget.device is None else plan.budget.device - plan.device_bytes
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
        is_wide = self._gradients[chunk].reduced_state is ReducedState.WIDE
        return self._bytes_in(chunk, FLOAT32 if is_wide else self._facts[chunk].dtypes.rest)

    def merge(self, chunk: int, source: Dtype, numel: int, backward: int) -> None:
        """Set or add what backward number `backward` has reduced on the device.

        source: the dtype of those `numel` elements.
        """
        self.begin(chunk, backward)
        # A sum on the host is added there, so only the new gradient crosses the link.
        self._traffic.copy(Tier.DEVICE, self.tier_of(chunk), numel * source.itemsize, MoveReason.GRADIENT)

    def reclaim(self, chunk: int) -> None:
        """Move the gradient out of the parameter home if it is there: the parameters are needed before the step."""
        if self.is_lent(chunk):
            self.move_out(chunk)

    # -- what a run does

    def is_lent(self, chunk: int) -> bool:
        """See `HomeRules`."""
        return chunk in self._lent

    def consumed(self, chunk: int) -> None:
        """See `HomeRules`."""
        self._lent.discard(chunk)

    def _lends_home(self, chunk: int) -> bool:
        return self._lends[chunk]

    def _payload_of(self, chunk: int) -> PayloadNow:
        payloads = self._payloads
        return PayloadNow(
            is_pinned=payloads.pins[chunk] > 0,
            is_coming=payloads.is_coming(chunk),
            is_gathered=payloads.is_there(chunk) and chunk not in self._lent,
            is_resident=payloads.at_home[chunk],
            has_own_slot=payloads.is_kept(chunk),
            num_gathers=payloads.num_gathers[chunk],
        )

    def _release_slot(self, chunk: int) -> None:
        self._payloads.release(chunk)

    def _release_resident(self, chunk: int) -> bool:
        return True  # a user's views are in no plan

    def _lend(self, chunk: int) -> None:
        self._lent.add(chunk)

    def _take_home(self, chunk: int) -> None:
        dtype = self._facts[chunk].dtypes.rest
        self._gradients[chunk].home = self._allocate(self._resting(chunk), self._bytes_in(chunk, dtype))

    def _take_wide(self, chunk: int) -> None:
        self._gradients[chunk].wide = self._allocate(self._resting(chunk), self._bytes_in(chunk, FLOAT32))

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
        return self._facts[chunk].optim_layout.shard_numel * dtype.itemsize

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


class SimulatedSlots(SlotRules):
    """The open gradients, and the bytes that cross a link when they leave a slot and come back."""

    def __init__(
        self, plan: Plan, gradients: Mapping[int, SimulatedGradient], homes: SimulatedHomes, traffic: Traffic
    ) -> None:
        super().__init__(gradients)
        self._facts = plan.packing.chunks
        self._num_slots = plan.placement.num_gradient_slots
        self._chunks_in: tuple[dict[int, None], dict[int, None]] = {}, {}  # by size
        self._homes = homes
        self._traffic = traffic

    def close(self, chunk: int) -> None:
        """See `SlotRules`."""
        gradient = self._books[chunk]
        self._chunks_in[gradient.oversize].pop(chunk, None)
        gradient.become(GradState.CLOSED)

    def _inside(self, oversize: bool) -> Iterable[int]:
        return self._chunks_in[oversize]

    def _free_slot(self, oversize: bool) -> object | None:
        inside = self._chunks_in[oversize]
        return inside if len(inside) < self._num_slots[oversize] else None

    def _spill(self, victim: int, wanted: int) -> object:
        gradient, num_bytes = self._books[victim], self._facts[victim].payload_bytes
        self._traffic.copy(Tier.DEVICE, Tier.HOST, num_bytes, MoveReason.SPILL)
        self._homes.hold(Tier.HOST, num_bytes)
        gradient.become(GradState.SPILLED)
        inside = self._chunks_in[gradient.oversize]
        del inside[victim]
        return inside

    def _unspill(self, chunk: int, slot: object) -> None:
        self._occupy(chunk)
        self._traffic.copy(Tier.HOST, Tier.DEVICE, self._facts[chunk].payload_bytes, MoveReason.SPILL)
        self._homes.hold(Tier.HOST, -self._facts[chunk].payload_bytes)

    def _open_in_slot(self, chunk: int, slot: object, resumes: bool, zero: bool) -> None:
        self._occupy(chunk)
        if resumes:
            tier, num_bytes = self._homes.tier_of(chunk), self._homes.num_bytes(chunk)
            self._traffic.copy(tier, Tier.DEVICE, num_bytes, MoveReason.GRADIENT)

    def _open_at_home(self, chunk: int, zero: bool) -> None:
        self._books[chunk].become(GradState.AT_HOME)

    def _occupy(self, chunk: int) -> None:
        gradient = self._books[chunk]
        self._chunks_in[gradient.oversize][chunk] = None
        gradient.become(GradState.IN_SLOT)


class Gradients:
    """The gradients of all trainable chunks of a plan, by index."""

    def __init__(
        self,
        plan: Plan,
        payloads: SimulatedPayloads,
        traffic: Traffic,
        use: Callable[[int, int], None],
        leave_node: Callable[[], None],
    ) -> None:
        """use: `use(chunk, num_bytes)` updates a chunk with a gradient that the backward uses up.

        leave_node: lifts the pins of the node that has made the gradient.
        """
        stage, chunks = plan.settings.stage, plan.packing.chunks
        self._facts: Sequence[ChunkFacts] = chunks
        self._stage = stage
        self._is_alone = plan.world_size == 1
        self._keeps_whole = stage <= 1 or self._is_alone
        self._scratch_bytes = plan.demand.scratch_bytes
        self._traffic = traffic
        self.of: dict[int, SimulatedGradient] = {}
        flags = iter(plan.trained)  # in the order of the chunks; those of the spec are from when the model was wrapped
        for index, (chunk, facts) in enumerate(zip(plan.demand.chunks, chunks, strict=True)):
            trained = bytes(islice(flags, len(facts.names)))
            if Kind.GRAD not in chunk.home_bytes:
                continue
            # A chunk without elements has a home of 0 bytes. Any other chunk with 0 planned bytes has none: its
            # gradient rests in the parameter home, or is offloaded.
            has_home = chunk.home_bytes[Kind.GRAD] > 0 or not (facts.may_lend_home or facts.layout.numel)
            home = plan.placement.homes[index][Kind.GRAD] if has_home else None
            dtypes, rests_as_is = facts.dtypes, facts.dtypes.rest == facts.dtypes.weight
            sums = SumRule.of(plan.world_size, dtypes.weight.itemsize, rests_as_is=rests_as_is, widens=dtypes.widens)
            gradient = SimulatedGradient(index, facts.oversize, sums, trained, is_alone=self._is_alone)
            # Gradients are written to a home only if it is on the device, has the dtype of the weight, and has room
            # for a whole payload.
            has_whole = self._keeps_whole and rests_as_is and home is Tier.DEVICE
            wide = home if plan.demand.holds_sums and dtypes.widens else None
            gradient.note_memory(home, wide, has_whole=has_whole)
            self.of[index] = gradient
        self.homes = SimulatedHomes(plan, self.of, payloads, traffic)
        self._slots = SimulatedSlots(plan, self.of, self.homes, traffic)
        self._payloads = payloads
        self._frees = [chunk.frees_gradient for chunk in plan.demand.chunks]
        self._knows_parts = not any(self._frees)  # which decides about updates inside the backward
        self._use, self._leave_node = use, leave_node
        # Fetches that are collectives give all ranks common points at which to reduce. Without them the order is all
        # they share.
        self._gathers_in_backward = stage == 3 and not self._is_alone and not payloads.is_resident
        self._in_flight: int | None = None  # the chunk whose reduction was launched and not finished
        self._order = ReductionOrder[int](list(self.of))  # a touch is its number within a backward here
        self._touches: dict[int, int] = {}  # of the backward that was recorded last
        self._begin()

    # -- a backward

    def begin_backward(self, backward: int) -> None:
        """Begin backward number `backward` since the last step."""
        self._begin()
        self._backward = backward

    def _begin(self) -> None:
        self._backward = 0
        # By chunk: weights whose gradients wait in `.grad`, the chunk that has waited longest first.
        self._waiting: dict[int, list[int]] = {}
        self._reduced: set[int] = set()
        self._complete: set[int] = set()  # open chunks with all expected gradients
        self._order.begin(self._touches)
        self._next_in_order = 0
        self._num_touches = 0
        self._is_off = self._is_ending = False

    def arrive(self, chunk: int, position: int) -> None:
        """Autograd has made the gradient of the weight at `position` of the chunk."""
        gradient, waiting = self.of[chunk], self._waiting
        # Gradients of a fine chunk wait until all of them can be copied by one call.
        if not self._facts[chunk].is_fine or (chunk not in waiting and not gradient.may_wait(self._backward)):
            self._accept(chunk, [position])
            return
        waiting.setdefault(chunk, []).append(position)
        # Waiting gradients take memory beyond the gradient slots, so few chunks may have them.
        if len(waiting) > MAX_WAITING:
            self._collect(next(iter(waiting)))
        if len(waiting.get(chunk, ())) >= gradient.expected:
            self._collect(chunk)

    def before_touch(self) -> None:
        """Reduce the chunks that are due, before the backward uses a chunk that can leave its slot."""
        if self._gathers_in_backward:
            if self._order.points is None:
                # While ranks record, they agree at each touch and reduce in the order of the model.
                due = sorted(self._complete)
            else:
                due = [i for i in self._order.due(self._num_touches + 1) if i not in self._reduced]
            for chunk in due:
                # Gradients that wait belong to the sum that is reduced.
                self._collect(chunk)
                self._reduce(chunk)
        self._num_touches += 1

    def end_backward(self) -> None:
        """Reduce all open gradients."""
        # What still waits has to be in the payloads before these are reduced.
        for chunk in list(self._waiting):
            self._collect(chunk)
        self._is_ending = True
        # One rank agrees with nobody and expects in the next backward what came in this one.
        if self._is_alone:
            for chunk, gradient in self.of.items():
                if gradient.state is GradState.AT_HOME:
                    if not gradient.is_reduced:
                        gradient.become_reduced(ReducedState.IN_SHARD, self._backward)
                    self._slots.close(chunk)
                elif gradient.is_open:
                    self._reduce(chunk)
                self._expect_less(gradient)
            return
        # Several ranks: the rest of the known order, then all that is still open. If the backward deviated from the
        # order, the ranks agree on another one.
        if self._gathers_in_backward:
            is_off = self._is_off
        else:
            is_off = self._is_off or tuple(self._order.fired) != self._order.order
            for chunk in self._order.order[self._next_in_order :] if self._knows_parts else ():
                self._reduce(chunk)
        for chunk in [chunk for chunk, gradient in self.of.items() if gradient.is_open]:
            self._reduce(chunk)
        self._finish()
        self._knows_parts = True
        if is_off or self._order.points is None:
            self._agree()

    def _agree(self) -> None:
        """Expect of the next backward what this one did."""
        order = self._order
        self._touches = {number: number for number in range(self._num_touches)}
        order.adopt([order.last_fire[chunk] for chunk in order.chunks], order.ranking(), self._touches)
        for chunk, gradient in self.of.items():
            # Ranks with other data may use other weights of a chosen chunk, so all of its weights stay expected.
            if not self._facts[chunk].is_chosen:
                self._expect_less(gradient)

    def _expect_less(self, gradient: Gradient) -> None:
        # `got` counts since the last step, so only the first backward shows what a single one brings.
        if self._backward == 1:
            gradient.expect_what_came()

    def end_step(self) -> None:
        """Drop all gradients after a step used them."""
        for gradient in self.of.values():
            if gradient.reduced_state is not ReducedState.NONE:
                gradient.become_reduced(ReducedState.NONE)
            none = bytes(len(gradient.got))
            gradient.note_leftovers(none, none, none)
        self.homes.end_step()

    # -- arrivals

    def _collect(self, chunk: int) -> None:
        if chunk in self._waiting:
            self._accept(chunk, self._waiting.pop(chunk))

    def _accept(self, chunk: int, positions: Sequence[int]) -> None:
        gradient = self.of[chunk]
        if not gradient.is_open or gradient.state is GradState.SPILLED:
            # The reduction in flight occupies a slot. Finish it if this gradient needs that slot, or is that gradient.
            if not self._is_alone and self._in_flight is not None:
                if gradient.state is GradState.REDUCING or self._slots.lacks_slot(chunk):
                    self._finish()
            self._slots.open(chunk, self._backward)
        for position in positions:
            gradient.note_fired(position)
        self._order.last_fire[chunk] = self._num_touches
        if gradient.num_fired == gradient.expected:
            self._complete.add(chunk)
        else:
            self._complete.discard(chunk)
        # A gradient after the chunk's reduction is a second piece: the recorded points are too early.
        if chunk in self._reduced:
            self._is_off = gradient.in_pieces = True
        elif gradient.num_fired == gradient.expected:
            self._note_complete(chunk)

    def _note_complete(self, chunk: int) -> None:
        gradient = self.of[chunk]
        if self._is_alone:
            # Pieces wait for the end: they are added in their own dtype before they are merged, as autograd does.
            if gradient.state is GradState.IN_SLOT and not gradient.in_pieces:
                self._reduce(chunk)
            return
        self._order.note_complete(chunk)
        # Reduce in the agreed order only: a chunk that completes early waits for those before it.
        while self._knows_parts and not self._gathers_in_backward and self._next_in_order < len(self._order.order):
            following = self._order.order[self._next_in_order]
            if not self.of[following].is_complete:
                break
            self._reduce(following)
            self._next_in_order += 1

    # -- reductions

    def _reduce(self, chunk: int) -> None:
        # The reduction in flight uses the scratch that this one needs.
        self._finish()
        self._reduced.add(chunk)
        self._complete.discard(chunk)
        self._slots.open(chunk, self._backward)
        facts = self._facts[chunk]
        if self._is_alone:
            # One rank rounds on the device, so that the narrower gradient crosses the link.
            source = facts.dtypes.rest if facts.dtypes.narrows else facts.dtypes.weight
            self._merge(chunk, source, facts.layout.numel)
            self._slots.close(chunk)
            return
        self.homes.before_reduction(chunk)
        tiles = num_tiles(facts, self._stage, self._scratch_bytes)
        self._traffic.exchange(Exchange.REDUCE, facts.layout.numel * facts.dtypes.travel.itemsize, tiles)
        self.of[chunk].become(GradState.REDUCING)
        self._in_flight = chunk
        # At stage 0 the reduced shards are gathered at once, and tiles wait for each other: nothing stays in flight.
        if self._stage == 0 or tiles > 1:
            self._finish()

    def _finish(self) -> None:
        if self._in_flight is None:
            return
        chunk, self._in_flight = self._in_flight, None
        facts, numel = self._facts[chunk], self._facts[chunk].layout.shard_numel
        if self._stage == 0:
            numel = facts.layout.numel
            # The mean travels in the dtype in which it rests, not in that of the reduction.
            tiles = num_tiles(facts, self._stage, self._scratch_bytes)
            self._traffic.exchange(Exchange.WHOLE_GRADIENT, numel * facts.dtypes.rest.itemsize, tiles)
        self._merge(chunk, facts.dtypes.rest, numel)
        self._slots.close(chunk)

    def _merge(self, chunk: int, source: Dtype, numel: int) -> None:
        """Bring to rest `numel` elements that were reduced on the device, or use them up, as `GradHomes.merge`."""
        gradient, payloads = self.of[chunk], self._payloads
        if self._frees[chunk] and not gradient.is_reduced:
            self._leave_node()
            in_use = payloads.pins[chunk] or payloads.is_coming(chunk)
            is_over = self._is_alone and self._is_ending
            if not in_use and (is_over or gradient.is_whole):
                gradient.note_used()
                self._use(chunk, numel * source.itemsize)
                return
        self.homes.merge(chunk, source, numel, self._backward)
