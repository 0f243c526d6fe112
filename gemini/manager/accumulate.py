"""Turns the gradients of autograd into one reduced gradient a step. The number of ranks selects one of two ways.

`AccumulateInPlace`: one rank adds gradients in autograd's own order and has nothing to agree on. `AccumulateAndReduce`,
in reduce.py: several ranks reduce every micro-batch at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from gemini.chunks.grad_state import GradState
from gemini.chunks.gradient import ChunkGradient
from gemini.manager.grad_homes import GradHomes
from gemini.manager.grad_memory import GradMemory
from gemini.memory.modes import untracked
from gemini.memory.scratch import Scratch
from gemini.ranks.communicator import Communicator


@dataclass(eq=False, repr=False)
class Accumulation:
    """The interface of both ways to the gradient store. `backward` is the number of a backward within its step."""

    _memory: GradMemory
    _homes: GradHomes
    _scratch: Scratch
    _communicator: Communicator

    knows_all: ClassVar = True  # this rank's gradients are all there are

    def __post_init__(self) -> None:
        self.synchronizes = True  # False inside no_sync()
        self.awaits_reduction = False  # gradients from under no_sync() are left; equal on all ranks
        self._reduced: set[int] = set()  # chunks reduced in this backward, by index: membership only

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """A context in which backwards add gradients up on this rank and reduce none. Local."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            # The old value is restored, since a no_sync() may stand inside another.
            self.synchronizes = before

    def note_placement(self, is_resident: bool) -> None:
        """is_resident: no payload leaves between forward and update."""

    def begin_backward(self) -> None:
        """A backward starts. Local."""
        self._reduced.clear()

    def make_way(self, gradient: ChunkGradient) -> None:
        """Finish any pending reduction that the gradient to be opened would conflict with. Local, except at stage 0."""

    def arrived(self, gradient: ChunkGradient, backward: int) -> None:
        """Some of the chunk's gradients were copied into its payload. Collective if the chunk is reduced now."""

    def due(self) -> Sequence[int]:
        """Chunks, by index, that all ranks reduce before the next fetch in backward. Collective while recording."""
        return ()

    def reduce(self, gradient: ChunkGradient, backward: int) -> None:
        """Reduce a chunk's open gradient (zeros if this rank has none) to the mean over ranks, at home. Collective."""

    def end_backward(self, backward: int) -> None:
        """Reduce every gradient that is open on any rank. Collective."""

    def catch_up(self, backward: int) -> None:
        """Reduce the gradients that backwards under no_sync() have left. Collective if there are any."""

    def end_step(self, has_zeros: bool) -> None:
        """Forget the step's gradients: they were used, discarded or zeroed, or their reduction has failed. Local."""

    def reset_order(self) -> None:
        """Forget which gradients to expect, and when: other chunks are trained. Local."""


class AccumulateInPlace(Accumulation):
    """One rank: its gradient is the mean.

    Where the home is on the device in full precision, gradients are written and added there. Others are opened in a
    slot and merged into the home when they are complete. no_sync() changes no value.
    """

    def arrived(self, gradient: ChunkGradient, backward: int) -> None:
        """See `Accumulation`. Pieces are added in their own dtype first, as by autograd, so they wait for the end."""
        if gradient.chunk.index in self._reduced:
            # A piece came after the chunk was merged in this backward, as reentrant checkpointing does.
            gradient.note_pieces()
        # A gradient at home takes no slot and needs no merge: it comes to rest at the end of the backward.
        elif gradient.num_fired == gradient.expected and gradient.state is GradState.IN_SLOT:
            if not gradient.in_pieces:
                self.reduce(gradient, backward)

    def reduce(self, gradient: ChunkGradient, backward: int) -> None:
        """Merge an open gradient into its home. Local."""
        chunk, memory = gradient.chunk, self._memory
        with untracked():
            self._reduced.add(chunk.index)
            # The gradient may have been spilled: bring it back into a slot.
            memory.open(gradient, backward)
            memory.complete(gradient)
            payload = gradient.payload
            assert payload is not None
            # This orders what is rounded next behind the copies of the last merge out of this memory.
            self._scratch.reset()
            with memory.moving(gradient, self._communicator.position.here, blocks=1):
                # The home's dtype is narrower than the gradient's.
                if chunk.narrows:
                    rounded = self._scratch.region(payload.numel, chunk.gradient_dtype)
                    rounded.flat.copy_(payload.flat)
                    payload = rounded
                self._homes.merge(gradient, payload, backward)
                memory.close(gradient)

    def end_backward(self, backward: int) -> None:
        """See `Accumulation`."""
        for gradient in self._memory.gradients.values():
            # Chunks without a gradient are left alone: on one rank nobody else needs zeros of them.
            if gradient.state is GradState.AT_HOME:
                self._memory.rest_in_place(gradient, backward)
            elif gradient.is_open:
                self.reduce(gradient, backward)
            # `got` counts since the last step: only in the first backward does it tell what one backward brings.
            if backward == 1 and self.synchronizes:
                # Unused parameters must not keep the chunk open, and its slot taken, until the end of later backwards.
                gradient.expect_what_came()
