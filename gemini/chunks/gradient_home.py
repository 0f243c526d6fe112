"""Says which part of a chunk's GRAD home, or of a payload, holds what."""

from __future__ import annotations

from gemini.chunks.chunk import Chunk
from gemini.memory.region import Region


def numel_without_sums(chunk: Chunk, keeps_whole: bool) -> int:
    """Elements of a GRAD home before the part for fp32 sums of micro-batches, which a plan may append."""
    if not keeps_whole or chunk.is_stepped_whole:
        return chunk.optim_numel
    # With several units the shard lies behind the payload, see `shard_of`.
    return chunk.numel + (chunk.optim_numel if len(chunk.layout.units) > 1 else 0)


def shard_of(home: Region, chunk: Chunk, keeps_whole: bool) -> Region:
    """(optim_numel,) the part of the GRAD home that holds what this rank updates."""
    if not keeps_whole or chunk.is_stepped_whole:
        return home[: chunk.optim_numel]
    # This rank's slices of several units are not contiguous in the payload: their shard lies behind it.
    if len(chunk.layout.units) > 1:
        return home[chunk.numel : chunk.numel + chunk.optim_numel]
    start = chunk.layout.slices(chunk.rank)[0].payload_start
    return home[start : start + chunk.optim_numel]


def gaps_of(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """The parts of a payload that belong to no parameter."""
    # Parameters begin at multiples of `ALIGNMENT`, and a unit is padded so that each rank's slice has such a multiple.
    ranges = sorted((managed.offset, managed.offset + managed.numel) for managed in chunk.parameters)
    ends, starts = [0, *(end for _, end in ranges)], [*(start for start, _ in ranges), chunk.numel]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)
