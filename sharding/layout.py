"""Where the elements of a payload lie, in numbers only.

A payload is a row of units; each unit is one contiguous region [rank 0 slice | rank 1 slice | ...], so an
all-gather lands in place and every parameter is a plain view. A rank's shard is its slices of all units, one
after the other. Everything here is arithmetic on element counts: no tensor, no process group.

[Note: Alignment] Every parameter starts on, and every slice ends on, a multiple of `ALIGNMENT` elements:
matrix products then pick the same kernels for every layout, and no 256-element tile of the gradient norm or
block of a quantised state is cut by a border. Values that travel quantised have blocks of as many elements, so
that a block holds elements of one parameter, and the same ones in every layout.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

ALIGNMENT = 256
"""Elements; see [Note: Alignment]."""


@dataclass(frozen=True)
class WireFormat:
    """Values that travel as signed integers of 8 or 4 bits: blocks of `ALIGNMENT` elements with an fp32 scale each.

    [Note: Bound] A block is symmetric: its largest absolute value, absmax, is the integer `largest`, 2**(bits - 1) - 1,
    and the scale is absmax / `largest`. An element is rounded to the nearest integer, so that it is wrong by at most
    absmax / (2 * `largest`) each time it is encoded, and by the roundings of fp32 and of the dtype in which it arrives.
    A block that has an infinite value or a NaN arrives as such throughout, and fp32's largest numbers may overflow. Of
    a block whose absmax is below 1e-36, an element is wrong by at most 1e-38.
    """

    bits: int

    @property
    def largest(self) -> int:
        """The largest integer: 127 or 7."""
        return (1 << self.bits - 1) - 1

    @property
    def block_bytes(self) -> int:
        """Of a block: its integers, then its scale."""
        return ALIGNMENT * self.bits // 8 + 4

    def num_bytes(self, numel: int) -> int:
        """The bytes of `numel` elements, a multiple of `ALIGNMENT`."""
        return numel // ALIGNMENT * self.block_bytes


@dataclass(frozen=True)
class Unit:
    """The region [start, start + numel) of a payload that is split evenly over the ranks."""

    start: int
    numel: int  # a multiple of world_size times the layout's alignment; 0 for a unit of zero-size parameters


@dataclass(frozen=True)
class Piece:
    """A run of elements that is contiguous both in the payload and in one rank's shard."""

    payload_start: int
    shard_start: int
    numel: int

    @property
    def in_payload(self) -> slice:
        """The piece's elements of a flat payload: `payload[piece.in_payload]`."""
        return slice(self.payload_start, self.payload_start + self.numel)

    @property
    def in_shard(self) -> slice:
        """The piece's elements of a flat shard: `shard[piece.in_shard]`."""
        return slice(self.shard_start, self.shard_start + self.numel)

    def from_start(self, start: int) -> Piece:
        """The same elements, in memory that begins with payload element `start`."""
        return Piece(self.payload_start - start, self.shard_start, self.numel)


@dataclass(frozen=True)
class ShardLayout:
    """How the units of one payload are divided over `world_size` ranks, of which there are `num_replicas` groups."""

    units: tuple[Unit, ...]  # contiguous, in order, the first at 0
    world_size: int
    num_replicas: int = 1  # groups of `world_size` ranks, each of which holds all shards once
    wire: WireFormat | None = None  # in which the elements travel; None: as they are
    alignment: int = ALIGNMENT  # slices are multiples of so many elements

    def __post_init__(self) -> None:
        _check_world_size(self.world_size)
        if self.num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, got {self.num_replicas}")
        quantum = self.world_size * self.alignment
        end = 0
        for index, unit in enumerate(self.units):
            if unit.start != end:
                raise ValueError(f"unit {index} starts at {unit.start}, expected {end}: units are contiguous")
            if unit.numel < 0 or unit.numel % quantum:
                raise ValueError(
                    f"unit {index} has {unit.numel} elements, expected a multiple of {quantum} "
                    f"({self.alignment} x {self.world_size} ranks)"
                )
            end += unit.numel

    @cached_property
    def numel(self) -> int:
        """Elements of the payload."""
        return self.units[-1].start + self.units[-1].numel if self.units else 0

    @cached_property
    def shard_numel(self) -> int:
        """Elements of every rank's shard."""
        return self.numel // self.world_size

    def traveling(self, wire: WireFormat | None) -> ShardLayout:
        """This layout with another wire format."""
        return self if wire is self.wire else replace(self, wire=wire)

    @cached_property
    def of_group(self) -> ShardLayout:
        """This layout without replicas: what travels by it stays in the group."""
        return self if self.num_replicas == 1 else replace(self, num_replicas=1)

    def within(self, num_ranks: int) -> ShardLayout:
        """The layout of the same payload over so many of the ranks, a divisor of their number."""
        return ShardLayout(self.units, num_ranks)

    def within_group(self, num_ranks: int | None) -> ShardLayout:
        """`within` so many ranks. None: the layout itself."""
        return self if num_ranks is None else self.within(num_ranks)

    def tile(self, numel: int) -> ShardLayout:
        """The layout of `numel` elements of every rank's shard, that travel alone, one rank after the other."""
        return ShardLayout((Unit(0, numel * self.world_size),), self.world_size, self.num_replicas, self.wire)

    def traveling_bytes(self, numel: int, itemsize: int) -> int:
        """The bytes in which `numel` elements of `itemsize` bytes, a multiple of `ALIGNMENT`, travel."""
        return numel * itemsize if self.wire is None else self.wire.num_bytes(numel)

    @cached_property
    def encoded(self) -> ShardLayout:
        """Of a payload in its wire format, in bytes: units and slices in the same order."""
        assert self.wire is not None
        units = tuple(Unit(self.wire.num_bytes(unit.start), self.wire.num_bytes(unit.numel)) for unit in self.units)
        return ShardLayout(units, self.world_size, self.num_replicas, alignment=self.wire.block_bytes)

    def slices(self, rank: int) -> tuple[Piece, ...]:
        """This rank's slice of every unit, in shard order."""
        found = self._slices.get(rank)  # cached, because every collective asks for it
        if found is None:
            self._check_rank(rank)
            found = self._slices[rank] = tuple(self._slice(unit, rank) for unit in self.units)
        return found

    def others(self, rank: int) -> tuple[slice, ...]:
        """The parts of the payload outside this rank's slices, in order. Raises ValueError for an invalid rank."""
        # The gaps go from the end of one own slice to the start of the next, with the payload's borders at both ends.
        own = self.slices(rank)
        ends = [0, *(piece.payload_start + piece.numel for piece in own)]
        starts = [*(piece.payload_start for piece in own), self.numel]
        return tuple(slice(start, end) for start, end in zip(ends, starts, strict=True) if start < end)

    def pieces(self, rank: int, start: int, numel: int) -> tuple[Piece, ...]:
        """The parts of the payload interval [start, start + numel) that lie in the rank's shard, in order."""
        self._check_rank(rank)
        overlaps = (_overlap(self._slice(unit, rank), start, numel) for unit in self._touched(start, numel))
        return tuple(piece for piece in overlaps if piece is not None)

    def owner_pieces(self, start: int, numel: int) -> tuple[tuple[int, Piece], ...]:
        """Return (rank, piece) for all of the payload interval [start, start + numel), in payload order."""
        found = []
        for unit in self._touched(start, numel):
            # Slices of a unit have one size, so the first and the last rank follow by division. `last` is inclusive.
            slice_numel = unit.numel // self.world_size
            first = (max(start, unit.start) - unit.start) // slice_numel
            last = (min(start + numel, unit.start + unit.numel) - 1 - unit.start) // slice_numel
            for rank in range(first, last + 1):
                piece = _overlap(self._slice(unit, rank), start, numel)
                assert piece is not None
                found.append((rank, piece))
        return tuple(found)

    def _slice(self, unit: Unit, rank: int) -> Piece:
        # Each unit before this one gave every rank exactly 1/N of its elements, so no running sum is needed.
        numel = unit.numel // self.world_size
        return Piece(unit.start + rank * numel, unit.start // self.world_size, numel)

    def _touched(self, start: int, numel: int) -> list[Unit]:
        """The units that share at least one element with [start, start + numel)."""
        end = start + numel
        if start < 0 or numel < 0 or end > self.numel:
            raise ValueError(f"interval [{start}, {end}) is not inside the payload of {self.numel} elements")
        if numel == 0:
            return []
        # A unit without elements has the start of the unit behind it. `bisect_right` finds the last one that starts
        # there.
        first = bisect_right(self._starts, start) - 1
        last = bisect_right(self._starts, end - 1)
        # Units without elements overlap nothing, and `owner_pieces` would divide by the size of their slices.
        return [unit for unit in self.units[first:last] if unit.numel]

    @cached_property
    def _slices(self) -> dict[int, tuple[Piece, ...]]:
        # `cached_property` writes to the instance's `__dict__`, which a frozen dataclass allows. As this is no field,
        # layouts with and without cached slices are equal.
        return {}

    @cached_property
    def _starts(self) -> list[int]:
        return [unit.start for unit in self.units]

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not one of {self.world_size} ranks")


def pieces_within(pieces: Iterable[Piece], start: int, numel: int) -> Iterator[Piece]:
    """The parts of `pieces` that lie in elements [start, start + numel) of the shard."""
    for piece in pieces:
        first = max(start, piece.shard_start)
        end = min(start + numel, piece.shard_start + piece.numel)
        if first < end:
            yield Piece(piece.payload_start + first - piece.shard_start, first, end - first)


def even_parts(numel: int, count: int) -> list[int]:
    """The numbers of elements of `count` consecutive parts of `numel`, the largest first; the last may be empty.

    Raises ValueError if `count` is below 1.
    """
    part = round_up(numel, count) // count
    return [max(0, min(part, numel - index * part)) for index in range(count)]


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `n`. Raises ValueError if `multiple` is below 1."""
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    return -(-n // multiple) * multiple


def lay_out_unit(numels: Sequence[int], world_size: int) -> tuple[tuple[int, ...], int]:
    """Offsets of parameters inside their unit, and the unit's padded element count.

    See [Note: Alignment]. A unit of zero-size parameters only has 0 elements. Raises ValueError for a negative number
    of elements and for a `world_size` below 1.
    """
    _check_world_size(world_size)
    # For example, 10 and 300 elements on 2 ranks get the offsets 0 and 256, and the unit has 1,024 elements.
    offsets = []
    end = 0
    for numel in numels:
        if numel < 0:
            raise ValueError(f"a parameter cannot have {numel} elements")
        offset = round_up(end, ALIGNMENT)
        offsets.append(offset)
        end = offset + numel
    return tuple(offsets), round_up(end, world_size * ALIGNMENT)


def _overlap(piece: Piece, start: int, numel: int) -> Piece | None:
    """The part of `piece` inside the payload interval [start, start + numel), None if it is empty."""
    first = max(piece.payload_start, start)
    last = min(piece.payload_start + piece.numel, start + numel)
    if first >= last:
        return None
    return Piece(first, piece.shard_start + first - piece.payload_start, last - first)


def _check_world_size(world_size: int) -> None:
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1, got {world_size}")
