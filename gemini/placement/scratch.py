"""Scratch: device memory for the temporaries of one reduction, reused by the next. Bytes only.

[Note: Tiles] A reduction sends the payload and receives as much from the other ranks, which is then added up: it takes
the memory of a second payload. Of a chunk of the chosen size that is little. Of one weight that is larger than a chunk,
such as the stacked experts of a mixture, it may be more than a device has left. Where no placement fits otherwise, such
payloads are exchanged in tiles: as many elements of every rank's shard at a time as scratch of `TILED_BYTES` has room
for. A sum is made element by element, so tiles change no bit. But each tile is a collective that waits for the one
before it, so that none of them runs beside the backward: exchanges at once are preferred wherever they fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.placement.chunk_facts import ChunkFacts
from gemini.placement.dtypes import FLOAT32, Dtype
from sharding import ALIGNMENT, SUM_TILE_NUMEL

TILED_BYTES = 512 * 2**20
"""Scratch that tiles have at least. About half of it is received: of 512 ranks half a MiB each, so that a tile takes
much longer than its launch."""

_ALIGNMENT_BYTES = 256


def round_to_alignment(num_bytes: int) -> int:
    """The bytes that a scratch tensor of `num_bytes` occupies."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def scratch_bytes(trainable: Sequence[ChunkFacts], stage: int, world_size: int) -> int:
    """The scratch bytes of the largest reduction of these chunks, each reduced at once."""
    if world_size == 1:
        return max((_rounding_bytes(chunk) for chunk in trainable), default=0)
    return max((_reduction_bytes(chunk, stage) for chunk in trainable), default=0)


def tiled_scratch_bytes(trainable: Sequence[ChunkFacts], stage: int, world_size: int) -> int:
    """The scratch bytes of the largest reduction if weights larger than a chunk are reduced in tiles.

    Other chunks are reduced at once: the chunk size bounds what they need.
    """
    if world_size == 1:
        return scratch_bytes(trainable, stage, world_size)
    return max((_tiled_bytes(chunk, stage) for chunk in trainable), default=0)


def tile_bytes(travel: Dtype, rest: Dtype, rests_whole: bool, world_size: int, numel: int) -> int:
    """The scratch bytes to exchange `numel` elements of every rank's shard as a tile.

    They hold the send and the receive buffer, the mean, the fp32 sum that is rounded to it, and the means of all ranks
    if every rank keeps the whole gradient.
    """
    summed = FLOAT32 if travel.is_half else travel
    pieces = [world_size * numel * travel.itemsize] * 2 + [numel * rest.itemsize]
    if rest != summed:
        pieces.append(numel * summed.itemsize)
    if rests_whole:
        pieces.append(world_size * numel * rest.itemsize)
    return sum(round_to_alignment(piece) for piece in pieces)


def largest_tile(travel: Dtype, rest: Dtype, rests_whole: bool, world_size: int, num_bytes: int) -> int:
    """The most elements of every rank's shard that scratch of `num_bytes` has room to exchange at once."""
    # Shards and tiles have a multiple of `ALIGNMENT` elements, as a `ShardLayout` demands.
    smallest, next_one = (tile_bytes(travel, rest, rests_whole, world_size, tiles * ALIGNMENT) for tiles in (1, 2))
    # Bytes grow linearly with the tile, in steps of `ALIGNMENT` elements.
    return (1 + (num_bytes - smallest) // (next_one - smallest)) * ALIGNMENT


def num_tiles(chunk: ChunkFacts, stage: int, num_bytes: int) -> int:
    """The exchanges that a reduction of this chunk takes with scratch of `num_bytes`: 1 if it is made at once."""
    if whole_exchange_bytes(chunk, stage) <= num_bytes:
        return 1
    dtypes, layout = chunk.dtypes, chunk.layout
    tile = largest_tile(dtypes.travel, dtypes.rest, stage == 0, layout.world_size, num_bytes)
    return -(-layout.shard_numel // tile)


def whole_exchange_bytes(chunk: ChunkFacts, stage: int) -> int:
    """The scratch bytes with which the chunk's gradient is exchanged at once, on several ranks."""
    # The receive buffer, the packed units if there are several, and the reduced shard.
    dtypes, layout = chunk.dtypes, chunk.layout
    traveling = layout.numel * dtypes.travel.itemsize
    pieces = [traveling, traveling if len(layout.units) > 1 else 0, layout.shard_numel * dtypes.rest.itemsize]
    # The gradient cast to the dtype in which it travels.
    if dtypes.travel != dtypes.weight:
        pieces.append(traveling)
    # At stage 0 the whole reduced gradient, if its dtype is not the one of the payload.
    if dtypes.rest != dtypes.weight and stage == 0:
        pieces.append(layout.numel * dtypes.rest.itemsize)
    # One tile of the sum, if the result is rounded from it.
    summed = FLOAT32 if dtypes.travel.is_half else dtypes.travel
    if dtypes.rest != summed:
        pieces.append(summed.itemsize * min(layout.shard_numel, SUM_TILE_NUMEL))
    # Every piece begins at an aligned address, for which at most one alignment is lost.
    return sum(pieces) + _ALIGNMENT_BYTES * len(pieces)


def _reduction_bytes(chunk: ChunkFacts, stage: int) -> int:
    """The scratch bytes of one chunk's reduction at once, on several ranks."""
    return max(whole_exchange_bytes(chunk, stage), _least_for_sums(chunk, stage))


def _tiled_bytes(chunk: ChunkFacts, stage: int) -> int:
    """The scratch bytes of one chunk's reduction on several ranks, in tiles if that needs less."""
    whole = _reduction_bytes(chunk, stage)
    if not chunk.oversize:
        return whole
    dtypes, world_size = chunk.dtypes, chunk.layout.world_size
    least = tile_bytes(dtypes.travel, dtypes.rest, stage == 0, world_size, ALIGNMENT)
    return min(whole, max(TILED_BYTES, least, _least_for_sums(chunk, stage)))


def _least_for_sums(chunk: ChunkFacts, stage: int) -> int:
    """A sum that no_sync() left is always exchanged in tiles, as large as scratch allows: room for the smallest."""
    dtypes = chunk.dtypes
    rest = FLOAT32 if dtypes.widens else dtypes.rest
    return tile_bytes(dtypes.sums, rest, stage == 0, chunk.layout.world_size, ALIGNMENT)


def _rounding_bytes(chunk: ChunkFacts) -> int:
    """The scratch bytes of one rank: the gradient in its resting dtype, if it has to be rounded to that."""
    return chunk.layout.numel * chunk.dtypes.rest.itemsize if chunk.dtypes.narrows else 0
