"""How the gradients that autograd makes become one reduced gradient a step. Two ways; the number of ranks chooses.

One rank adds them in autograd's own order and has nothing to agree on. Several ranks reduce every micro-batch at once,
at points that all of them share (see placement/reduction_order.py): which gradients a rank gets, and when, may depend
on its data, and collectives may not. At the end of a backward whatever is open on any rank is reduced.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gemini.chunks.gradient import ChunkGradient, GradState, UnsyncedState
from gemini.executor.completion import Completion
from gemini.executor.grad_homes import GradHomes
from gemini.executor.grad_memory import GradMemory
from gemini.executor.reduce import GradReducer
from gemini.executor.scratch import Scratch
from gemini.executor.unsynced import UnsyncedSums
from gemini.placement.next_use import NextUse
from gemini.placement.reduction_order import ReductionOrder
from gemini.ranks.communicator import Communicator
from gemini.ranks.position import Phase


class Accumulation:
    """What the gradient store asks of either way. `backward` counts the backwards of a step."""

    knows_all = True  # what came to this rank says all about a gradient
    synchronizes = True  # False inside no_sync()
    awaits_reduction = False  # backwards under no_sync() have left some gradients; equal on all ranks

    def __init__(self, memory: GradMemory) -> None:
        self._memory = memory
        self._reduced: set[int] = set()  # chunks reduced in this backward, by index: membership only

    def note_placement(self, is_resident: bool) -> None:
        """is_resident: no payload leaves between forward and update."""

    def begin_backward(self) -> None:
        """A backward starts. Local."""
        self._reduced.clear()

    def make_way(self, gradient: ChunkGradient) -> None:
        """The gradient is about to be opened: what is in its way is finished. Local but at stage 0."""

    def arrived(self, gradient: ChunkGradient, backward: int) -> None:
        """Some of the chunk's gradients were copied into its payload. Collective if it is now its turn."""
        raise NotImplementedError

    def due(self) -> Sequence[int]:
        """Before a fetch in backward: the chunks that all ranks reduce now, by index. Collective while recording."""
        return ()

    def reduce(self, gradient: ChunkGradient, backward: int) -> None:
        """Mean over ranks of a chunk's open gradient (zeros if this rank has none), into its home. Collective."""
        raise NotImplementedError

    def end_backward(self, backward: int) -> None:
        """Reduce what is open on any rank. Collective."""
        raise NotImplementedError

    def catch_up(self, backward: int) -> None:
        """Reduce what no_sync() has left. Collective if there is something."""

    def forget(self, has_zeros: bool) -> None:
        """Gradients were used, or discarded, or are zeros now; a reduction in flight has failed. Local."""

    def reset_order(self) -> None:
        """Other chunks are trained: which gradients are to be expected, and when, must be found out again. Local."""


class AccumulateInPlace(Accumulation):
    """One rank: its gradient is the mean.

    Where the home is on the device in full precision, gradients are written and added there. Others are opened in a
    slot, and merged when they are complete. no_sync() changes no value.
    """

    def __init__(self, memory: GradMemory, homes: GradHomes, scratch: Scratch, communicator: Communicator) -> None:
        super().__init__(memory)
        self._homes = homes
        self._scratch = scratch
        self._position = communicator.position

    def arrived(self, gradient: ChunkGradient, backward: int) -> None:
        """See `Accumulation`. Pieces are added up in their own dtype first, as autograd does: they wait for the end."""
        if gradient.chunk.index in self._reduced:
            gradient.in_pieces = True
        elif gradient.num_fired == gradient.expected and gradient.state is GradState.IN_SLOT:
            if not gradient.in_pieces:
                self.reduce(gradient, backward)

    def reduce(self, gradient: ChunkGradient, backward: int) -> None:
        """Merge an open gradient into its home. Local."""
        chunk, memory = gradient.chunk, self._memory
        with torch.inference_mode(False), torch.no_grad():
            self._reduced.add(chunk.index)
            memory.open(gradient, backward)
            memory.complete(gradient)
            payload = gradient.payload
            assert payload is not None
            self._scratch.reset()
            with memory.moving(gradient, self._position.here, blocks=1):
                if chunk.narrows:
                    payload = self._scratch.take(payload.numel(), chunk.gradient_dtype).copy_(payload)
                self._homes.merge(gradient, payload, backward)
                memory.close(gradient)

    def end_backward(self, backward: int) -> None:
        """See `Accumulation`."""
        for gradient in self._memory.gradients.values():
            if gradient.state is GradState.AT_HOME:
                self._memory.rest_in_place(gradient, backward)
            elif gradient.is_open:
                self.reduce(gradient, backward)
            if backward == 1 and self.synchronizes:
                gradient.expect_what_came()


class AccumulateAndReduce(Accumulation):
    """Several ranks: every chunk's gradient is reduced as soon as all of them have it, in one order.

    Where backward gathers parameters, ranks reduce before a certain fetch. Where it does not, the order of reductions
    is all that they share.
    """

    knows_all = False

    def __init__(
        self,
        memory: GradMemory,
        reducer: GradReducer,
        unsynced: UnsyncedSums,
        communicator: Communicator,
        next_use: NextUse,
        stage: int,
    ) -> None:
        super().__init__(memory)
        self.reducer = reducer
        self._unsynced = unsynced
        self._communicator = communicator
        self._next_use = next_use
        self._stage = stage
        self._gathers_in_backward = False  # until there is a placement
        self._completion = Completion(memory, communicator)
        self._next_in_order = 0
        self._off_plan = False  # something came late or early: record again
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
        self._order.begin()
        self._completion.begin()
        self._next_in_order = 0
        self._off_plan = False

    def make_way(self, gradient: ChunkGradient) -> None:
        """See `Accumulation`. What is in flight may be this chunk's, or hold the last slot."""
        if gradient.state is GradState.REDUCING or self._memory.lacks_slot(gradient):
            self.reducer.finish()

    def arrived(self, gradient: ChunkGradient, backward: int) -> None:
        """See `Accumulation`."""
        index, order = gradient.chunk.index, self._order
        order.last_fire[index] = self._next_use.position
        if gradient.num_fired >= gradient.expected:
            self._completion.note(index)
        if index in self._reduced:
            self._off_plan = gradient.in_pieces = True
        elif gradient.num_fired == gradient.expected:
            order.fired.append(index)
            if self.synchronizes and not self._gathers_in_backward:
                self._reduce_in_order(backward)

    def _reduce_in_order(self, backward: int) -> None:
        """Reduce what is complete and whose turn it is. Ranks may be at different operators here. Collective."""
        order, position = self._order.order, self._communicator.position
        before = position.now
        position.set(0, Phase.BACKWARD)
        while self._next_in_order < len(order):
            gradient = self._memory.gradients[order[self._next_in_order]]
            if not gradient.is_open or gradient.num_fired != gradient.expected:
                break
            self.reduce(gradient, backward)
            self._next_in_order += 1
        position.now = before

    def due(self) -> Sequence[int]:
        """See `Accumulation`. Fetches are points that all ranks share if backward gathers parameters."""
        if not (self._gathers_in_backward and self.synchronizes):
            return ()
        if self._next_use.follows and self._order.at_touch is not None:
            recorded = self._order.at_touch.get(self._next_use.position, ())
            return [index for index in recorded if index not in self._reduced]
        return self._completion.agree()

    def reduce(self, gradient: ChunkGradient, backward: int) -> None:
        """See `Accumulation`. It is started only."""
        with torch.inference_mode(False), torch.no_grad():
            self.reducer.finish()
            self._reduced.add(gradient.chunk.index)
            self._completion.end(gradient.chunk.index)
            if gradient.is_behind:
                self._unsynced.reduce(gradient, backward)
                return
            self._memory.open(gradient, backward)
            self._memory.complete(gradient)
            self.reducer.start(gradient, backward)

    def end_backward(self, backward: int) -> None:
        """See `Accumulation`. Ranks agree on the points of the next backward too, if this one left the plan."""
        gradients, order = list(self._memory.gradients.values()), self._order
        if not self.synchronizes:
            for gradient in gradients:
                if gradient.is_open:
                    self._unsynced.keep(gradient, backward)
                elif not gradient.is_behind:
                    gradient.become_unsynced(UnsyncedState.ELSEWHERE)
            self.awaits_reduction = True
            order.note_unsynced(as_expected=self._next_use.follows or not self._gathers_in_backward)
            return
        if self._gathers_in_backward:
            off = self._off_plan or not self._next_use.follows
        else:
            off = self._off_plan or tuple(order.fired) != order.order
            for index in order.order[self._next_in_order :]:
                self.reduce(self._memory.gradients[index], backward)
        is_off = self._reduce_the_rest("end of backward", backward, off or order.at_touch is None)
        self.reducer.finish()
        if not is_off:
            return
        self._agree_on_points()
        for gradient in gradients:
            # Not where ranks use different parameters each time: a gradient that came late on some ranks only would be
            # added up in another order than that of ranks.
            if backward == 1 and not gradient.chunk.is_chosen:
                gradient.expect_what_came()

    def catch_up(self, backward: int) -> None:
        """See `Accumulation`."""
        if self.awaits_reduction:
            self._reduce_the_rest("unsynced gradients", backward)

    def _reduce_the_rest(self, when: str, backward: int, off: bool = False) -> bool:
        """Reduce what is open or unsynced on any rank; whether one of them is `off` its plan. Collective.

        Which parameters have a gradient on any rank travels along, so that `.grad is None` is the same answer on
        all ranks and costs no collective of its own.
        """
        gradients = list(self._memory.gradients.values())
        own = bytearray([off, *(g.is_open or g.unsynced_state is UnsyncedState.HELD for g in gradients)])
        for gradient in gradients:
            own += gradient.got
        words = torch.frombuffer(own, dtype=torch.uint8).to(self._memory.device.device)
        self._communicator.all_reduce_max_(words, when)
        agreed: bytes = words.cpu().numpy().tobytes()
        start = len(gradients) + 1
        for number, gradient in enumerate(gradients):
            end = start + len(gradient.got)
            gradient.agreed[:] = agreed[start:end]
            start = end
            if agreed[number + 1]:
                self.reduce(gradient, backward)
            if gradient.is_behind:
                gradient.become_unsynced(UnsyncedState.NONE)
        self.awaits_reduction = False
        return bool(agreed[0])

    def _agree_on_points(self) -> None:
        order = self._order
        points = [order.last_fire[i] for i in order.chunks]
        both = torch.tensor(points + order.ranking(), dtype=torch.int64, device=self._memory.device.device)
        self._communicator.all_reduce_max_(both, "points of reduction")
        agreed: list[int] = both.tolist()
        order.adopt(agreed[: len(points)], agreed[len(points) :])

    def forget(self, has_zeros: bool) -> None:
        """See `Accumulation`. What one rank alone knows to have had a gradient is agreed on where zeros are needed."""
        self.reducer.forget()
        self._completion.note_all()
        is_behind = any(gradient.is_behind for gradient in self._memory.gradients.values())
        self.awaits_reduction = is_behind or (has_zeros and self.awaits_reduction)
