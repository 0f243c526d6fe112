"""Scratch: device memory for the temporaries of one reduction, reused by the next. Bytes only."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.placement.chunk_facts import ChunkFacts
from gemini.placement.dtypes import FLOAT32, Dtype
from sharding import ALIGNMENT, SUM_TILE_NUMEL

_ALIGNMENT_BYTES = 256


def round_to_alignment(num_bytes: int) -> int:
    """The bytes that a scratch tensor of `num_bytes` occupies."""
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def scratch_bytes(trainable: Sequence[ChunkFacts], stage: int, world_size: int) -> int:
    """The scratch bytes of the largest reduction of these chunks."""
    if world_size == 1:
        return max((_rounding_bytes(chunk) for chunk in trainable), default=0)
    return max((_reduction_bytes(chunk, stage) for chunk in trainable), default=0)


def tile_bytes(sums: Dtype, rest: Dtype, rests_whole: bool, world_size: int, numel: int) -> int:
    """The scratch bytes to exchange `numel` elements of every rank's shard of an unreduced sum.

    They hold the send and the receive buffer, the mean, the fp32 sum that is rounded to it, and the means of all ranks
    if every rank keeps the whole gradient.
    """
    summed = FLOAT32 if sums.is_half else sums
    pieces = [world_size * numel * sums.itemsize] * 2 + [numel * rest.itemsize]
    if rest != summed:
        pieces.append(numel * summed.itemsize)
    if rests_whole:
        pieces.append(world_size * numel * rest.itemsize)
    return sum(round_to_alignment(piece) for piece in pieces)


def _reduction_bytes(chunk: ChunkFacts, stage: int) -> int:
    """The scratch bytes of one chunk's reduction on several ranks."""
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
    # A sum that no_sync() left is exchanged in tiles as large as scratch allows. It must have room for the smallest.
    rest = FLOAT32 if dtypes.widens else dtypes.rest
    least_for_sums = tile_bytes(dtypes.sums, rest, stage == 0, layout.world_size, ALIGNMENT)
    # Every piece begins at an aligned address, for which at most one alignment is lost.
    return max(sum(pieces) + _ALIGNMENT_BYTES * len(pieces), least_for_sums)


def _rounding_bytes(chunk: ChunkFacts) -> int:
    """The scratch bytes of one rank: the gradient in its resting dtype, if it has to be rounded to that."""
    return chunk.layout.numel * chunk.dtypes.rest.itemsize if chunk.dtypes.narrows else 0
