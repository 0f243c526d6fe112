"""Gradients on their way: from autograd into chunk payloads, reduced over the ranks, merged into their homes.

Local part: `on_gradient` copies a parameter's gradient into its open chunk. Collective part: `reduce` makes the
mean over ranks, at points that all ranks share (see placement/reduction_order.py). At the end of a backward
whatever is open anywhere is reduced, so that every micro-batch is reduced at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.gradient import ChunkGradient, GradState, UnsyncedState
from gemini.executor.arrivals import Arrivals, Waiting
from gemini.executor.completion import Completion
from gemini.executor.grad_memory import GradMemory
from gemini.executor.leftovers import Becomes, Leftovers
from gemini.executor.reduce import GradReducer
from gemini.executor.unsynced import UnsyncedSums
from gemini.placement.reduction_order import ReductionOrder
from gemini.ranks.communicator import Communicator
from gemini.ranks.position import Phase

_GRAD: Any = Tensor.grad
_set_grad = _GRAD.__set__


class GradStore:
    """Gradients of all trainable chunks of one model."""

    def __init__(
        self,
        store: GradMemory,
        exchange: GradReducer,
        communicator: Communicator,
        trainable: Sequence[Chunk],
        position: Callable[[], int],
        predicted: Callable[[], bool],
    ) -> None:
        self.store = store
        self.communicator = communicator
        self.exchange = exchange
        self.unsynced = UnsyncedSums(exchange)
        self.leftovers = Leftovers(exchange, self.unsynced)
        self.arrivals = Arrivals(exchange)
        self.trainable = list(trainable)
        self.position = position  # touches so far in this pass
        self.predicted = predicted  # the pass is as recorded so far
        self.gathers_in_backward = False  # until there is a placement
        self.follows_points = communicator.world_size > 1  # when what arrives decides when all ranks reduce it
        self.reduction = ReductionOrder([chunk.index for chunk in self.trainable])
        self.completion = Completion(store, communicator)
        self.synchronizes = True  # False inside no_sync()
        self.num_backwards = 0  # since the last step
        self.awaits_reduction = False  # backwards under no_sync() have left some gradients; equal on all ranks
        self.has_zeros = False  # zero_grad(set_to_none=False) has left some, and no step has used them
        self.num_forgotten = 0  # how often that count began anew
        self.in_backward = False
        self.is_scaled = False  # the backward that runs came through a loss times the loss scale
        self._reduced: set[int] = set()  # chunks reduced in this backward, by index: membership only
        self._next_in_order = 0
        self._off_plan = False  # something came late or early: record again
        store.finish_reduction = exchange.finish_reduction

    def note_placement(self, is_resident: bool) -> None:
        """is_resident: no payload leaves between forward and update."""
        self.gathers_in_backward = self.exchange.stage == 3 and self.follows_points and not is_resident

    # -- local

    def begin_backward(self) -> None:
        self.collect_late()
        self.in_backward = True
        self.num_backwards += 1
        self.reduction.begin()
        self.completion.begin()
        self._reduced.clear()
        self._next_in_order = 0
        self._off_plan = False

    def end_scaled(self) -> None:
        """The backward that came through a scaled loss is over. Local."""
        self.is_scaled = False

    def on_gradient(self, chunk: Chunk, position: int, grad: Tensor) -> None:
        """Take over a gradient of the chunk, of the parameter at `position`."""
        self._arrived(self.arrivals.take(chunk, position, grad, self.num_backwards))

    def wait(self, chunk: Chunk, waiting: Waiting) -> bool:
        """A gradient of a chunk of many small parameters is in `.grad`, and noted. False if it may not wait there."""
        gradient = self.store.gradients.get(chunk.index)
        if not waiting.due and (gradient is None or not self.arrivals.begin(gradient, self.num_backwards)):
            return False
        longest = self.arrivals.longest()
        if longest is not None:
            self._collect(longest)
        if len(waiting.arrived) >= waiting.due:
            self._collect(chunk.index)
        return True

    def _collect(self, index: int) -> None:
        """Take over the gradients of chunk `index` that wait."""
        gradient = self.store.gradients[index]
        if self.arrivals.collect(gradient, self.num_backwards):
            self._arrived(gradient)

    def collect_all(self) -> None:
        """Take over all gradients that wait: they are about to be read, reduced or discarded. Local."""
        self._collect_begun()
        self.collect_late()

    def _collect_begun(self) -> None:
        for index in self.arrivals.all_waiting():
            self._collect(index)

    def collect_late(self) -> None:
        """Take over gradients that may wait after their backward. Local."""
        self.arrivals.collect_late(self.num_backwards, is_over=not self.in_backward)

    def _arrived(self, gradient: ChunkGradient) -> None:
        index = gradient.chunk.index
        if self.follows_points:
            self.reduction.last_fire[index] = self.position()
            if gradient.num_fired >= gradient.expected:
                self.completion.note(index)
        if index in self._reduced:
            self._off_plan = gradient.in_pieces = True
        elif gradient.num_fired == gradient.expected:
            self.reduction.fired.append(index)
            self._complete(gradient)

    def _complete(self, gradient: ChunkGradient) -> None:
        if gradient.in_place and gradient.state is GradState.AT_HOME:
            return
        if self.communicator.world_size == 1:
            if not gradient.in_pieces:  # which are added up in their own dtype first, as autograd does
                self.reduce(gradient)
        elif self.synchronizes and not self.gathers_in_backward:
            self._reduce_in_order()

    # -- collective

    def _reduce_in_order(self) -> None:
        """Reduce what is complete and whose turn it is. Ranks may be at different operators here."""
        order, position = self.reduction.order, self.communicator.position
        before = position.now
        position.set(0, Phase.BACKWARD)
        while self._next_in_order < len(order):
            gradient = self.store.gradients[order[self._next_in_order]]
            if not gradient.is_open or gradient.num_fired != gradient.expected:
                break
            self.reduce(gradient)
            self._next_in_order += 1
        position.now = before

    def before_touch(self) -> None:
        """A point that all ranks share, if backward gathers parameters: reduce what is due."""
        if not (self.in_backward and self.gathers_in_backward and self.synchronizes):
            return
        if self.predicted() and self.reduction.at_touch is not None:
            for index in self.reduction.at_touch.get(self.position(), ()):
                if index not in self._reduced:
                    self.reduce(self.store.gradients[index])
            return
        for index in self.completion.agree():
            self.reduce(self.store.gradients[index])

    def end_backward(self) -> None:
        """Reduce what is open on any rank, and agree on the points of the next backward. Collective."""
        self._collect_begun()
        self.in_backward = False
        self.arrivals.end_backward()
        gradients = [self.store.gradients[chunk.index] for chunk in self.trainable]
        if not self.synchronizes:
            for gradient in gradients:
                if gradient.is_open:
                    self._keep_unsynced(gradient)
                if self.communicator.world_size > 1 and not gradient.is_behind:
                    gradient.become_unsynced(UnsyncedState.ELSEWHERE)
            self.awaits_reduction = self.communicator.world_size > 1
            self.reduction.note_unsynced(as_expected=self.predicted() or not self.gathers_in_backward)
            return
        if self.communicator.world_size == 1:
            for gradient in gradients:
                if gradient.in_place and gradient.state is GradState.AT_HOME:
                    self.arrivals.settle(gradient, self.num_backwards)
                elif gradient.is_open:
                    self.reduce(gradient)
            self._expect_what_came(gradients)
            return
        if self.gathers_in_backward:
            off = self._off_plan or not self.predicted()
        else:
            off = self._off_plan or tuple(self.reduction.fired) != self.reduction.order
            for index in self.reduction.order[self._next_in_order :]:
                self.reduce(self.store.gradients[index])
        is_off = self._reduce_the_rest("end of backward", off or self.reduction.at_touch is None)
        self.exchange.finish_reduction()
        if is_off:
            self._agree_on_points()
            self._expect_what_came(gradients)

    def _reduce_the_rest(self, when: str, off: bool = False) -> bool:
        """Reduce what is open or unsynced on any rank; whether one of them is `off` its plan. Collective.

        Which parameters have a gradient on any rank travels along, so that `.grad is None` is the same answer on
        all ranks and costs no collective of its own.
        """
        gradients = [self.store.gradients[chunk.index] for chunk in self.trainable]
        own = bytearray([off, *(g.is_open or g.unsynced_state is UnsyncedState.HELD for g in gradients)])
        for gradient in gradients:
            own += gradient.got
        words = torch.frombuffer(own, dtype=torch.uint8).to(self.device)
        self.communicator.all_reduce_max_(words, when)
        agreed: bytes = words.cpu().numpy().tobytes()
        start = len(gradients) + 1
        for number, gradient in enumerate(gradients):
            end = start + len(gradient.got)
            gradient.agreed[:] = agreed[start:end]
            start = end
            if agreed[number + 1]:
                self.reduce(gradient)
            if gradient.is_behind:
                gradient.become_unsynced(UnsyncedState.NONE)
        self.awaits_reduction = False
        return bool(agreed[0])

    def _expect_what_came(self, gradients: list[ChunkGradient]) -> None:
        """A chunk is complete with the gradients it got last time: unused parameters do not keep it open.

        Not where ranks use different ones each time: a gradient that came late on some ranks only would be added up
        in another order than that of ranks.
        """
        if self.num_backwards == 1:
            for gradient in gradients:
                if self.communicator.world_size == 1 or not gradient.chunk.is_chosen:
                    gradient.expected = max(1, sum(gradient.got))

    def _agree_on_points(self) -> None:
        points = [self.reduction.last_fire[i] for i in self.reduction.chunks]
        both = torch.tensor(points + self.reduction.ranking(), dtype=torch.int64, device=self.device)
        self.communicator.all_reduce_max_(both, "points of reduction")
        agreed: list[int] = both.tolist()
        self.reduction.adopt(agreed[: len(points)], agreed[len(points) :])

    def reduce(self, gradient: ChunkGradient) -> None:
        """Mean over ranks of a chunk's open gradient (zeros if this rank has none), into its home. Collective."""
        with torch.inference_mode(False), torch.no_grad():
            self._collect(gradient.chunk.index)
            self.exchange.finish_reduction()
            self._reduced.add(gradient.chunk.index)
            self.completion.end(gradient.chunk.index)
            if gradient.is_behind:
                self.unsynced.reduce(gradient, self.num_backwards)
                return
            if gradient.payload is None:
                self.store.open(gradient)
            self.store.complete(gradient)
            self.exchange.start_reduction(gradient, self.num_backwards)

    def _keep_unsynced(self, gradient: ChunkGradient) -> None:
        """Put an open gradient by, unreduced. One rank has nothing to synchronize: no_sync() changes nothing. Local."""
        if self.communicator.world_size > 1:
            self.unsynced.keep(gradient)
        elif gradient.in_place and gradient.state is GradState.AT_HOME:
            self.arrivals.settle(gradient, self.num_backwards)
        else:
            self.reduce(gradient)

    # -- after

    def catch_up(self) -> None:
        """Before gradients are read or used: do what was put off. Collective, if backwards ran under no_sync()."""
        self.collect_late()
        if self.awaits_reduction:
            self._reduce_the_rest("unsynced gradients")
        if self.has_zeros:
            self.has_zeros = False
            self.leftovers.write_zeros(self.num_backwards)

    def start_at_zero(self, gradient: ChunkGradient, managed: ManagedParameter) -> None:
        """`managed` has a gradient now that no backward made, and that is about to be written. Every rank does it."""
        self.collect_late()
        self.num_backwards = max(self.num_backwards, 1)
        self.leftovers.fill(gradient, self.num_backwards)
        gradient.got[managed.position] = gradient.agreed[managed.position] = 1

    def discard(self, managed: ManagedParameter) -> None:
        """`parameter.grad = None`: what comes later in this step starts from zero."""
        gradient = self.store.gradients.get(managed.chunk.index)
        if gradient is None:
            return
        self.collect_all()
        position = managed.position
        gradient.got[position] = gradient.agreed[position] = 0
        gradient.had[position] = 0
        self.leftovers.clear(gradient, [managed])
        # with several ranks, what this one got says nothing about the others
        if self.communicator.world_size == 1 and not self.leftovers.are_any():
            self.end(Becomes.USED)

    def reset_order(self) -> None:
        """Which gradients are to be expected, and when, is found out anew."""
        self.store.expect_all()
        self.trainable = [gradient.chunk for gradient in self.store.gradients.values()]
        self.reduction = ReductionOrder([chunk.index for chunk in self.trainable])

    def start_anew(self) -> None:
        """After a failed step: no gradient, and no agreement with other ranks on when to reduce which."""
        self.forget()
        with torch._C.DisableTorchFunctionSubclass():
            for chunk in self.trainable:
                for managed in chunk.parameters:  # a backward that was interrupted may have left what no hook took
                    _set_grad(managed.parameter, None)
        for pool in self.store.pools or ():
            pool.empty()
        self.exchange.scratch.renew()
        self.exchange.homes.start_anew()
        self.reset_order()

    def forget(self) -> None:
        """All gradients become None."""
        self.end(Becomes.NONE)

    def end(self, becomes: Becomes, stay: Mapping[int, Sequence[bool]] | None = None) -> None:
        """A step used the gradients, or they are discarded or set to zero; one in flight has failed on the way. Local.

        stay: parameters whose gradients stay, by chunk index, then by position.
        """
        self.exchange.forget()
        if becomes is not Becomes.NONE:
            self.collect_late()
        self.arrivals.drop()
        self.is_scaled = False
        self.num_forgotten += 1
        self.num_backwards = 0
        self.leftovers.end(becomes, stay or {})
        self.completion.note_all()
        self.has_zeros = becomes is Becomes.ZERO
        # what one rank alone knows to have had a gradient is agreed on where the zeros are needed
        behind = any(gradient.is_behind for gradient in self.store.gradients.values())
        self.awaits_reduction = behind or (self.has_zeros and self.awaits_reduction)

    @property
    def device(self) -> torch.device:
        return self.store.device.device
