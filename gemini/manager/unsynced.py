"""Gradients under no_sync(): sums of whole, unreduced gradients on the host, and their reduction later.

A sum is made in fp32 (fp64 for fp64 weights): in 16 bits a small gradient would be lost beside a large one. So it also
travels in fp32, unless the user gave a `reduce_dtype`, and rests in fp32, unless the user gave an `accumulate_dtype`. A
16-bit chunk has no memory on the device for its whole gradient in fp32, so it is exchanged in tiles that fit into the
scratch of ordinary reductions. Ranks agree on all of that, since `ChunkGradient.is_behind` follows from the backwards
that all ranks run.
"""

from __future__ import annotations

import torch

from gemini.chunks.chunk import Chunk
from gemini.chunks.grad_state import UnsyncedState
from gemini.chunks.gradient import ChunkGradient
from gemini.manager.grad_homes import GradHomes
from gemini.manager.grad_memory import GradMemory
from gemini.memory.region import Region
from gemini.memory.scratch import Scratch
from gemini.memory.transfer import Transfer, ready, wait_on_host, wait_on_stream
from gemini.placement.demand import Tier
from gemini.placement.scratch import tile_bytes
from gemini.ranks.communicator import Communicator
from gemini.settings import dtype_of
from sharding import ALIGNMENT, Piece, ShardLayout, Unit, pieces_within


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
    chunk, world_size = gradient.chunk, gradient.chunk.layout.world_size
    is_first = homes.begin(gradient, backward, is_sum=True)
    total = gradient.reduced()
    shard_numel = chunk.layout.shard_numel
    # Shards and tiles have a multiple of `ALIGNMENT` elements, as a `ShardLayout` demands, and so has the last tile.
    tile_numel = _largest_tile(chunk, total.dtype, scratch.num_bytes)
    for start in range(0, shard_numel, tile_numel):
        numel = min(tile_numel, shard_numel - start)
        # A tile has the same elements of every rank's shard: a small chunk of one unit.
        layout = ShardLayout((Unit(0, numel * world_size),), world_size)
        scratch.reset()
        rows = scratch.region(layout.numel, chunk.sum_dtype)
        _fill(rows, gradient, start, numel, homes.transfer)
        out = scratch.region(numel, total.dtype)
        # The exchange is finished at once, because the next tile uses the same scratch.
        communicator.start_reduce_scatter(rows.flat, layout, out.flat, chunk.index, scratch.allocate)()
        if not chunk.is_stepped_whole:
            homes.put(total[start : start + numel], out, is_first)
            continue
        # Every rank steps the whole chunk: gather the tile's means.
        whole = scratch.region(layout.numel, total.dtype)
        communicator.all_gather(whole.flat, out.flat, layout, chunk.index)
        # Row r has the mean of rank r's shard, whose slices of several units lie apart in the payload.
        for rank in range(world_size):
            row = whole[rank * numel : (rank + 1) * numel]
            for piece in pieces_within(chunk.layout.slices(rank), start, numel):
                homes.put(total[piece.in_payload], row[_in_tile(piece, start)], is_first)
    gradient.become_unsynced(UnsyncedState.NONE)


def _fill(rows: Region, gradient: ChunkGradient, start: int, numel: int, transfer: Transfer) -> None:
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
            transfer.copy(row[_in_tile(piece, start)], part)
    wait_on_host(*casts)  # the casts are dropped at return
    wait_on_stream(rows)


def _largest_tile(chunk: Chunk, rest: torch.dtype, num_bytes: int) -> int:
    """The most elements of every rank's shard that can be exchanged at once with scratch of `num_bytes`."""
    facts = dtype_of(chunk.sum_dtype), dtype_of(rest), chunk.is_stepped_whole, chunk.layout.world_size
    # Bytes grow linearly with the tile, in steps of `ALIGNMENT` elements.
    smallest, next_one = (tile_bytes(*facts, tiles * ALIGNMENT) for tiles in (1, 2))
    return (1 + (num_bytes - smallest) // (next_one - smallest)) * ALIGNMENT


def _in_tile(piece: Piece, start: int) -> slice:
    """The piece's elements in a tile that begins with shard element `start`."""
    return slice(piece.shard_start - start, piece.shard_start - start + piece.numel)
