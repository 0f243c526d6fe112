"""Binds the parameters of a model under construction to payloads, and brings writes to them to the shards.

Random numbers differ between ranks, so only rank 0's writes count: its values are broadcast before they go home.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from gemini.access.released import ReleasedParameter
from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.placeholder import set_data
from gemini.manager.binding import Binding
from gemini.manager.masters import set_weights
from gemini.memory.memory import Memory
from gemini.memory.region import Region
from gemini.memory.transfer import wait_on_tier
from gemini.placement.demand import Kind
from gemini.ranks.communicator import Communicator

_SMALL_BYTES = 2**20  # an operator of at most this size is copied into one payload, to broadcast it at once


class BuildBinding(Binding):
    """The binding of one context.

    Each payload has memory of its own, so a view that the user keeps beyond the chunk's use keeps its values.
    """

    def __init__(self, memory: Memory, communicator: Communicator) -> None:
        # Chunks with a payload -> positions of the parameters whose values are in it. A parameter that is only
        # overwritten gathers nothing, so its neighbours' values may be missing.
        self.valid: dict[Chunk, set[int]] = {}
        super().__init__(self.valid, memory, ReleasedParameter)
        self.communicator = communicator

    def go_over(self, communicator: Communicator) -> None:
        """Use this communicator for what is brought home. Nothing is on its way."""
        self.communicator = communicator

    def show_placeholder(self, managed: ManagedParameter) -> None:
        """Let the parameter show a placeholder.

        The version is raised, so that autograd refuses a backward that would read the placeholder as a saved weight.
        """
        parameter = managed.parameter
        torch.autograd.graph.increment_version(parameter)
        # Assigning `.data` of the released class would fetch the parameter first.
        parameter.__class__ = nn.Parameter
        set_data(parameter, managed.placeholder)
        parameter.__class__ = self.released_class

    def note_left(self, chunk: Chunk) -> None:
        """Record the versions at which the parameters began to show placeholders.

        A higher version later means that the user wrote to a view of the old memory, and that write would be lost.
        """
        # Only `versions()` needs `raw` here: it would keep parameters alive that the user drops.
        chunk.hold_parameters([(managed, managed.parameter) for managed in chunk.parameters])
        self.note_edits_when_left(chunk, chunk.versions())
        chunk.let_parameters_die()

    def take_rank_0s(self, chunk: Chunk, flats: list[Tensor]) -> None:
        """Write rank 0's values of all parameters to the home. Empties `flats`, to free tensors early. Collective."""
        communicator = self.communicator
        # Small operators: one broadcast. Large ones: parameter by parameter, so that no second copy of all is needed.
        if chunk.payload_bytes <= _SMALL_BYTES:
            payload = torch.zeros(chunk.numel, dtype=chunk.dtype, device=communicator.device)
            for managed in chunk.parameters:
                self.show_placeholder(managed)
                payload[managed.in_payload].copy_(flats.pop(0))
            # Ranks have just agreed on what they build, so the broadcasts need no tag.
            communicator.broadcast_(payload, None)
            home = chunk.homes[Kind.PARAM].flat
            for piece in chunk.layout.slices(chunk.rank):
                home[piece.in_shard].copy_(payload[piece.in_payload])
        else:
            for managed in chunk.parameters:
                self.show_placeholder(managed)
                flat = flats.pop(0)
                # On other ranks receive into new memory: the parameter's own may be shared with a tensor of the user's.
                if communicator.rank:
                    del flat
                    flat = torch.empty(managed.numel, dtype=chunk.dtype, device=communicator.device)
                communicator.broadcast_(flat, None)
                set_weights(managed, flat)
        self.note_left(chunk)

    def open(self, chunk: Chunk, payload: Tensor) -> None:
        """Give the chunk a payload without content, and hold its parameters alive until `close`. Local."""
        here = alive(chunk)
        # Register it first: if an interrupt comes in the middle, the chunk is closed with the others.
        self.valid[chunk] = set()
        chunk.hold_parameters(here)
        is_home = payload is chunk.homes[Kind.PARAM].flat
        # What is written to a view of the home is never lost.
        self.renumber_edits(chunk, None if is_home else [each.position for each in chunk.parameters])
        # The user may have dropped parameters since the last use: number the remaining ones.
        for position, each in enumerate(chunk.parameters):
            each.number(position)
        chunk.reside_in(payload)
        if is_home:
            self.fill(chunk)

    def fill(self, chunk: Chunk) -> None:
        """Record that the payload has the values of all parameters."""
        self.valid[chunk] = set(range(len(chunk.parameters)))

    def close(self, chunk: Chunk) -> None:
        """Let the parameters show placeholders and drop the payload, which lives on if the user has a view. Local.

        Works from any state that an interrupt in the middle of `open`, `bind` or this method may have left.
        """
        if chunk.payload is not None:
            if not chunk.bound:
                self.note_versions(chunk)
                chunk.note_bound()
            self.unbind(chunk)
            chunk.bump_versions()
            chunk.end_residence()
        chunk.let_parameters_die()
        self.drop_chunk(chunk)
        self.valid.pop(chunk, None)

    def part_with(self, chunk: Chunk, gone: Collection[ManagedParameter]) -> None:
        """Remove parameters from the chunk, which has no edits. Local; may be interrupted and called again."""
        # Positions change, so close the chunk and open it again with the same payload.
        payload, is_full = chunk.payload, len(self.valid.get(chunk, ())) == len(chunk.raw)
        if payload is not None:
            self.close(chunk)
        chunk.drop_parameters(gone)
        if payload is not None and is_full and chunk.parameters:
            self.open(chunk, payload)
            self.fill(chunk)

    def write_parameter(self, managed: ManagedParameter, payload: Region) -> None:
        """Bring rank 0's edits to all ranks and to the shards. Collective.

        A write that failed half way left the values invalid, and is ignored.
        """
        if managed.position in self.valid[managed.chunk]:
            self.communicator.broadcast_(payload.flat[managed.in_payload], f"values of {managed.name}")
            self.write_home(managed, payload)

    def write_home(self, managed: ManagedParameter, payload: Region) -> None:
        super().write_home(managed, payload)
        # The home is freed when the user drops its parameters, which may be before the copy has ended.
        wait_on_tier(managed.chunk.homes[Kind.PARAM])


def alive(chunk: Chunk) -> list[tuple[ManagedParameter, nn.Parameter]]:
    """The parameters of a chunk that still exist: the user may drop some while the model is built."""
    return [(each, parameter) for each in chunk.parameters if (parameter := each.reference()) is not None]
