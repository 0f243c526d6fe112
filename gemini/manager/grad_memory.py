"""The memory of gradients: open payloads in gradient slots, reduced shards at home, unreduced ones on the host.

A chunk's gradient is *open* from its first to its last local gradient; then it is reduced and merged into its
home. An open payload that must make room moves to the host as it is, by this rank alone, and comes back when it is
needed. Where this rank holds the whole gradient on the device anyway, gradients are written to the home directly.
A gradient without a home of its own rests in its chunk's parameter home, see grad_homes.py.
"""

from __future__ import annotations

from collections.abc import Callable

from gemini.chunks.chunk import Chunk
from gemini.chunks.gradient import ChunkGradient, Content, GradState, ReducedState, UnsyncedState
from gemini.errors import BudgetError
from gemini.memory.memory import Memory
from gemini.memory.slot import Slot
from gemini.memory.transfer import wait_on_stream
from gemini.observe import Moving, Observer
from gemini.placement.demand import Kind, Tier


class GradMemory:
    """Gradient slots and the memory behind every `ChunkGradient`."""

    def __init__(self, memory: Memory, observer: Observer, keeps_whole: bool) -> None:
        """keeps_whole: this rank has whole gradients, and GRAD homes have room for whole payloads."""
        self.memory = memory
        self.observer = observer
        self.gradients: dict[int, ChunkGradient] = {}  # by chunk index
        self.pools = memory.gradient_slots
        self._keeps_whole = keeps_whole
        self.peak_open = 0
        self._num_open = 0  # in a slot or spilled, and not on the way to the other ranks
        self._num_by_size = [0, 0]  # gradients of chunks for the regular slots and for those of the second size

    def add(self, chunk: Chunk) -> None:
        """A trainable chunk has a gradient from now on."""
        self.gradients[chunk.index] = ChunkGradient(chunk, self._keeps_whole)
        self._num_by_size[chunk.oversize] += 1

    def give_back(self) -> None:
        """Between steps: no chunk has a gradient any more. Slots and what was taken beside the homes are given back."""
        self.pools.close()
        for gradient in self.gradients.values():
            late = None if Kind.GRAD in gradient.chunk.homes else gradient.home  # of one that began without a home
            wide = None if gradient.wide_is_planned else gradient.wide
            spares = (wide, Kind.GRAD), (late, Kind.GRAD), (gradient.unsynced, "unsynced gradients")
            for spare, kind in spares:
                if spare is not None:
                    self.memory.give(spare, kind)
            gradient.wide = gradient.unsynced = None
        self.gradients.clear()
        self._num_by_size = [0, 0]

    def lacks_slot(self, gradient: ChunkGradient) -> bool:
        """The gradient can only be opened in a slot, and none is free."""
        if gradient.state is GradState.CLOSED and gradient.whole is not None and self._may_write_home(gradient):
            return False
        return self.pools[gradient.chunk.oversize].free() is None

    def is_in_nobodys_way(self, gradient: ChunkGradient) -> bool:
        """However long it is open, no other gradient lacks a slot because of it."""
        if gradient.state is GradState.AT_HOME:
            return True
        if gradient.state is GradState.CLOSED and gradient.whole is not None and self._may_write_home(gradient):
            return True
        oversize = gradient.chunk.oversize
        return self.pools[oversize].count >= self._num_by_size[oversize]

    def open(self, gradient: ChunkGradient, backward: int, zero: bool = False) -> None:
        """Make the payload writable: the whole home where that is free, else a slot, filled from a spill if any.

        backward: the number of the one that opens it. zero: fill it with zeros, but for a home in which gradients stay.
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
            if gradient.resumes(backward):
                self.memory.transfer.copy(payload, gradient.shard)
                content = Content.SUM
        elif gradient.in_place and gradient.is_reduced:
            content = Content.SUM
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
        """Zeros where no gradient was written since the payload was opened: paddings and unused parameters."""
        if gradient.content is not Content.UNDEFINED or gradient.payload is None:
            return
        for start, end in gradient.gaps:
            gradient.payload.flat[start:end].zero_()
        if gradient.num_fired < len(gradient.fired):
            _zero_unwritten(gradient)

    def _may_write_home(self, gradient: ChunkGradient) -> bool:
        """Before anything was reduced into it; or to add to it, if one rank does that in full precision."""
        is_first = gradient.reduced_state is ReducedState.NONE
        return is_first or (gradient.in_place and gradient.chunk.dtype.itemsize >= 4)

    def leave(self, gradient: ChunkGradient) -> None:
        """The payload goes to the other ranks: it is not open any more."""
        self._num_open -= gradient.slot is not None
        gradient.become(GradState.REDUCING)

    def rest_in_place(self, gradient: ChunkGradient, backward: int) -> None:
        """A gradient that was written to its home is at rest. What no gradient wrote to becomes zero."""
        if gradient.reduced_state is ReducedState.NONE:
            gradient.become_reduced(ReducedState.IN_SHARD, backward)
            if gradient.num_fired < len(gradient.fired):
                _zero_unwritten(gradient)
        self.close(gradient)

    def close(self, gradient: ChunkGradient) -> None:
        """The payload's content is not needed any more."""
        self._num_open -= gradient.state in (GradState.IN_SLOT, GradState.SPILLED)
        if gradient.slot is not None:
            self.pools[gradient.chunk.oversize].vacate(gradient.slot)
        spilled = gradient.spilled
        gradient.become(GradState.CLOSED)  # first: an interrupted close must not give this memory back twice
        if spilled is not None:
            self.memory.give(spilled, "spilled gradients")

    def _slot_for(self, gradient: ChunkGradient) -> Slot:
        """A slot, which is the chunk's from now on."""
        pool = self.pools[gradient.chunk.oversize]
        slot = pool.free()
        if slot is None:
            # Complete ones only wait to be reduced. Of the others, backward reaches the first of the model last.
            holders = [self.gradients[slot.chunk] for slot in pool.slots if slot.chunk is not None]
            slot = self._spill(max(holders, key=lambda g: (g.num_fired == g.expected, -g.chunk.index)), gradient)
        slot.chunk = gradient.chunk.index
        return slot

    def _spill(self, victim: ChunkGradient, wanted: ChunkGradient) -> Slot:
        """Move an open payload to the host, unreduced: `wanted` needs its slot. Local to this rank: no collective."""
        assert victim.slot is not None and victim.payload is not None
        try:
            spilled = self.memory.take(Tier.HOST, victim.chunk.numel, victim.chunk.dtype, "spilled gradients")
        except BudgetError as error:
            raise error.reworded(
                f"no gradient slot is free and the host cannot take an open gradient of chunk {victim.chunk.index} "
                f"({victim.chunk.names()}): {error}"
            ) from None
        index, ends = victim.chunk.index, ("gradient slot", Tier.HOST)
        why = f"room for the gradient of chunk {wanted.chunk.index}"
        with self.observer.moving("spill", index, *ends, spilled.nbytes, why):
            self.memory.transfer.copy(spilled, victim.payload)
        slot = victim.slot
        victim.become(GradState.SPILLED, spilled)
        self.pools[victim.chunk.oversize].vacate(slot)
        return slot

    def _unspill(self, gradient: ChunkGradient) -> None:
        """Bring an open payload back from the host."""
        slot, spilled = self._slot_for(gradient), gradient.spilled
        assert spilled is not None
        payload = gradient.chunk.payload_in(slot)
        index, ends = gradient.chunk.index, (Tier.HOST, "gradient slot")
        with self.observer.moving("unspill", index, *ends, spilled.nbytes, "gradients of it, or its reduction"):
            self.memory.transfer.copy(payload, spilled)
        gradient.become(GradState.IN_SLOT, slot)
        self.memory.give(spilled, "spilled gradients")
        wait_on_stream(payload)

    def forget(self, gradient: ChunkGradient) -> None:
        """The step consumed the gradient, or it was discarded. Its flags are written by the caller."""
        if gradient.state is not GradState.CLOSED:
            self.close(gradient)
        if gradient.is_reduced:
            gradient.become_reduced(ReducedState.NONE)
        if gradient.is_behind:
            gradient.become_unsynced(UnsyncedState.NONE)

    def moving(self, gradient: ChunkGradient, where: Callable[[], str], blocks: int) -> Moving:
        """Observes the reduction of the gradient, which takes `blocks` blocks of code."""
        chunk, home = gradient.chunk, gradient.resting.tier
        ends = home if gradient.slot is None else "gradient slot", home
        return self.observer.moving("reduce", chunk.index, *ends, chunk.payload_bytes, where, blocks)


def _zero_unwritten(gradient: ChunkGradient) -> None:
    """Views of the open payload that no gradient was written to <- 0."""
    for fired, view in zip(gradient.fired, gradient.views, strict=True):
        if not fired:
            view.zero_()
