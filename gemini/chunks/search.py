"""Chunk-size search: which chunk size wastes least, everything counted in bytes.

Three costs pull against each other: padding (units rounded up, chunk ends left empty by whole operators, large
slots that hold small chunks), the bytes gathered at the busiest moment (slots), and the number of collectives, each
charged with the bytes that the link could have carried in the time a launch takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.chunks.packing import PackedChunk, PackingInput, pack
from sharding import ShardStrategy

BYTES_PER_COLLECTIVE = 128 * 2**10
"""What a launch costs, in bytes: about 20 us at 6 GB/s per direction, the order of gloo here and of NCCL on PCIe."""

_COLLECTIVES_PER_CHUNK = 3  # gathered for forward and backward, reduced once
_GRANULARITY_BYTES = 2**10 * 64
_NUM_SLOTS = 4  # two payloads and two gradients: the floor of a sequential model


@dataclass(frozen=True)
class SearchReport:
    """One candidate; all costs in bytes."""

    chunk_bytes: int
    num_chunks: int
    padding_bytes: int
    gathered_bytes: int
    num_collectives: int  # launches per chunk's units and step

    @property
    def collective_bytes(self) -> int:
        return self.num_collectives * BYTES_PER_COLLECTIVE

    @property
    def total_bytes(self) -> int:
        return self.padding_bytes + self.gathered_bytes + self.collective_bytes


def report(chunks: Sequence[PackedChunk], chunk_bytes: int, model_bytes: int) -> SearchReport:
    """What packing into `chunks` costs."""
    regular = max((chunk.payload_bytes for chunk in chunks if not chunk.oversize), default=0)
    oversize = max((chunk.payload_bytes for chunk in chunks if chunk.oversize), default=0)
    padding = sum(chunk.payload_bytes for chunk in chunks) - model_bytes
    # a slot of the second size is empty for the difference whenever it holds a smaller chunk
    padding += sum(oversize - chunk.payload_bytes for chunk in chunks if chunk.oversize)
    return SearchReport(
        chunk_bytes, len(chunks), padding, _NUM_SLOTS * regular + 2 * oversize, _COLLECTIVES_PER_CHUNK * len(chunks)
    )


def search_chunk_bytes(
    operators: Sequence[Sequence[PackingInput]], strategy: ShardStrategy, world_size: int
) -> tuple[SearchReport, list[SearchReport]]:
    """(best, all candidates). Candidates: powers of two, multiples of the largest operators' sizes."""
    items = [item for operator in operators for item in operator]
    model_bytes = sum(item.spec.numel * item.itemsize for item in items)
    candidates = {_GRANULARITY_BYTES * 2**power for power in range(14)}
    sizes = {sum(item.spec.numel * item.itemsize for item in operator) for operator in operators}
    for size in sorted(sizes, reverse=True)[:8]:
        for times in (1, 2, 4):
            candidates.add(-(-(size * times + 4096 * world_size) // _GRANULARITY_BYTES) * _GRANULARITY_BYTES)
    ceiling = max(_GRANULARITY_BYTES, -(-model_bytes // _GRANULARITY_BYTES) * _GRANULARITY_BYTES)
    usable = sorted(size for size in candidates if _GRANULARITY_BYTES <= size <= ceiling) or [_GRANULARITY_BYTES]
    reports = [report(pack(operators, strategy, size, world_size), size, model_bytes) for size in usable]
    return min(reports, key=lambda r: (r.total_bytes, r.chunk_bytes)), reports
