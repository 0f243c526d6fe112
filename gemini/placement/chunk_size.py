"""Chunk-size search: the chunk size that wastes least, with every cost counted in bytes.

Three costs pull against each other: padding (units rounded up, chunk ends left empty by whole operators, large
slots that hold small chunks), the bytes gathered at the busiest moment (slots), and the number of collectives, each
charged with the bytes that the link could have carried in the time a launch takes.

If everything fits the device, the cheapest size is the best. If not, bytes travel in every step, and how many depends
on the size: large chunks use a small budget badly. Only a placement can tell, so the search merely orders the sizes.
`plan_model` places them one after the other, up to `CHUNKS_PLACED` chunks in all, and takes the size whose step costs
least (`step_cost`) among those that use the budget.
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
"""The bytes that the link could carry in the time that a collective's launch takes.

Two gloo ranks on one machine: about 1 MiB (`python -m benchmarks.collective_cost`). NCCL over PCIe, taken at 20 to
40 us and 12 GB/s, not measured: 240 to 480 KiB. Half a MiB is between the two.
"""

BYTES_PER_COPY = 128 * 2**10
"""The same for the launch of a copy over the link: some 10 us at 12 GB/s, not measured."""
CHUNKS_PLACED = 2_000
"""Chunks that are placed while searching the size for a budget; after that the best size so far is taken. They take
some hundredths of a second."""

_COLLECTIVES_PER_CHUNK = 3  # gathered for forward and backward, reduced once
_GRANULARITY_BYTES = 2**10 * 64
_LEAST_BYTES = 2**10  # a shard of one rank ends on a multiple of 256 elements
_NUM_EXACT_SIZES = 24
_UNITS_CUT = 50_000
"""Units that are cut while trying every remaining size, before the search gives up: some tenths of a second."""
_NUM_SLOTS = 4  # two payloads and two gradients: the floor of a sequential model


@dataclass(frozen=True)
class SearchReport:
    """One candidate size and its costs, in bytes."""

    chunk_bytes: int
    num_chunks: int
    padding_bytes: int
    gathered_bytes: int
    num_collectives: int  # launches per chunk's units and step

    @property
    def collective_bytes(self) -> int:
        """The launches of a step, converted to bytes."""
        return self.num_collectives * BYTES_PER_COLLECTIVE

    @property
    def total_bytes(self) -> int:
        """The sum of all costs, by which candidates are ordered."""
        return self.padding_bytes + self.gathered_bytes + self.collective_bytes


class Sized(Protocol):
    """What the cost functions need to know of a chunk."""

    @property
    def payload_bytes(self) -> int:
        """Bytes of the whole chunk, padding included."""

    @property
    def oversize(self) -> bool:
        """The chunk is larger than the chunk size and uses slots of the second size."""


def report(chunks: Sequence[Sized], chunk_bytes: int, model_bytes: int) -> SearchReport:
    """The costs of packing into `chunks`."""
    regular = max((chunk.payload_bytes for chunk in chunks if not chunk.oversize), default=0)
    # The largest chunk of a size decides how large all slots of that size are.
    oversize = max((chunk.payload_bytes for chunk in chunks if chunk.oversize), default=0)
    padding = sum(chunk.payload_bytes for chunk in chunks) - model_bytes
    # A slot of the second size stays partly empty whenever it holds a chunk smaller than the largest. Without this term
    # the search prefers sizes so small that every weight matrix is larger than a chunk.
    padding += sum(oversize - chunk.payload_bytes for chunk in chunks if chunk.oversize)
    return SearchReport(
        chunk_bytes, len(chunks), padding, _NUM_SLOTS * regular + 2 * oversize, _COLLECTIVES_PER_CHUNK * len(chunks)
    )


def step_cost(demand: Demand, placement: Placement, world_size: int) -> int:
    """Bytes over the link in a step under a budget, plus the launches of copies and collectives converted to bytes."""
    # The copies of a chunk are counted like its collectives: two fetches and one gradient.
    copies = sum(
        count * _COLLECTIVES_PER_CHUNK for _, homes, count in placement.alike(demand) if Tier.HOST in homes.values()
    )
    collectives = _COLLECTIVES_PER_CHUNK * len(demand.chunks) if world_size > 1 else 0
    return link_bytes(demand, placement) + BYTES_PER_COPY * copies + BYTES_PER_COLLECTIVE * collectives


def candidates(packer: Packer, world_size: int) -> Iterator[tuple[SearchReport, list[Cut]]]:
    """Candidate chunk sizes with the chunks that they make, in three groups.

    First the usual sizes by cost: powers of two and multiples of the largest operators' sizes. Then sizes that only a
    tight budget calls for: smaller than a launch is worth, or exactly one operator or one unit, so that a slot has no
    room to spare. Last all other sizes from the smallest on, because the ideal slot may hold a sum of several units;
    of a model with thousands of weights only the first of these. Sizes that make the same chunks are one candidate.
    """
    seen: set[bytes] = set()  # membership only
    # The usual sizes. 4096 elements a rank leave room for the padding of an operator's units.
    # The powers of two go from 64 KiB to 512 MiB.
    usual = {_GRANULARITY_BYTES * 2**power for power in range(14)}
    for size in sorted(set(packer.operator_bytes), reverse=True)[:8]:
        usual.update(_round_up(size * times + 4096 * world_size, _GRANULARITY_BYTES) for times in (1, 2, 4))
    # No size above the whole model makes other chunks. Count the padding of every unit: in a model of tiny operators
    # padding is most of the bytes.
    in_all = sum(cut.payload_bytes for cut in packer.cut(max(usual)))
    ceiling = max(_GRANULARITY_BYTES, _round_up(in_all, _GRANULARITY_BYTES))
    yield from _by_cost(packer, {size for size in usual if size <= ceiling}, seen)
    # Sizes for tight budgets.
    tight = {_LEAST_BYTES * 2**power for power in range(6)}
    tight.update(sorted(packer.exact_bytes(), reverse=True)[:_NUM_EXACT_SIZES])
    # The usual sizes were tried above: leaving them out saves the cuts that `seen` would discard.
    yield from _by_cost(packer, tight - usual, seen)
    # Every other size, as many as the bound on cut units allows.
    for size, cuts in islice(packer.every_cut(), _UNITS_CUT // max(1, packer.num_units())):
        yield from _unseen(packer, size, cuts, seen)


def _by_cost(packer: Packer, sizes: Collection[int], seen: set[bytes]) -> list[tuple[SearchReport, list[Cut]]]:
    found = [one for size in sorted(sizes) for one in _unseen(packer, size, packer.cut(size), seen)]
    return sorted(found, key=lambda one: (one[0].total_bytes, one[0].chunk_bytes))


def _unseen(packer: Packer, size: int, cuts: list[Cut], seen: set[bytes]) -> Iterator[tuple[SearchReport, list[Cut]]]:
    """The candidate, unless an earlier size has made the same chunks."""
    # Only the fingerprint is kept: the cuts of thousands of sizes would take too much memory.
    shape = array("q", [number for cut in cuts for number in (cut.place, len(cut.units), cut.oversize)]).tobytes()
    if shape not in seen:
        seen.add(shape)
        yield report(cuts, size, sum(packer.operator_bytes)), cuts


def _round_up(num_bytes: int, multiple: int) -> int:
    return -(-num_bytes // multiple) * multiple
