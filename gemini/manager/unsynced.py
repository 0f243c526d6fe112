"""Gradients under no_sync(): sums of whole, unreduced gradients on the host, and their reduction later.

A sum is made in fp32 (fp64 for fp64 weights): in 16 bits a small gradient would be lost beside a large one. So it also
travels in fp32, unless the user gave a `reduce_dtype`, and rests in fp32, unless the user gave an `accumulate_dtype`. A
16-bit chunk has no memory on the device for its whole gradient in fp32, so it is exchanged in tiles that fit into the
scratch of ordinary reductions. Ranks agree on all of that, since `ChunkGradient.is_behind` follows from the backwards
that all ranks run.
"""

from __future__ import annotations

from functools import partial

import torch

from gemini.chunks.grad_state import UnsyncedState
from gemini.chunks.gradient import ChunkGradient
from gemini.manager.grad_homes import GradHomes
from gemini.manager.grad_memory import GradMemory
from gemini.manager.tiles import in_tile, reduce_in_tiles
from gemini.memory.region import Region
from gemini.memory.scratch import Scratch
from gemini.memory.transfer import Transfer, ready, wait_on_host, wait_on_stream
from gemini.placement.demand import Tier
from gemini.ranks.communicator import Communicator
from sharding import pieces_within


def keep_unsynced(gradient: ChunkGradient, backward: int, memory: GradMemory) -> None:
    """Add an open local gradient of backward number `backward` to the chunk's sum on the host. Local."""
    chunk, all_memory = gradient.chunk, memory.memory
    # The gradient may have been spilled: bring it back into a slot.
    memory.open(gradient, backward)
    assert gradient.payload is not None
    memory.complete(gradient)
    # The host adds, in fp32: the sum never travels to the device before it is reduced.
    local = Region(Tier.HOST, torch.empty(chunk.numel, dtype=chunk.dtype, device="cpu"))
    all_memory.transfer.copy(local, gradient.payload)
    total = gradient.unsynced
    if total is None:
        dtype = torch.float64 if chunk.dtype is torch.float64 else torch.float32
        total = all_memory.allocate(Tier.HOST, chunk.numel, dtype, "unsynced gradients")
        gradient.add_unsynced(total)
    if gradient.unsynced_state is UnsyncedState.HELD:
        ready(total).add_(ready(local))
    else:
        # The memory is kept from step to step: the first gradient of a step overwrites an old sum.
        ready(total).copy_(ready(local))
        gradient.become_unsynced(UnsyncedState.HELD)
    memory.close(gradient)


def reduce_unsynced(
    gradient: ChunkGradient, backward: int, homes: GradHomes, scratch: Scratch, communicator: Communicator
) -> None:
    """Reduce the chunk's sums over ranks and merge the mean, tile by tile. Collective."""
    chunk = gradient.chunk
    is_first = homes.begin(gradient, backward, is_sum=True)
    total = gradient.reduced()
    reduce_in_tiles(
        chunk,
        total,
        partial(_fill, gradient, homes.transfer),
        travel=chunk.sum_dtype,
        rest=total.dtype,
        replaces=is_first,
        homes=homes,
        scratch=scratch,
        communicator=communicator,
    )
    gradient.become_unsynced(UnsyncedState.NONE)


def _fill(gradient: ChunkGradient, transfer: Transfer, rows: Region, start: int, numel: int) -> None:
    """Fill `rows`, (world_size * numel,), with elements [start, start + numel) of every rank's shard of the sum."""
    if gradient.unsynced_state is not UnsyncedState.HELD:
        # Only other ranks have unsynced gradients of this chunk.
        rows.flat.zero_()
        return
    assert gradient.unsynced is not None
    chunk = gradient.chunk
    casts: list[Region] = []
    for rank in range(chunk.layout.world_size):
        row = rows[rank * numel : (rank + 1) * numel]
        for piece in pieces_within(chunk.layout.slices(rank), start, numel):
            part = gradient.unsynced[piece.in_payload]
            if part.dtype is not rows.dtype:
                part = Region(Tier.HOST, part.flat.to(rows.dtype))
                casts.append(part)
            transfer.copy(row[in_tile(piece, start)], part)
    wait_on_host(*casts)  # the casts are dropped at return
    wait_on_stream(rows)
