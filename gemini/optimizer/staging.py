"""Memory that an update needs beside the homes: what rests on one tier is staged on the other, where the update runs.

Pieces are used again from chunk to chunk. Those on the host are kept from step to step. On the device they lie in
memory that the plan has counted and that is idle in a step: buffers of reductions, gradient slots, and on one rank
slots of payloads. So a step allocates only what does not fit there, and that is given back when the step is over.

[Note: Room for an update] An update that finds no memory after the first chunk was updated would leave the model half
updated, on one rank or on all. So `reserve` finds all pieces before ranks agree on the step, for the chunk that needs
the most of each: a rank without memory fails while nobody has changed anything, and the others fail with it. What a
torch optimizer takes and gives back by itself (see [Note: Tiles] in torch_update.py) is only tried: torch's allocator
keeps the memory for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from gemini.manager.step import Step
from gemini.memory.region import Region
from gemini.memory.transfer import ready, wait_on_host
from gemini.placement.demand import Tier
from gemini.placement.scratch import round_to_alignment

Needs = Mapping[tuple[Tier, str], int]
"""Bytes of a piece, by tier and name."""


class Staging:
    """The staging buffers of one optimizer. All of it is local."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self._device = step.params.memory.device
        self._pieces: dict[tuple[Tier, str], Region] = {}  # (bytes,) uint8
        self._idle: list[Region] = []  # parts of the plan's memory on the device that no piece lies in
        self._lent: list[Region] = []  # parts that pieces lie in

    @contextmanager
    def reserved(self, needs: Needs, temporaries: int = 0) -> Iterator[None]:
        """Inside, `buffer` finds pieces of at most these sizes without taking memory. See [Note: Room for an update].

        temporaries: bytes on the device that are free beside the pieces when this begins.
        Raises torch.OutOfMemoryError, and holds nothing on the device then.
        """
        if any(tier is Tier.DEVICE for tier, _ in needs):
            self._idle = list(self._idle_in_step())
        try:
            # The largest piece first: a small one might take the only idle memory that is large enough for it.
            for (tier, name), num_bytes in sorted(needs.items(), key=lambda need: -need[1]):
                self._piece(tier, name, num_bytes)
            if temporaries:
                # The tensor is dropped at once: torch's allocator keeps its memory cached, and the update finds it
                # there.
                torch.empty(temporaries, dtype=torch.uint8, device=self._device.device)
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        for region in self._lent:
            # On the emulated device a read of the piece after its step yields NaN.
            self._device.poison(ready(region))
        self._idle, self._lent = [], []  # no view is left: it would pass for a user's that holds the slot
        # The device's pieces lie in slots and buffers that the next forward and backward use.
        self._pieces = {key: piece for key, piece in self._pieces.items() if piece.tier is Tier.HOST}

    def buffer(self, tier: Tier, name: str, numel: int, dtype: torch.dtype) -> Region:
        """Return (numel,) of `dtype` with undefined content, valid until the next `buffer` of this name on this tier.

        Copies of what was there before may still be under way: wait before the host writes to it.
        """
        num_bytes = numel * dtype.itemsize
        return self._piece(tier, name, num_bytes)[:num_bytes].view(dtype)

    def _piece(self, tier: Tier, name: str, num_bytes: int) -> Region:
        piece = self._pieces.get((tier, name))
        if piece is None or piece.numel < num_bytes:
            if piece is not None and tier is Tier.HOST:
                # Copies from and to the old piece may be under way, and its memory is about to be freed.
                wait_on_host(piece)
            piece = self._borrowed(num_bytes) if tier is Tier.DEVICE else None
            if piece is None:
                device = self._device.device if tier is Tier.DEVICE else "cpu"
                piece = Region(tier, torch.empty(num_bytes, dtype=torch.uint8, device=device))
            self._pieces[tier, name] = piece
        return piece

    def _borrowed(self, num_bytes: int) -> Region | None:
        """A part of the smallest idle memory that has so many bytes."""
        fitting = [region for region in self._idle if region.nbytes >= num_bytes]
        if not fitting:
            return None
        region = min(fitting, key=lambda each: each.nbytes)
        self._idle.remove(region)
        # What is left begins at an aligned byte, because a tensor of any dtype may lie there next.
        self._idle.append(region[round_to_alignment(num_bytes) :])
        self._lent.append(region[:num_bytes])
        return self._lent[-1]

    def _idle_in_step(self) -> Iterator[Region]:
        """The memory on the device that reductions, gradients and payloads do not use in a step.

        On several ranks weights that were updated in parts are gathered into slots of payloads during the update, so
        those are not idle.
        """
        memory, grads = self._step.params.memory, self._step.grads
        scratch = grads.scratch.idle()
        if scratch is not None:
            yield scratch
        yield from memory.gradient_slots.idle()
        # Scratch and gradient slots are idle on any number of ranks: all gradients have been reduced before a step's
        # update.
        if self._step.communicator.world_size == 1:
            yield from memory.slots.idle()
