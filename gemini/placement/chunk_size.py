"""Chunk-size search: which chunk size wastes least, everything counted in bytes.

Three costs pull against each other: padding (units rounded up, chunk ends left empty by whole operators, large
slots that hold small chunks), the bytes gathered at the busiest moment (slots), and the number of collectives, each
charged with the bytes that the link could have carried in the time a launch takes.

Where everything fits the device the cheapest size is the best. Where it does not, bytes travel in every step, and how
many depends on the size: large chunks use a small budget badly. That is a question to the placement, so the search
only orders the sizes. Whoever plans places them one after the other, as many as `CHUNKS_PLACED` allows, and takes the
one whose step costs least (`step_cost`), of those that use the budget.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from gemini.placement.demand import Demand, Placement, Tier
from gemini.placement.link_bytes import link_bytes
from gemini.placement.packing import Cut, Packer

BYTES_PER_COLLECTIVE = 512 * 2**10
"""What a launch is worth, in chunk bytes.

Two gloo ranks on one machine: about 1 MiB (`python -m benchmarks.collective_cost`). NCCL over PCIe, taken at 20 to
40 us and 12 GB/s, not measured: 240 to 480 KiB. Half a MiB is between the two.
"""

BYTES_PER_COPY = 128 * 2**10
"""What a copy over the link is worth: some 10 us at 12 GB/s, not measured."""
CHUNKS_PLACED = 2_000
"""In search of the size for a budget, before the search takes the best so far: some hundredths of a second."""

_COLLECTIVES_PER_CHUNK = 3  # gathered for forward and backward, reduced once
_GRANULARITY_BYTES = 2**10 * 64
_LEAST_BYTES = 2**10  # a shard of one rank ends on a multiple of 256 elements
_NUM_EXACT_SIZES = 24
_UNITS_CUT = 50_000
"""In search of the last byte, before the search gives up: some tenths of a second."""
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
        """What the launches of a step are worth."""
        return self.num_collectives * BYTES_PER_COLLECTIVE

    @property
    def total_bytes(self) -> int:
        """By which candidates are ordered."""
        return self.padding_bytes + self.gathered_bytes + self.collective_bytes


class Sized(Protocol):
    """A chunk as costs see it."""

    @property
    def payload_bytes(self) -> int:
        """Of the whole chunk, padding included."""

    @property
    def oversize(self) -> bool:
        """It is larger than the chunk size, and takes slots of the second size."""


def report(chunks: Sequence[Sized], chunk_bytes: int, model_bytes: int) -> SearchReport:
    """What packing into `chunks` costs."""
    regular = max((chunk.payload_bytes for chunk in chunks if not chunk.oversize), default=0)
    oversize = max((chunk.payload_bytes for chunk in chunks if chunk.oversize), default=0)
    padding = sum(chunk.payload_bytes for chunk in chunks) - model_bytes
    # a slot of the second size is empty for the difference whenever it holds a smaller chunk
    padding += sum(oversize - chunk.payload_bytes for chunk in chunks if chunk.oversize)
    return SearchReport(
        chunk_bytes, len(chunks), padding, _NUM_SLOTS * regular + 2 * oversize, _COLLECTIVES_PER_CHUNK * len(chunks)
    )


def step_cost(demand: Demand, placement: Placement, world_size: int) -> int:
    """What a step costs under a budget: the bytes that travel because they do not fit, and what launches are worth."""
    copies = sum(
        count * _COLLECTIVES_PER_CHUNK for _, homes, count in placement.alike(demand) if Tier.HOST in homes.values()
    )
    collectives = _COLLECTIVES_PER_CHUNK * len(demand.chunks) if world_size > 1 else 0
    return link_bytes(demand, placement) + BYTES_PER_COPY * copies + BYTES_PER_COLLECTIVE * collectives


def candidates(packer: Packer, world_size: int) -> Iterator[tuple[SearchReport, list[Cut]]]:
    """Chunk sizes with the chunks that they make: the cheapest first, then those that only a tight budget asks for.

    Cheap ones are among powers of two and multiples of the largest operators' sizes. The tight ones are smaller than
    what a launch is worth, or just as large as one operator or one unit, so that a slot has no room to spare. Last come
    all others, from the smallest on, as a sum of several units may be what a slot should be: of a model of thousands of
    weights only the first ones. Sizes that make the same chunks are one candidate: below the smallest unit all do.
    """
    seen: set[bytes] = set()  # membership only
    usual = {_GRANULARITY_BYTES * 2**power for power in range(14)}
    for size in sorted(set(packer.operator_bytes), reverse=True)[:8]:
        usual.update(_round_up(size * times + 4096 * world_size, _GRANULARITY_BYTES) for times in (1, 2, 4))
    # with every unit's padding, which is most of the bytes of a model of tiny operators
    in_all = sum(cut.payload_bytes for cut in packer.cut(max(usual)))
    ceiling = max(_GRANULARITY_BYTES, _round_up(in_all, _GRANULARITY_BYTES))
    yield from _by_cost(packer, {size for size in usual if size <= ceiling}, seen)
    tight = {_LEAST_BYTES * 2**power for power in range(6)}
    tight.update(sorted(packer.exact_bytes(), reverse=True)[:_NUM_EXACT_SIZES])
    yield from _by_cost(packer, tight - usual, seen)
    for size, cuts in islice(packer.every_cut(), _UNITS_CUT // max(1, packer.num_units())):
        yield from _unseen(packer, size, cuts, seen)


def _by_cost(packer: Packer, sizes: Collection[int], seen: set[bytes]) -> list[tuple[SearchReport, list[Cut]]]:
    found = [one for size in sorted(sizes) for one in _unseen(packer, size, packer.cut(size), seen)]
    return sorted(found, key=lambda one: (one[0].total_bytes, one[0].chunk_bytes))


def _unseen(packer: Packer, size: int, cuts: list[Cut], seen: set[bytes]) -> Iterator[tuple[SearchReport, list[Cut]]]:
    """The candidate, unless another size has made the same chunks."""
    shape = array("q", [number for cut in cuts for number in (cut.place, len(cut.units), cut.oversize)]).tobytes()
    if shape not in seen:
        seen.add(shape)
        yield report(cuts, size, sum(packer.operator_bytes)), cuts


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
