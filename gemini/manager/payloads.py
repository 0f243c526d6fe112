"""What a fetch is, with all that it does to gradients: a chunk's payload comes into a slot for whoever uses it.

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
        """Homes were given to the chunks: see which stay where they are."""
        self.params.note_placement()
        self.is_resident = mark_staying(self.chunks)  # none leaves between forward and update
        self.grads.accumulation.note_placement(self.is_resident)

    def take_room(self) -> None:
        """Once the model is used: all slots and buffers together, before one that is held takes another's place."""
        if self.has_room:
            return
        self.has_room = True
        with torch.inference_mode(False):
            self.params.pools.fill()
            self.grads.take_memory()

    def give_room(self) -> None:
        """Between steps: the memory of all slots and buffers is free until the next use. Local."""
        self.params.release_all()
        self.params.pools.rest()
        self.grads.rest()
        self.has_room = False

    def fetch(self, chunk: Chunk) -> Tensor:
        """The chunk's payload, (numel,) on the device. Collective where parameters are sharded."""
        if chunk.state is ParamState.HOLDS_GRAD:
            self.restore_parameters(chunk)
        if chunk.state is ParamState.RESIDENT:
            self.note_use(chunk)
            assert chunk.payload is not None
            return chunk.payload
        self.params.next_use.touch(chunk.index)
        if self.grads.in_backward:
            self.grads.before_touch()
            if chunk.state is ParamState.HOLDS_GRAD:  # it was reduced just now
                self.restore_parameters(chunk)
        self.take_room()
        return self.params.fetch(chunk)

    def note_use(self, chunk: Chunk) -> None:
        """A chunk is used where it stays: on one rank a trace has it, too, so that it holds for any placement. Local.

        Other ranks need not use what stays, and what they do use must be equal on all of them.
        """
        if self.is_alone:
            self.params.next_use.touch(chunk.index)

    def open_own_part(self, chunk: Chunk) -> Region:
        """The payload, (numel,) on the device, of which only what this rank has just updated is there. Local."""
        self.take_room()
        return self.params.open_own_part(chunk)

    def fetch_ahead(self) -> None:
        """Start to gather what will be used next, as far as slots are free for it by then. Collective."""
        if not self.params.ahead.most:
            return
        for chunk, slot in self.params.slots_ahead():
            if chunk.state is ParamState.HOLDS_GRAD:
                self.restore_parameters(chunk)
            self.params.fetch_ahead(chunk, slot)

    def restore_parameters(self, chunk: Chunk) -> None:
        """The chunk's parameters are needed before the step: its gradient leaves their home. Local."""
        self.grads.homes.move_out(chunk)
