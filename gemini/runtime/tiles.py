"""What a common gradient does not enter: exchanges in tiles, and sums of gradients under no_sync()."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gemini.memory.transfer import Region, Scratch, Transfer, ready, wait_on_host, wait_on_stream
from gemini.placement.demand import Tier
from gemini.placement.gradient import UnsyncedState
from gemini.placement.needs import across_layout, largest_tile, replica_tile_numel
from gemini.ranks.communicator import Communicator
from gemini.runtime.chunk import Chunk
from gemini.runtime.grad_places import GradPlaces, part_in_group
from gemini.runtime.gradient import ChunkGradient
from gemini.settings import dtype_of
from sharding import Piece, ShardLayout, pieces_within, sum_dtype

# -- Reduces a gradient over ranks tile by tile, where scratch has no room for the whole exchange.
#
# See [Note: Tiles] in placement/needs.py. A tile has the same elements of every rank's shard.


def reduce_in_tiles(
    chunk: Chunk,
    target: Region,
    fill: Callable[[Region, int, int], None],
    layout: ShardLayout,
    *,
    travel: torch.dtype,
    rest: torch.dtype,
    replaces: bool,
    places: GradPlaces,
    scratch: Scratch,
    communicator: Communicator,
) -> None:
    """Set `target` to the mean over ranks if `replaces`, else add the mean to it. Collective.

    target: (optim_numel,), the chunk's reduced gradient. fill: `fill(rows, start, numel)` writes elements
    [start, start + numel) of every rank's shard of this rank's gradient to `rows`, (world_size * numel,), one rank
    after the other. layout: the chunk's, by which they travel. travel, rest: the dtypes of `rows`, and of the mean
    before it comes to `target`.
    """
    world_size, shard_numel = layout.world_size, layout.shard_numel
    facts = dtype_of(travel), dtype_of(rest), chunk.is_stepped_whole, chunk.grad_layout
    tile_numel = largest_tile(*facts, scratch.num_bytes)
    for start in range(0, shard_numel, tile_numel):
        # The last tile, too, has a multiple of `ALIGNMENT` elements, because shards have.
        numel = min(tile_numel, shard_numel - start)
        tile = layout.tile(numel)
        scratch.reset()
        rows = scratch.region(tile.numel, travel)
        fill(rows, start, numel)
        out = scratch.region(numel, rest)
        # The exchange is finished at once, because the next tile uses the same scratch.
        communicator.start_reduce_scatter(rows.flat, tile, out.flat, chunk.index, scratch.allocate)()
        if not chunk.is_stepped_whole:
            places.put(target[start : start + numel], out, replaces)
            continue
        # Every rank steps the whole chunk: gather the tile's means.
        whole = scratch.region(tile.numel, rest)
        communicator.all_gather(whole.flat, out.flat, tile, chunk.index)
        # Row r has the mean of rank r's shard, whose slices of several units lie apart in the payload.
        for rank in range(world_size):
            row = whole[rank * numel : (rank + 1) * numel]
            for piece in pieces_within(layout.slices(rank), start, numel):
                places.put(target[piece.in_payload], row[in_tile(piece, start)], replaces)


def join_replicas(gradient: ChunkGradient, places: GradPlaces, scratch: Scratch, communicator: Communicator) -> None:
    """Set the chunk's reduced gradient to the mean over its replicas, tile by tile. Collective.

    See [Note: One exchange with replicas] in placement/gradient_rules.py.
    """
    chunk, target = gradient.chunk, gradient.reduced()
    summed = sum_dtype(target.dtype)
    most = replica_tile_numel(target.dtype.itemsize, chunk.layout.num_replicas, scratch.num_bytes)
    for start in range(0, target.numel, most):
        part = target[start : start + min(most, target.numel - start)]
        scratch.reset()
        here = part
        if part.tier is not Tier.DEVICE:
            here = scratch.region(part.numel, part.dtype)
            places.transfer.copy(here, part)
        wait_on_stream(here)
        # What is added is garbage afterwards, and the mean of 16 bits is rounded once, from fp32.
        own = here.flat if here.dtype is summed else scratch.allocate(here.numel, summed).copy_(here.flat)
        # The exchange is finished at once, because the next tile uses the same scratch.
        communicator.start_mean_of_replicas(own, here.flat, chunk.index, scratch.allocate)()
        if here is not part:
            places.transfer.copy(part, here)
    gradient.note_mean_of_all()
    # What whole gradients show, and sums that were made of this one, are stale.
    gradient.count_write()


def mean_across(gradient: ChunkGradient, places: GradPlaces, scratch: Scratch, communicator: Communicator) -> None:
    """Have this rank's part of the mean over groups in place of the sum of its group, tile by tile. Collective.

    See [Note: One exchange with replicas] in placement/gradient_rules.py. A tile overwrites elements of this rank's sum
    that have been sent: none lies behind its place among all parts of its group.
    """
    chunk, whole = gradient.chunk, gradient.sum_of_group()
    target, dtype = whole[: chunk.optim_numel], dtype_of(whole.dtype)
    parts = [part_in_group(chunk, group) for group in range(chunk.num_groups)]
    layout = across_layout(chunk.rest_numel, chunk.num_groups)
    most = largest_tile(dtype, dtype, False, layout, scratch.num_bytes)
    for start in range(0, target.numel, most):
        numel = min(most, target.numel - start)
        tile = layout.tile(numel)
        scratch.reset()
        rows, out = scratch.region(tile.numel, whole.dtype), scratch.region(numel, whole.dtype)
        for group, pieces in enumerate(parts):
            row = rows[group * numel : (group + 1) * numel]
            for piece in pieces_within(pieces, start, numel):
                places.transfer.copy(row[in_tile(piece, start)], whole[piece.in_payload])
        wait_on_stream(rows)
        # The exchange is finished at once, because the next tile uses the same scratch.
        communicator.start_mean_across(rows.flat, tile, out.flat, chunk.index, scratch.allocate)()
        places.put(target[start : start + numel], out, replaces=True)
    gradient.note_mean_of_all()
    gradient.count_write()


def fill_from(payload: Tensor, chunk: Chunk) -> Callable[[Region, int, int], None]:
    """The `fill` of `reduce_in_tiles` for a gradient that lies whole in `payload`, (numel,), on the device."""
    layout = chunk.grad_layout
    world_size = layout.world_size

    def fill(rows: Region, start: int, numel: int) -> None:
        by_rank = rows.flat.view(world_size, numel)
        # Every rank's slice of a unit has one size and one place in its shard, so those of rank 0 stand for all.
        for unit, own in zip(layout.units, layout.slices(0), strict=True):
            for piece in pieces_within((own,), start, numel):
                first = piece.payload_start - unit.start
                region = payload[unit.start : unit.start + unit.numel].view(world_size, -1)
                by_rank[:, in_tile(piece, start)].copy_(region[:, first : first + piece.numel])

    return fill


def in_tile(piece: Piece, start: int) -> slice:
    """The piece's elements in a tile that begins with element `start` of the shard."""
    return slice(piece.shard_start - start, piece.shard_start - start + piece.numel)


# -- Gradients under no_sync(): sums of whole, unreduced gradients on the host, and their reduction later.
#
# A sum is made in fp32 (fp64 for fp64 weights): in 16 bits a small gradient would be lost beside a large one. So it
# also travels in fp32, unless the user gave a `reduce_dtype`, and rests in fp32, unless the user gave an
# `accumulate_dtype`. A 16-bit chunk has no memory on the device for its whole gradient in fp32, so it is exchanged in
# tiles that fit into the scratch of ordinary reductions. Ranks agree on all of that, since `ChunkGradient.is_behind`
# follows from the backwards that all ranks run.


def keep_unsynced(gradient: ChunkGradient, backward: int, places: GradPlaces) -> None:
    """Add an open local gradient of backward number `backward` to the chunk's sum on the host. Local."""
    chunk = gradient.chunk
    # The gradient may have been spilled: bring it back into a slot.
    places.open(gradient.index, backward)
    assert gradient.payload is not None
    places.complete(gradient)
    total = gradient.unsynced
    if total is None:
        dtype = torch.float64 if chunk.dtype is torch.float64 else torch.float32
        total = places.memory.allocate(Tier.HOST, chunk.numel, dtype, "unsynced gradients")
        gradient.unsynced = total
    # The host adds, in fp32: the sum never travels to the device before it is reduced. Its memory is kept from step to
    # step: the first gradient of a step overwrites an old sum.
    is_first = gradient.unsynced_state is not UnsyncedState.HELD
    places.sums.put(total, gradient.payload, replaces=is_first)
    if is_first:
        gradient.become_unsynced(UnsyncedState.HELD)
    places.close(gradient.index)


def reduce_unsynced(
    gradient: ChunkGradient,
    layout: ShardLayout,
    backward: int,
    places: GradPlaces,
    scratch: Scratch,
    communicator: Communicator,
) -> None:
    """Reduce the chunk's sums over ranks and merge the mean, tile by tile. Collective. layout: by which they travel."""
    chunk = gradient.chunk
    is_first = places.begin(gradient.index, backward, is_sum=True)
    total = gradient.reduced()
    reduce_in_tiles(
        chunk,
        total,
        partial(_fill, gradient, places.transfer),
        layout,
        travel=chunk.sum_dtype,
        rest=total.dtype,
        replaces=is_first,
        places=places,
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
    for rank in range(chunk.grad_layout.world_size):
        row = rows[rank * numel : (rank + 1) * numel]
        for piece in pieces_within(chunk.grad_layout.slices(rank), start, numel):
            part = gradient.unsynced[piece.in_payload]
            if part.dtype is not rows.dtype:
                part = Region(Tier.HOST, ready(part).to(rows.dtype))
                casts.append(part)
            transfer.copy(row[in_tile(piece, start)], part)
    wait_on_host(*casts)  # the casts are dropped at return
    wait_on_stream(rows)
