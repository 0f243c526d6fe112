"""Gradients of several ranks: sends each chunk's gradient to the other ranks, and the mean into its home.

Which gradients a rank gets, and when, may depend on its data; collectives may not. All ranks reduce a chunk at the same
point (see placement/reduction_order.py), and at the end of a backward whatever is open on any rank.

A reduction is first only started. It is finished when the next one starts, when its slot is wanted, or when the
backward ends. The mean is made in fp32 (fp64 for fp64) and rounded once, to the dtype in which the gradient rests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from gemini.chunks.grad_state import GradState, UnsyncedState
from gemini.chunks.gradient import ChunkGradient
from gemini.manager.accumulate import Accumulation
from gemini.manager.completion import Completion
from gemini.manager.tiles import fill_from, reduce_in_tiles
from gemini.manager.unsynced import keep_unsynced, reduce_unsynced
from gemini.memory.modes import untracked
from gemini.memory.region import Region
from gemini.observe import Moving
from gemini.placement.next_use import NextUse
from gemini.placement.reduction_order import ReductionOrder
from gemini.placement.trace import PassKind, Phase


@dataclass
class _InFlight:
    """A reduction that was started and not finished."""

    gradient: ChunkGradient
    gathered: Callable[[], Region]  # waits, and returns the mean
    backward: int
    moving: Moving


@dataclass(eq=False, repr=False)
class AccumulateAndReduce(Accumulation):
    """Several ranks: every chunk's gradient is reduced as soon as all ranks have it, in one order.

    If backward gathers parameters, ranks reduce before a certain fetch. If not, the order of reductions is all they
    share.
    """

    _next_use: NextUse
    _stage: int

    knows_all: ClassVar = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._completion = Completion(self._memory, self._communicator)
        self._in_flight: _InFlight | None = None
        self._gathers_in_backward = False  # until there is a placement
        self._next_in_order = 0
        self._off_plan = False  # a gradient came late or early: record again
        self.reset_order()

    def note_placement(self, is_resident: bool) -> None:
        """See `Accumulation`."""
        self._gathers_in_backward = self._stage == 3 and not is_resident

    def reset_order(self) -> None:
        """See `Accumulation`."""
        self._order = ReductionOrder(list(self._memory.gradients))

    def begin_backward(self) -> None:
        """See `Accumulation`."""
        super().begin_backward()
        next_use = self._next_use
        self._order.begin(next_use.places if next_use.kind is PassKind.TRAINING else None)
        self._completion.begin()
        self._next_in_order = 0
        self._off_plan = False

    def make_way(self, gradient: ChunkGradient) -> None:
        """See `Accumulation`. The reduction in flight may be this chunk's, or hold the last slot."""
        if self._in_flight is not None:
            if gradient.state is GradState.REDUCING or self._memory.lacks_slot(gradient):
                self._finish()

    def arrived(self, gradient: ChunkGradient, backward: int) -> None:
        """See `Accumulation`."""
        index, order = gradient.chunk.index, self._order
        # The number of touches before this gradient: the chunk may be reduced from the next touch on.
        order.last_fire[index] = len(self._next_use.passed)
        # More than what is expected may come: in the step's first backward some of the parameters may have been idle.
        if gradient.num_fired >= gradient.expected:
            self._completion.note(index)
        if index in self._reduced:
            # A piece came after the chunk was reduced: it is reduced by itself at the end, and the recorded point is
            # too early.
            self._off_plan = True
            gradient.note_pieces()
        elif gradient.num_fired == gradient.expected:
            order.note_complete(index)
            if self.synchronizes and not self._gathers_in_backward:
                self._reduce_in_order(backward)

    def _reduce_in_order(self, backward: int) -> None:
        """Reduce complete gradients whose turn it is. Collective."""
        order, position = self._order.order, self._communicator.position
        before = position.now
        # Ranks may be at different operators here, and the position travels in the tags: use one that all share.
        position.set(0, Phase.BACKWARD)
        while self._next_in_order < len(order):
            gradient = self._memory.gradients[order[self._next_in_order]]
            if not gradient.is_open or gradient.num_fired != gradient.expected:
                break
            self.reduce(gradient, backward)
            self._next_in_order += 1
        position.return_to(before)

    def due(self) -> Sequence[int]:
        """See `Accumulation`. If backward gathers parameters, fetches are points that all ranks share."""
        if not (self._gathers_in_backward and self.synchronizes):
            return ()
        if self._order.points is not None and self._is_as_recorded():
            return [index for index in self._order.due(self._next_use.position) if index not in self._reduced]
        return self._completion.agree()

    def _is_as_recorded(self) -> bool:
        """Whether this pass has had the recorded touches only, so that gradients come by their recorded points."""
        return self._next_use.is_in_order and self._next_use.kind is PassKind.TRAINING

    def reduce(self, gradient: ChunkGradient, backward: int) -> None:
        """See `Accumulation`. The reduction is only started."""
        with untracked():
            self._finish()
            self._reduced.add(gradient.chunk.index)
            self._completion.note_reduced(gradient.chunk.index)
            if gradient.unsynced_state is not UnsyncedState.NONE:
                # The sum under no_sync() is whole and unreduced: this gradient is added to it, and both are reduced as
                # one.
                if gradient.is_open:
                    keep_unsynced(gradient, backward, self._memory)
                reduce_unsynced(gradient, backward, self._homes, self._scratch, self._communicator)
                return
            # A rank without a gradient of this chunk takes part all the same: `open` gives it a payload, and `complete`
            # zeros it.
            self._memory.open(gradient, backward)
            self._memory.complete(gradient)
            self._start(gradient, backward)

    def _start(self, gradient: ChunkGradient, backward: int) -> None:
        """Send the open payload to the other ranks. Its mean belongs to backward number `backward`. Collective.

        The reduction in flight must be finished: both use the same scratch.
        """
        if gradient.chunk.exchange_bytes > self._scratch.num_bytes:
            self._reduce_in_tiles(gradient, backward)
            return
        self._scratch.reset()
        moving = self._memory.moving(gradient, self._communicator.position.here, blocks=2)
        with moving:
            gathered = self._launch(gradient)
        self._in_flight = _InFlight(gradient, gathered, backward, moving)
        # At stage 0 finishing is a collective (an all-gather): it must not wait for a point that is this rank's alone.
        if self._stage == 0:
            self._finish()

    def _reduce_in_tiles(self, gradient: ChunkGradient, backward: int) -> None:
        """Reduce the open payload to the end. Collective.

        Each tile is a collective: the later ones must not wait for a point that is this rank's alone.
        """
        chunk, whole = gradient.chunk, gradient.payload
        assert whole is not None
        with self._memory.moving(gradient, self._communicator.position.here, blocks=1):
            self._homes.before_reduction(chunk)
            self._memory.begin_reduction(gradient)
            # Where gradients are written to the home, the mean of a tile replaces elements that were sent before.
            is_first = self._homes.begin(gradient, backward)
            reduce_in_tiles(
                chunk,
                gradient.reduced(),
                fill_from(whole.flat, chunk),
                travel=chunk.travel_dtype,
                rest=chunk.gradient_dtype,
                replaces=is_first,
                homes=self._homes,
                scratch=self._scratch,
                communicator=self._communicator,
            )
            self._memory.close(gradient)

    def _launch(self, gradient: ChunkGradient) -> Callable[[], Region]:
        """Start the exchange; the returned function waits for the mean. Collective."""
        chunk, whole, scratch = gradient.chunk, gradient.payload, self._scratch
        assert whole is not None
        payload = whole.flat
        self._homes.before_reduction(chunk)
        rests_as_is = chunk.gradient_dtype is chunk.dtype
        # At stage 0 the mean is gathered whole in the dtype in which it rests, which is not that of the payload here.
        if self._stage == 0 and not rests_as_is:
            whole = scratch.region(chunk.numel, chunk.gradient_dtype)
        in_place = gradient.state is GradState.AT_HOME or self._stage == 0
        # This rank's slice of the payload is where the mean rests: the exchange writes it there. Slices of several
        # units are not contiguous.
        if in_place and len(chunk.layout.units) == 1:
            begin = chunk.layout.slices(chunk.rank)[0].payload_start
            out = whole[begin : begin + chunk.layout.shard_numel]
        else:
            out = scratch.region(chunk.layout.shard_numel, chunk.gradient_dtype)
        # `reduce_dtype=`: the gradient travels as a cast copy.
        if chunk.travel_dtype is not chunk.dtype:
            payload = scratch.allocate(chunk.numel, chunk.travel_dtype).copy_(payload)
        finish = self._communicator.start_reduce_scatter(payload, chunk.layout, out.flat, chunk.index, scratch.allocate)
        self._memory.begin_reduction(gradient)

        def gathered() -> Region:
            finish()
            if self._stage > 0:
                return out
            self._communicator.all_gather(whole.flat, out.flat, chunk.layout, chunk.index)
            return whole

        return gathered

    def _finish(self) -> None:
        """Finish the reduction in flight, if any, and merge its result. Local, but at stage 0 it gathers."""
        if self._in_flight is None:
            return
        # Taken out first: after a failure in the merge it must not be finished twice.
        flight, self._in_flight = self._in_flight, None
        with untracked(), flight.moving:
            self._homes.merge(flight.gradient, flight.gathered(), flight.backward)
            self._memory.close(flight.gradient)

    def end_backward(self, backward: int) -> None:
        """See `Accumulation`. If this backward left the plan, ranks also agree on the points of the next one."""
        gradients, order = list(self._memory.gradients.values()), self._order
        if not self.synchronizes:
            for gradient in gradients:
                if gradient.is_open:
                    keep_unsynced(gradient, backward, self._memory)
                # Other ranks may have left something: this rank takes part in its reduction later, with zeros.
                elif not gradient.is_behind:
                    gradient.become_unsynced(UnsyncedState.ELSEWHERE)
            self.awaits_reduction = True
            order.note_unsynced(as_expected=self._is_as_recorded() or not self._gathers_in_backward)
            return
        if self._gathers_in_backward:
            off = self._off_plan or not self._is_as_recorded()
        else:
            # Nothing is gathered, so the order of reductions is all that ranks share. Another order on one rank makes
            # all ranks agree on an order again.
            off = self._off_plan or tuple(order.fired) != order.order
            # What is left of the order is reduced with zeros, where some gradients did not come.
            for index in order.order[self._next_in_order :]:
                self.reduce(self._memory.gradients[index], backward)
        # Before the first record no rank has points: then every backward counts as off its plan.
        is_off = self._reduce_the_rest("end of backward", backward, off or order.points is None)
        self._finish()
        # A backward that follows no forward of the model has a trace of its own, in which points mean nothing.
        if not is_off or (self._gathers_in_backward and self._next_use.kind is not PassKind.TRAINING):
            return
        # This backward was not the recorded one: the next one follows what it has shown.
        self._agree_on_points()
        for gradient in gradients:
            # Unused parameters must not keep a chunk open next time. If routing chooses the parameters that are used,
            # all are still expected: a gradient that came late on some ranks only would be added in another order.
            if backward == 1 and not gradient.chunk.is_chosen:
                gradient.expect_what_came()

    def catch_up(self, backward: int) -> None:
        """See `Accumulation`."""
        if self.awaits_reduction:
            self._reduce_the_rest("unsynced gradients", backward)

    def _reduce_the_rest(self, when: str, backward: int, off: bool = False) -> bool:
        """Reduce what is open or unsynced on any rank. Returns whether some rank is `off` its plan. Collective.

        The all-reduce also carries which parameters have a gradient on any rank. So `.grad is None` has the same answer
        on all ranks and costs no collective of its own.
        """
        gradients = list(self._memory.gradients.values())
        own = bytearray([off, *(g.is_open or g.unsynced_state is UnsyncedState.HELD for g in gradients)])
        for gradient in gradients:
            own += gradient.got
        words = torch.frombuffer(own, dtype=torch.uint8).to(self._communicator.device)
        # One byte a flag, in one all-reduce: off | chunk to be reduced, by chunk | parameter has a gradient, by chunk.
        self._communicator.all_reduce_max_(words, when)
        # Reading the flags makes the host wait for the device.
        agreed: bytes = words.cpu().numpy().tobytes()
        start = len(gradients) + 1
        for number, gradient in enumerate(gradients):
            end = start + len(gradient.got)
            gradient.note_agreed(agreed[start:end])
            start = end
            if agreed[number + 1]:
                self.reduce(gradient, backward)
            # Where some rank held a sum its reduction has ended this state. Here no rank held one.
            if self.awaits_reduction and gradient.is_behind:
                gradient.become_unsynced(UnsyncedState.NONE)
        self.awaits_reduction = False
        return bool(agreed[0])

    def _agree_on_points(self) -> None:
        """Adopt the latest point and rank of each chunk over all ranks. Collective."""
        order = self._order
        points = [order.last_fire[i] for i in order.chunks]
        points_and_ranking = torch.tensor(points + order.ranking(), dtype=torch.int64, device=self._communicator.device)
        self._communicator.all_reduce_max_(points_and_ranking, "points of reduction")
        agreed: list[int] = points_and_ranking.tolist()
        order.adopt(agreed[: len(points)], agreed[len(points) :], self._next_use.passed)

    def end_step(self, has_zeros: bool) -> None:
        """See `Accumulation`. If zeros are needed, ranks still agree on which parameters had a gradient."""
        # A reduction is in flight here only after a failure, or inside a backward.
        self._in_flight = None
        self._completion.note_all()
        is_behind = any(gradient.is_behind for gradient in self._memory.gradients.values())
        self.awaits_reduction = is_behind or (has_zeros and self.awaits_reduction)
