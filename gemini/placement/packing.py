"""Packing: which chunk contains each parameter, and at which offset. Numbers only.

Operators come in the order in which the module tree lists them. Their parameters are grouped by key (dtype,
trainable: only equal keys share a chunk), turned into units by the shard strategy, and units are laid one after
the other into chunks of at most `chunk_bytes`. The units of one operator go to one chunk if they fit into one,
so that no border cuts an operator; a unit larger than a chunk gets a chunk of its own, of the second slot size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter

from sharding import ALIGNMENT, ParameterSpec, ShardLayout, ShardStrategy, Unit, check_units, lay_out_unit, round_up


@dataclass(frozen=True)
class PackingInput:
    """One parameter and what packing needs to know of it."""

    spec: ParameterSpec
    key: Hashable  # only parameters of equal key share a chunk
    itemsize: int


@dataclass(frozen=True)
class PackedChunk:
    """One chunk: its parameters by name with their element offsets, and how it is divided over the ranks."""

    key: Hashable
    itemsize: int
    names: tuple[str, ...]
    offsets: tuple[int, ...]  # elements, each a multiple of 256
    layout: ShardLayout
    oversize: bool  # larger than a regular chunk: it needs a slot of the second size

    @property
    def payload_bytes(self) -> int:
        return self.layout.numel * self.itemsize


@dataclass(slots=True)
class Cut:
    """A chunk before its parameters have offsets: the units that go into it. `seal` makes a `PackedChunk` of it."""

    key: Hashable
    itemsize: int
    place: int  # of its first operator
    oversize: bool
    units: list[list[ParameterSpec]]
    payload_bytes: int


@dataclass(frozen=True, slots=True)
class _SizedUnit:
    """A unit, with the size of a chunk that contains nothing else."""

    specs: list[ParameterSpec]
    place: int  # of the operator
    numel: int  # from its start to where the next unit of a chunk may start
    payload_bytes: int


class _Line:
    """Units of one key, laid one after the other into a payload that takes all of them."""

    def __init__(self, rows: Sequence[Sequence[_SizedUnit]]) -> None:
        """rows: the units of one operator each."""
        self.rows = rows
        self.units = [unit for row in rows for unit in row]
        self.specs = [unit.specs for unit in self.units]
        self.starts = [0, *accumulate(unit.numel for unit in self.units)]  # of the units, and the end
        self.firsts = [0, *accumulate(map(len, rows))]  # the number of each row's first unit, and of all units
        self.unit_bytes = sorted({unit.payload_bytes for unit in self.units})
        its = pairwise(self.firsts)
        # Sizes of the operators for which a chunk that began before them may be closed.
        self.row_numels = sorted({self.starts[end] - self.starts[first] for first, end in its if 0 < first < end - 1})

    def up_to(self, chunk_bytes: int) -> _Line:
        """The line without the units that are larger than a chunk."""
        return _Line([[unit for unit in row if unit.payload_bytes <= chunk_bytes] for row in self.rows])


class Packer:
    """Cuts one model into chunks of any size. Units and their sizes, which do not depend on it, are computed once."""

    def __init__(self, operators: Sequence[Sequence[PackingInput]], strategy: ShardStrategy, world_size: int) -> None:
        """operators: in the order of the module tree. Raises ValueError if the strategy loses or repeats one."""
        self._spans_chunk = strategy.spans_chunk
        # A strategy that spans the chunk merges its units, and only the merged one is padded for the ranks.
        self._unit_alignment = ALIGNMENT if strategy.spans_chunk else world_size * ALIGNMENT
        self._world_size = world_size
        # Every rank's slice of a payload ends on a multiple of ALIGNMENT elements, see [Note: Alignment] in
        # sharding/layout.py.
        self._quantum = world_size * ALIGNMENT
        self._groups: list[tuple[Hashable, int, _Line]] = []
        self.operator_bytes = [sum(item.spec.numel * item.itemsize for item in operator) for operator in operators]
        # A dict keeps the order of first use. The order of a set of keys, which contain texts, differs between
        # processes, and with it the chunks would.
        for key, itemsize in {item.key: item.itemsize for operator in operators for item in operator}.items():
            of_key = [[item.spec for item in operator if item.key == key] for operator in operators]
            places = [place for place, specs in enumerate(of_key) if specs]
            units = _units_by_operator([of_key[place] for place in places], strategy)
            rows = [
                [self._sized(unit, place, itemsize) for unit in its] for place, its in zip(places, units, strict=True)
            ]
            self._groups.append((key, itemsize, _Line(rows)))

    def cut(self, chunk_bytes: int) -> list[Cut]:
        """Chunks of at most `chunk_bytes`, in order of first use. Each parameter is in exactly one."""
        return self._cut(chunk_bytes)[0]

    def every_cut(self) -> Iterator[tuple[int, list[Cut]]]:
        """Every distinct way to cut the model, each with the least chunk size that makes it, in ascending order."""
        size: int | None = 1
        while size is not None:
            cuts, then = self._cut(size)
            yield size, cuts
            size = then

    def num_units(self) -> int:
        """The number of units in all chunks together, whatever the chunk size."""
        return sum(len(line.units) for _, _, line in self._groups)

    def seal(self, cuts: Sequence[Cut]) -> tuple[PackedChunk, ...]:
        """The same chunks with the offset of every parameter."""
        return tuple(_seal(cut, self._spans_chunk, self._world_size) for cut in cuts)

    def exact_bytes(self) -> set[int]:
        """The bytes of each payload that holds exactly one operator or one unit."""
        sizes: set[int] = set()
        for _, itemsize, line in self._groups:
            sizes.update(line.unit_bytes)
            numels = {line.starts[end] - line.starts[first] for first, end in pairwise(line.firsts)}
            sizes.update(itemsize * round_up(numel, self._quantum) for numel in numels)
        return sizes

    def _cut(self, chunk_bytes: int) -> tuple[list[Cut], int | None]:
        """The chunks, and the least size that makes others. None: no larger one does."""
        cuts: list[Cut] = []
        refused: list[int] = []
        for key, itemsize, line in self._groups:
            if line.unit_bytes[-1] > chunk_bytes:
                # The smallest unit that is larger than a chunk: from its size on it joins the regular chunks.
                refused.append(line.unit_bytes[bisect_right(line.unit_bytes, chunk_bytes)])
                cuts += [
                    Cut(key, itemsize, unit.place, True, [unit.specs], unit.payload_bytes)
                    for unit in line.units
                    if unit.payload_bytes > chunk_bytes
                ]
                line = line.up_to(chunk_bytes)
            found, bytes_refused = self._fill(key, itemsize, line, chunk_bytes)
            cuts += found
            refused += bytes_refused
        # The sort is stable: within an operator the order is that of keys, with oversize chunks first.
        return sorted(cuts, key=attrgetter("place")), min(refused, default=None)

    def _fill(self, key: Hashable, itemsize: int, line: _Line, chunk_bytes: int) -> tuple[list[Cut], set[int]]:
        """Chunks of a line without units that are larger, and payloads of larger chunks that might have been made.

        A chunk ends before the first unit that does not fit; before the first one of that unit's operator, if a chunk
        of its own holds all units of the operator, and this one has units of others.
        """
        done: list[Cut] = []
        starts, firsts, quantum = line.starts, line.firsts, self._quantum
        # A payload is padded to a multiple of the quantum: with a capacity in between it could exceed `chunk_bytes`.
        num_units, capacity = len(line.units), chunk_bytes // itemsize // quantum * quantum
        # From this size on one more operator fits into a chunk, so that the chunk before it may end at its border.
        refused = set(line.row_numels[bisect_right(line.row_numels, capacity) :][:1])
        first = 0
        # Each turn makes one chunk. The line has no unit that is larger than a chunk, so at least one fits and the loop
        # ends.
        while first < num_units:
            end = bisect_right(starts, starts[first] + capacity, first) - 1
            if end < num_units:
                # The first unit that does not fit has the number `end`. The units of its operator are those in [before,
                # after).
                row, too_many = bisect_right(firsts, end), end + 1
                before, after = firsts[row - 1], firsts[row]
                if first < before < after - 1 and starts[after] - starts[before] <= capacity:
                    # A larger chunk ends here too, until it holds the whole operator.
                    end, too_many = before, after
                # With room for so many elements the chunk would have had one unit, or one operator, more.
                refused.add(starts[too_many] - starts[first])
            payload_bytes = itemsize * round_up(starts[end] - starts[first], quantum)
            done.append(Cut(key, itemsize, line.units[first].place, False, line.specs[first:end], payload_bytes))
            first = end
        return done, {itemsize * round_up(numel, quantum) for numel in refused}

    def _sized(self, unit: list[ParameterSpec], place: int, itemsize: int) -> _SizedUnit:
        end = 0
        # Each parameter starts on an aligned offset, as `lay_out_unit` places it.
        for spec in unit:
            end = round_up(end, ALIGNMENT) + spec.numel
        payload_bytes = itemsize * round_up(end, self._quantum)
        return _SizedUnit(unit, place, round_up(end, self._unit_alignment), payload_bytes)


def pack(
    operators: Sequence[Sequence[PackingInput]], strategy: ShardStrategy, chunk_bytes: int, world_size: int
) -> tuple[PackedChunk, ...]:
    """Chunks of at most `chunk_bytes`, in order of first use. Each parameter of `operators` is in exactly one."""
    packer = Packer(operators, strategy, world_size)
    return packer.seal(packer.cut(chunk_bytes))


def _units_by_operator(
    operators: list[list[ParameterSpec]], strategy: ShardStrategy
) -> list[list[list[ParameterSpec]]]:
    """The strategy's units by operator. A unit belongs to the operator of its first parameter."""
    units = strategy.units(operators)
    # A user's strategy may lose or repeat a weight, which would then have no place in a chunk, or two.
    check_units(strategy, operators, units)
    owner = {spec.name: index for index, operator in enumerate(operators) for spec in operator}
    groups: list[list[list[ParameterSpec]]] = [[] for _ in operators]
    for unit in units:
        groups[owner[unit[0].name]].append(unit)
    return groups


def _seal(cut: Cut, spans_chunk: bool, world_size: int) -> PackedChunk:
    # A strategy that spans the chunk divides all of it in one piece, as a single unit.
    units = [[spec for unit in cut.units for spec in unit]] if spans_chunk else cut.units
    names: list[str] = []
    offsets: list[int] = []
    laid_out: list[Unit] = []
    start = 0
    for unit in units:
        # The unit is padded, so that all ranks have equal parts of it, as the all-gather in place needs.
        inside, numel = lay_out_unit([spec.numel for spec in unit], world_size)
        names += [spec.name for spec in unit]
        offsets += [start + offset for offset in inside]
        laid_out.append(Unit(start, numel))
        start += numel
    layout = ShardLayout(tuple(laid_out), world_size)
    return PackedChunk(cut.key, cut.itemsize, tuple(names), tuple(offsets), layout, cut.oversize)
