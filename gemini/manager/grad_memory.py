"""The memory of gradients: open payloads in gradient slots, reduced shards at home, unreduced sums on the host.

A chunk's gradient is *open* from its first to its last local gradient. Then it is reduced and merged into its home. An
open payload that must make room is spilled to the host unreduced, by this rank alone, and comes back when it is needed.
Where this rank holds the whole gradient on the device anyway, gradients are written to the home directly. A gradient
without a home of its own rests in its chunk's parameter home, see grad_homes.py.
"""

from __future__ import annotations

from collections.abc import Callable

from gemini.chunks.chunk import Chunk
from gemini.chunks.grad_state import Content, GradState, ReducedState, UnsyncedState
from gemini.chunks.gradient import ChunkGradient
from gemini.errors import BudgetError
from gemini.memory.memory import Memory
from gemini.memory.slot import Slot
from gemini.memory.transfer import wait_on_stream
from gemini.observe import Moving, Observer
from gemini.placement.demand import Kind, Tier


class GradMemory:
    """The gradient slots, and the memory behind every `ChunkGradient`."""

    def __init__(self, memory: Memory, observer: Observer, keeps_whole: bool) -> None:
        """keeps_whole: this rank keeps whole gradients, and GRAD homes have room for whole payloads."""
        self.memory = memory
        self.observer = observer
        self.gradients: dict[int, ChunkGradient] = {}  # by chunk index
        self.pools = memory.gradient_slots
        self._keeps_whole = keeps_whole
        self.peak_open = 0
        self._num_open = 0  # in a slot or spilled, and not being reduced
        self._num_by_size = [0, 0]  # trainable chunks with regular slots, and with larger ones

    def add(self, chunk: Chunk) -> None:
        """Give a trainable chunk a gradient, without memory so far."""
        self.gradients[chunk.index] = ChunkGradient(chunk, self._keeps_whole)
        self._num_by_size[chunk.oversize] += 1

    def give_back(self) -> None:
        """Between steps: give back slots and the memory beside the homes. No chunk has a gradient any more."""
        self.pools.close()
        for gradient in self.gradients.values():
            # A home that a gradient took when its parameter home could not be lent. `Migration` gives planned homes
            # back.
            late = None if Kind.GRAD in gradient.chunk.homes else gradient.home
            wide = None if gradient.wide_is_planned else gradient.wide
            spares = (wide, Kind.GRAD), (late, Kind.GRAD), (gradient.unsynced, "unsynced gradients")
            for spare, kind in spares:
                if spare is not None:
                    self.memory.free(spare, kind)
            gradient.drop_sums()
        self.gradients.clear()
        self._num_by_size = [0, 0]

    def lacks_slot(self, gradient: ChunkGradient) -> bool:
        """Whether the gradient can only be opened in a slot, and none is free."""
        if gradient.state is GradState.CLOSED and gradient.whole is not None and self._may_write_home(gradient):
            return False
        return self.pools[gradient.chunk.oversize].first_free() is None

    def is_in_nobodys_way(self, gradient: ChunkGradient) -> bool:
        """Whether the gradient may stay open for any time: no other gradient lacks a slot because of it."""
        if gradient.state is GradState.AT_HOME:
            return True
        if gradient.state is GradState.CLOSED and gradient.whole is not None and self._may_write_home(gradient):
            return True
        # With as many slots as chunks of this size each gradient can be open at once.
        oversize = gradient.chunk.oversize
        return self.pools[oversize].count >= self._num_by_size[oversize]

    def open(self, gradient: ChunkGradient, backward: int, zero: bool = False) -> None:
        """Make the payload writable: the home if it may be written, else a slot, filled from a spill if there is one.

        backward: the number of the backward that opens it. zero: fill it with zeros, unless gradients stay in the home.
        """
        if gradient.payload is not None:
            return
        if gradient.state is GradState.SPILLED:
            self._unspill(gradient)
            return
        slot, payload, content = None, gradient.whole, Content.UNDEFINED
        if payload is None or not self._may_write_home(gradient):
            slot = self._slot_for(gradient)
            payload = gradient.chunk.payload_in(slot)
            # One rank continues the sum so far, in autograd's order of additions.
            if gradient.resumes(backward):
                self.memory.transfer.copy(payload, gradient.shard)
                content = Content.SUM
        # One rank, second micro-batch: autograd's gradients are added to the sum that is in the home.
        elif gradient.in_place and gradient.is_reduced:
            content = Content.SUM
        # The end of the last step has filled an attached home with negative zeros.
        elif gradient.attached is not None:
            content = Content.ZERO
        # The slot's last content may still be on its way to the host, or this one's on its way to the slot.
        wait_on_stream(payload)
        if zero and content is Content.UNDEFINED and not gradient.in_place:
            payload.flat.zero_()
            content = Content.ZERO
        if slot is None:
            gradient.become(GradState.AT_HOME, content=content)
            return
        gradient.become(GradState.IN_SLOT, slot, content)
        self._num_open += 1
        self.peak_open = max(self.peak_open, self._num_open)

    def complete(self, gradient: ChunkGradient) -> None:
        """Zero what no gradient was written to, paddings and unused parameters, before the payload is read whole."""
        if gradient.content is not Content.UNDEFINED or gradient.payload is None:
            return
        for start, end in gradient.gaps:
            gradient.payload.flat[start:end].zero_()
        if gradient.num_fired < len(gradient.fired):
            _zero_unwritten(gradient)

    def _may_write_home(self, gradient: ChunkGradient) -> bool:
        """Whether gradients may go to the home: nothing was reduced into it, or one rank adds in full precision."""
        is_first = gradient.reduced_state is ReducedState.NONE
        return is_first or (gradient.in_place and gradient.chunk.dtype.itemsize >= 4)

    def begin_reduction(self, gradient: ChunkGradient) -> None:
        """The payload goes to the other ranks and is not open any more."""
        self._num_open -= gradient.slot is not None
        gradient.become(GradState.REDUCING)

    def rest_in_place(self, gradient: ChunkGradient, backward: int) -> None:
        """Close a gradient that was written to its home. Elements that got no gradient become zero."""
        # In a later backward of the step, elements without a gradient keep the sum so far. Paddings have held zeros, of
        # either sign, since the home was made.
        if gradient.reduced_state is ReducedState.NONE:
            gradient.become_reduced(ReducedState.IN_SHARD, backward)
            if gradient.num_fired < len(gradient.fired):
                _zero_unwritten(gradient, are_left=gradient.content is Content.ZERO)
        self.close(gradient)

    def close(self, gradient: ChunkGradient) -> None:
        """Free the payload's slot, or its spilled memory: the content is not needed any more."""
        # A gradient that is being reduced was subtracted when its reduction began.
        self._num_open -= gradient.state in (GradState.IN_SLOT, GradState.SPILLED)
        if gradient.slot is not None:
            self.pools[gradient.chunk.oversize].vacate(gradient.slot)
        spilled = gradient.spilled
        # Closed before the memory is given: an interrupted `close` must not give it back twice.
        gradient.become(GradState.CLOSED)
        if spilled is not None:
            self.memory.free(spilled, "spilled gradients")

    def _slot_for(self, gradient: ChunkGradient) -> Slot:
        """Take a slot for the gradient; spill another gradient if none is free."""
        pool = self.pools[gradient.chunk.oversize]
        slot = pool.first_free()
        if slot is None:
            # Spill complete gradients first: they only wait to be reduced. Among incomplete ones spill the earliest
            # chunk of the model: backward reaches it last.
            # None of these is being reduced, and could not be spilled then: `make_way` has finished a reduction that
            # held the last slot.
            holders = [self.gradients[slot.chunk] for slot in pool.slots if slot.chunk is not None]
            slot = self._spill(max(holders, key=lambda g: (g.num_fired == g.expected, -g.chunk.index)), gradient)
        slot.occupy(gradient.chunk.index)
        return slot

    def _spill(self, victim: ChunkGradient, wanted: ChunkGradient) -> Slot:
        """Move an open payload to the host, unreduced: `wanted` needs its slot. Local: other ranks may not spill."""
        assert victim.slot is not None and victim.payload is not None
        try:
            # This is staging memory, which is never registered with the driver: in a backward registering could wait
            # for a collective that waits for this rank.
            spilled = self.memory.allocate(Tier.HOST, victim.chunk.numel, victim.chunk.dtype, "spilled gradients")
        except BudgetError as error:
            raise error.reworded(
                f"no gradient slot is free and the host cannot take an open gradient of chunk {victim.chunk.index} "
                f"({victim.chunk.names()}): {error}"
            ) from None
        # The victim keeps its flags: it is still open, and is merged or reduced after it has come back.
        index, ends = victim.chunk.index, ("gradient slot", Tier.HOST)
        why = f"room for the gradient of chunk {wanted.chunk.index}"
        with self.observer.moving("spill", index, *ends, spilled.nbytes, why):
            self.memory.transfer.copy(spilled, victim.payload)
        slot = victim.slot
        victim.become(GradState.SPILLED, spilled)
        self.pools[victim.chunk.oversize].vacate(slot)
        return slot

    def _unspill(self, gradient: ChunkGradient) -> None:
        """Bring a spilled payload back into a slot."""
        slot, spilled = self._slot_for(gradient), gradient.spilled
        assert spilled is not None
        payload = gradient.chunk.payload_in(slot)
        index, ends = gradient.chunk.index, (Tier.HOST, "gradient slot")
        with self.observer.moving("unspill", index, *ends, spilled.nbytes, "gradients of it, or its reduction"):
            self.memory.transfer.copy(payload, spilled)
        gradient.become(GradState.IN_SLOT, slot)
        # Freeing makes the host wait for the copy. The memory could otherwise be given to another spill that overwrites
        # it.
        self.memory.free(spilled, "spilled gradients")
        wait_on_stream(payload)

    def discard(self, gradient: ChunkGradient) -> None:
        """Drop a gradient that the step consumed, or that was discarded. The caller writes its flags."""
        if gradient.state is not GradState.CLOSED:
            self.close(gradient)
        if gradient.is_reduced:
            gradient.become_reduced(ReducedState.NONE)
        if gradient.is_behind:
            gradient.become_unsynced(UnsyncedState.NONE)

    def moving(self, gradient: ChunkGradient, where: Callable[[], str], blocks: int) -> Moving:
        """Observe the reduction of the gradient, which takes `blocks` blocks of code."""
        chunk, home = gradient.chunk, gradient.resting.tier
        ends = home if gradient.slot is None else "gradient slot", home
        return self.observer.moving("reduce", chunk.index, *ends, chunk.payload_bytes, where, blocks)


def _zero_unwritten(gradient: ChunkGradient, are_left: bool = False) -> None:
    """Zero the views of the open payload to which no gradient was written.

    are_left: only those of parameters that zero_grad(set_to_none=False) has left zeros; the others stay blank.
    """
    for fired, got, view in zip(gradient.fired, gradient.got, gradient.views, strict=True):
        if not fired and (got or not are_left):
            view.zero_()
