"""Gradients of a simulated run: open in slots, spilled, reduced. No tensor, no device, no other rank.

It keeps the books of `runtime/reduce.py`, `grad_homes.py` and `arrivals.py`, for ranks that all get the same gradients
in the same order. Both ask `gradient_rules.py` and `ReductionOrder` what is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from gemini.placement.demand import Dtype, Kind, Tier
from gemini.placement.gradient_rules import MAX_WAITING, SumRule, expected_after, first_to_spill
from gemini.placement.needs import num_tiles
from gemini.placement.next_use import ReductionOrder
from gemini.placement.packing import ChunkFacts
from gemini.placement.simulate import Exchange, Gradient, Homes, MoveReason, SimulatedPayloads, Traffic

if TYPE_CHECKING:
    from gemini.placement.plan import Plan


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
        self._num_slots = plan.placement.num_gradient_slots
        self._scratch_bytes = plan.demand.scratch_bytes
        self._traffic = traffic
        self.of: dict[int, Gradient] = {}
        self._whole: set[int] = set()  # chunks whose planned gradient home autograd can write to like a payload
        for index, chunk in enumerate(plan.demand.chunks):
            if Kind.GRAD in chunk.home_bytes:
                # A chunk without elements has a home of 0 bytes. Any other chunk with 0 planned bytes has none: its
                # gradient rests in the parameter home, or is offloaded.
                has_home = chunk.home_bytes[Kind.GRAD] > 0 or not (
                    chunks[index].may_lend_home or chunks[index].layout.numel
                )
                home = plan.placement.homes[index][Kind.GRAD] if has_home else None
                dtypes = chunks[index].dtypes
                has_sums = plan.demand.holds_sums and dtypes.widens
                wide = home if has_sums else None
                sums = SumRule.of(plan.world_size, dtypes.weight.itemsize, rests_as_is=dtypes.rest == dtypes.weight)
                self.of[index] = Gradient(home, sums, len(chunks[index].names), wide=wide)
                # Gradients are written to a home only if it is on the device, has the dtype of the weight, and has room
                # for a whole payload.
                if self._keeps_whole and dtypes.rest == dtypes.weight and home is Tier.DEVICE:
                    self._whole.add(index)
        self.homes = Homes(plan, self.of, payloads, traffic)
        self._payloads = payloads
        self._frees = [chunk.frees_gradient for chunk in plan.demand.chunks]
        flags = iter(plan.trained)  # in the order of the chunks; those of the spec are from when the model was wrapped
        self._num_trained = [sum(islice(flags, len(facts.names))) for facts in chunks]
        self._knows_parts = not any(self._frees)  # which decides about updates inside the backward
        self._use, self._leave_node = use, leave_node
        # Fetches that are collectives give all ranks common points at which to reduce. Without them the order is all
        # they share.
        self._gathers_in_backward = stage == 3 and not self._is_alone and not payloads.is_resident
        self._inside: tuple[dict[int, None], dict[int, None]] = {}, {}  # chunks in gradient slots, by size
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

    def arrive(self, chunk: int, weight: int) -> None:
        """Autograd has made the gradient of a weight of the chunk."""
        gradient, waiting = self.of[chunk], self._waiting
        # Gradients of a fine chunk wait until all of them can be copied by one call.
        if not self._facts[chunk].is_fine or (chunk not in waiting and not self._may_wait(chunk)):
            self._accept(chunk, [weight])
            return
        waiting.setdefault(chunk, []).append(weight)
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
                if gradient.state == "at home":
                    if not gradient.is_reduced:
                        gradient.is_reduced, gradient.first_backward = True, self._backward
                    self._close(chunk)
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
            gradient.expected = expected_after(len(gradient.got))

    def end_step(self) -> None:
        """Drop all gradients after a step used them."""
        for gradient in self.of.values():
            gradient.is_reduced = gradient.is_wide = gradient.is_used = False
            gradient.got = set()
        self.homes.end_step()

    # -- arrivals

    def _may_wait(self, chunk: int) -> bool:
        gradient = self.of[chunk]
        if gradient.fired or gradient.is_open:
            return False
        # Where one rank continues a sum, each gradient is added by itself: (a + b) + c has other bits than a + (b + c).
        is_in_place = self._is_alone and chunk in self._whole
        return not (gradient.is_reduced and (is_in_place or self._resumes(chunk)))

    def _collect(self, chunk: int) -> None:
        if chunk in self._waiting:
            self._accept(chunk, self._waiting.pop(chunk))

    def _accept(self, chunk: int, weights: Sequence[int]) -> None:
        gradient = self.of[chunk]
        if not gradient.is_open or gradient.state == "spilled":
            # The reduction in flight occupies a slot. Finish it if this gradient needs that slot, or is that gradient.
            if not self._is_alone and self._in_flight is not None:
                if gradient.state == "reducing" or self._lacks_slot(chunk):
                    self._finish()
            self._open(chunk)
        for weight in weights:
            gradient.in_pieces |= weight in gradient.fired
            gradient.fired.add(weight)
            gradient.got.add(weight)
        self._order.last_fire[chunk] = self._num_touches
        if len(gradient.fired) == gradient.expected:
            self._complete.add(chunk)
        else:
            self._complete.discard(chunk)
        # A gradient after the chunk's reduction is a second piece: the recorded points are too early.
        if chunk in self._reduced:
            self._is_off = gradient.in_pieces = True
        elif len(gradient.fired) == gradient.expected:
            self._note_complete(chunk)

    def _note_complete(self, chunk: int) -> None:
        gradient = self.of[chunk]
        if self._is_alone:
            # Pieces wait for the end: they are added in their own dtype before they are merged, as autograd does.
            if gradient.state == "in slot" and not gradient.in_pieces:
                self._reduce(chunk)
            return
        self._order.note_complete(chunk)
        # Reduce in the agreed order only: a chunk that completes early waits for those before it.
        while self._knows_parts and not self._gathers_in_backward and self._next_in_order < len(self._order.order):
            following = self._order.order[self._next_in_order]
            if not self.of[following].is_open or len(self.of[following].fired) != self.of[following].expected:
                break
            self._reduce(following)
            self._next_in_order += 1

    # -- memory

    def _may_write_home(self, chunk: int) -> bool:
        gradient = self.of[chunk]
        return chunk in self._whole and (gradient.sums.adds_at_home or not gradient.is_reduced)

    def _resumes(self, chunk: int) -> bool:
        gradient = self.of[chunk]
        if not gradient.is_reduced or gradient.is_wide:
            return False
        sums = gradient.sums
        return sums.resumes or (sums.resumes_pieces and gradient.first_backward == self._backward)

    def _lacks_slot(self, chunk: int) -> bool:
        gradient = self.of[chunk]
        if gradient.state == "closed" and self._may_write_home(chunk):
            return False
        size = self._facts[chunk].oversize
        return len(self._inside[size]) >= self._num_slots[size]

    def _open(self, chunk: int) -> None:
        gradient = self.of[chunk]
        if gradient.state in ("at home", "in slot"):
            return
        if gradient.state == "spilled":
            self._take_slot(chunk)
            self._traffic.copy(Tier.HOST, Tier.DEVICE, self._facts[chunk].payload_bytes, MoveReason.SPILL)
            self.homes.hold(Tier.HOST, -self._facts[chunk].payload_bytes)
            return
        if self._may_write_home(chunk):
            gradient.state = "at home"
            return
        self._take_slot(chunk)
        if self._resumes(chunk):
            num_bytes = self.homes.num_bytes(chunk)
            self._traffic.copy(self.homes.tier_of(chunk), Tier.DEVICE, num_bytes, MoveReason.GRADIENT)

    def _take_slot(self, chunk: int) -> None:
        size = self._facts[chunk].oversize
        inside = self._inside[size]
        if len(inside) >= self._num_slots[size]:
            victim = first_to_spill((len(self.of[i].fired) == self.of[i].expected, i) for i in inside)
            num_bytes = self._facts[victim].payload_bytes
            self._traffic.copy(Tier.DEVICE, Tier.HOST, num_bytes, MoveReason.SPILL)
            self.homes.hold(Tier.HOST, num_bytes)
            self.of[victim].state = "spilled"
            del inside[victim]
        inside[chunk] = None
        self.of[chunk].state = "in slot"

    def _close(self, chunk: int) -> None:
        gradient = self.of[chunk]
        self._inside[self._facts[chunk].oversize].pop(chunk, None)
        gradient.state, gradient.fired = "closed", set()

    # -- reductions

    def _reduce(self, chunk: int) -> None:
        # The reduction in flight uses the scratch that this one needs.
        self._finish()
        self._reduced.add(chunk)
        self._complete.discard(chunk)
        self._open(chunk)
        facts = self._facts[chunk]
        if self._is_alone:
            # One rank rounds on the device, so that the narrower gradient crosses the link.
            source = facts.dtypes.rest if facts.dtypes.narrows else facts.dtypes.weight
            self._merge(chunk, source, facts.layout.numel)
            self._close(chunk)
            return
        self.homes.before_reduction(chunk)
        tiles = num_tiles(facts, self._stage, self._scratch_bytes)
        self._traffic.reduce(facts.layout, facts.dtypes, tiles)
        self.of[chunk].state = "reducing"
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
        self._close(chunk)

    def _merge(self, chunk: int, source: Dtype, numel: int) -> None:
        """Bring to rest `numel` elements that were reduced on the device, or use them up, as `GradHomes.merge`."""
        gradient, payloads = self.of[chunk], self._payloads
        if self._frees[chunk] and not gradient.is_reduced:
            self._leave_node()
            in_use = payloads.pins[chunk] or payloads.is_coming(chunk)
            is_over = self._is_alone and self._is_ending
            if not in_use and (is_over or len(gradient.fired) == self._num_trained[chunk]):
                gradient.is_used = True
                self._use(chunk, numel * source.itemsize)
                return
        self.homes.merge(chunk, source, numel, self._backward)
