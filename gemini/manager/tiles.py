"""Reduces a gradient over ranks tile by tile, where scratch has no room for the whole exchange.

See [Note: Tiles] in placement/scratch.py. A tile has the same elements of every rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.manager.grad_homes import GradHomes
from gemini.memory.region import Region
from gemini.memory.scratch import Scratch
from gemini.placement.scratch import largest_tile
from gemini.ranks.communicator import Communicator
from gemini.settings import dtype_of
from sharding import Piece, ShardLayout, Unit, pieces_within


def reduce_in_tiles(
    chunk: Chunk,
    target: Region,
    fill: Callable[[Region, int, int], None],
    *,
    travel: torch.dtype,
    rest: torch.dtype,
    replaces: bool,
    homes: GradHomes,
    scratch: Scratch,
    communicator: Communicator,
) -> None:
    """Set `target` to the mean over ranks if `replaces`, else add the mean to it. Collective.

    target: (optim_numel,), the chunk's reduced gradient. fill: `fill(rows, start, numel)` writes elements
    [start, start + numel) of every rank's shard of this rank's gradient to `rows`, (world_size * numel,), one rank
    after the other. travel, rest: the dtypes of `rows`, and of the mean before it comes to `target`.
    """
    world_size, shard_numel = chunk.layout.world_size, chunk.layout.shard_numel
    facts = dtype_of(travel), dtype_of(rest), chunk.is_stepped_whole, world_size
    tile_numel = largest_tile(*facts, scratch.num_bytes)
    for start in range(0, shard_numel, tile_numel):
        # The last tile, too, has a multiple of `ALIGNMENT` elements, because shards have.
        numel = min(tile_numel, shard_numel - start)
        layout = ShardLayout((Unit(0, numel * world_size),), world_size)
        scratch.reset()
        rows = scratch.region(layout.numel, travel)
        fill(rows, start, numel)
        out = scratch.region(numel, rest)
        # The exchange is finished at once, because the next tile uses the same scratch.
        communicator.start_reduce_scatter(rows.flat, layout, out.flat, chunk.index, scratch.allocate)()
        if not chunk.is_stepped_whole:
            homes.put(target[start : start + numel], out, replaces)
            continue
        # Every rank steps the whole chunk: gather the tile's means.
        whole = scratch.region(layout.numel, rest)
        communicator.all_gather(whole.flat, out.flat, layout, chunk.index)
        # Row r has the mean of rank r's shard, whose slices of several units lie apart in the payload.
        for rank in range(world_size):
            row = whole[rank * numel : (rank + 1) * numel]
            for piece in pieces_within(chunk.layout.slices(rank), start, numel):
                homes.put(target[piece.in_payload], row[in_tile(piece, start)], replaces)


def fill_from(payload: Tensor, chunk: Chunk) -> Callable[[Region, int, int], None]:
    """The `fill` of `reduce_in_tiles` for a gradient that lies whole in `payload`, (numel,), on the device."""
    world_size = chunk.layout.world_size

    def fill(rows: Region, start: int, numel: int) -> None:
        by_rank = rows.flat.view(world_size, numel)
        # Every rank's slice of a unit has one size and one place in its shard, so those of rank 0 stand for all.
        for unit, own in zip(chunk.layout.units, chunk.layout.slices(0), strict=True):
            for piece in pieces_within((own,), start, numel):
                first = piece.payload_start - unit.start
                region = payload[unit.start : unit.start + unit.numel].view(world_size, -1)
                by_rank[:, in_tile(piece, start)].copy_(region[:, first : first + piece.numel])

    return fill


def in_tile(piece: Piece, start: int) -> slice:
    """The piece's elements in a tile that begins with element `start` of the shard."""
    return slice(piece.shard_start - start, piece.shard_start - start + piece.numel)
