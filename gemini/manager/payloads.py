"""What a fetch does to both stores: a chunk's payload comes into a slot, and gradients make way for it.

Slots and buffers take their memory at the first use, all together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.chunks.param_state import ParamState
from gemini.manager.grads import GradStore
from gemini.manager.params import ParamStore
from gemini.manager.staying import mark_staying
from gemini.memory.region import Region


class Payloads:
    """The payloads of one model on this rank. It calls both stores, in written order."""

    def __init__(self, chunks: Sequence[Chunk], params: ParamStore, grads: GradStore) -> None:
        self.chunks = list(chunks)
        self.params = params
        self.grads = grads
        self.is_alone = params.communicator.world_size == 1
        self.has_room = False  # slots and buffers have their memory
        self.note_placement()

    def note_placement(self) -> None:
        """Chunks have new homes: find out which payloads never leave."""
        self.params.note_placement()
        self.is_resident = mark_staying(self.chunks)  # no payload leaves between forward and update
        # Where no payload leaves, backward launches no gathers. Fetches are then no points that ranks share for
        # reductions.
        self.grads.accumulation.note_placement(self.is_resident)

    def take_room(self) -> None:
        """Allocate all slots and buffers at the first use, in one go.

        A held slot takes a spare when it is replaced. That spare must not be memory that was planned for another slot.
        """
        if self.has_room:
            return
        self.has_room = True
        # Slots that an evaluation took as inference tensors could not be written to in training.
        with torch.inference_mode(False):
            self.params.slots.fill()
            self.grads.take_memory()

    def miss_room(self) -> None:
        """The plan has other slots and buffers than there are: `take_room` makes them at the next use. Local."""
        self.has_room = False

    def give_room(self) -> None:
        """Free the memory of all slots and buffers between steps, until the next use. Local."""
        self.has_room = False  # first: after an interrupt in here the next use takes what is missing
        self.params.release_all()
        self.params.forget_slots()
        self.params.slots.rest()
        self.grads.rest()

    def fetch(self, chunk: Chunk) -> Tensor:
        """The chunk's payload, (numel,) on the device. Collective where parameters are sharded."""
        # The home holds the gradient, which a fetch would show, or send to other ranks, as weights.
        if chunk.state is ParamState.HOLDS_GRAD:
            self.restore_parameters(chunk)
        if chunk.state is ParamState.RESIDENT:
            self.note_use(chunk)
            assert chunk.payload is not None
            return chunk.payload
        # The touch is recorded first: gradients whose point of reduction it is are due before the fetch.
        self.params.next_use.touch(chunk.index)
        if self.grads.in_backward:
            self.grads.before_touch()
            # `before_touch` may just have reduced this chunk's gradient into its parameter home.
            if chunk.state is ParamState.HOLDS_GRAD:
                self.restore_parameters(chunk)
        # The first use may come outside a forward, as by `weight.norm()` right after wrapping, where no `begin_pass`
        # took room.
        self.take_room()
        return self.params.fetch(chunk)

    def note_use(self, chunk: Chunk) -> None:
        """Note the use of a chunk that never leaves: one rank traces it, as it does the chunks that leave. Local.

        Several ranks do not: they need not use such chunks alike, and traces must be equal.
        """
        if self.is_alone:
            self.params.next_use.touch(chunk.index)

    def open_own_part(self, chunk: Chunk) -> Region:
        """The payload, (numel,) on the device, with only the part that this rank has just updated. Local."""
        self.take_room()
        return self.params.open_own_part(chunk)

    def fetch_ahead(self) -> None:
        """Start to gather what will be used next, as far as slots are free before it is used. Collective."""
        if not self.params.ahead.most:
            return
        for chunk, slot in self.params.slots_ahead():
            # As in `fetch`: the other ranks would gather the gradient in place of the weights.
            if chunk.state is ParamState.HOLDS_GRAD:
                self.restore_parameters(chunk)
            self.params.fetch_ahead(chunk, slot)

    def restore_parameters(self, chunk: Chunk) -> None:
        """Move a gradient out of the home of parameters that are needed before the step. Local."""
        self.grads.homes.move_out(chunk)
