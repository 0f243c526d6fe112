"""Packing: which parameter lies in which chunk, where. Numbers only.

Operators come in the order in which the module tree lists them. Their parameters are grouped by key (dtype,
trainable: only equal keys share a chunk), turned into units by the shard strategy, and units are laid one after
the other into chunks of at most `chunk_bytes`. The units of one operator go to one chunk if they fit into one,
so that no border cuts an operator; a unit larger than a chunk gets a chunk of its own, of the second slot size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from sharding import ALIGNMENT, ParameterSpec, ShardLayout, ShardStrategy, Unit, check_units, lay_out_unit, round_up


@dataclass(frozen=True)
class PackingInput:
    """One parameter, as packing sees it."""

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


@dataclass
class Cut:
    """A chunk to be: which units go into it. `seal` makes a `PackedChunk` of it."""

    key: Hashable
    itemsize: int
    place: int  # of its first operator
    oversize: bool
    units: list[list[ParameterSpec]] = field(default_factory=list)
    end: int = 0  # elements so far, before the payload is rounded up
    payload_bytes: int = 0


@dataclass
class _Limit:
    """The most bytes of a regular chunk, and the least more that another cut would take."""

    chunk_bytes: int
    next_bytes: int | None = None  # with every size below, the same chunks are made

    def holds(self, payload_bytes: int) -> bool:
        """Whether a regular chunk may be as large as this."""
        if payload_bytes <= self.chunk_bytes:
            return True
        if self.next_bytes is None or payload_bytes < self.next_bytes:
            self.next_bytes = payload_bytes
        return False


@dataclass(frozen=True, slots=True)
class _SizedUnit:
    """Parameters that stay together, and what a chunk would have that holds no others."""

    specs: list[ParameterSpec]
    end: int  # elements, before the payload is rounded up
    payload_bytes: int


@dataclass(frozen=True)
class _Row:
    """One operator's parameters of one key."""

    place: int  # of the operator
    units: list[_SizedUnit]


class Packer:
    """Cuts one model into chunks of any size. What does not depend on the size is found once."""

    def __init__(self, operators: Sequence[Sequence[PackingInput]], strategy: ShardStrategy, world_size: int) -> None:
        """operators: in the order of the module tree. Raises ValueError if the strategy loses or repeats one."""
        inputs = [item for operator in operators for item in operator]
        self._spans_chunk = strategy.spans_chunk
        self._unit_alignment = ALIGNMENT if strategy.spans_chunk else world_size * ALIGNMENT
        self._world_size = world_size
        self._quantum = world_size * ALIGNMENT
        self._groups: list[tuple[Hashable, int, list[_Row]]] = []
        self.operator_bytes = [sum(item.spec.numel * item.itemsize for item in operator) for operator in operators]
        for key, itemsize in {item.key: item.itemsize for item in inputs}.items():
            of_key = [[item.spec for item in operator if item.key == key] for operator in operators]
            places = [place for place, specs in enumerate(of_key) if specs]
            units = _units_by_operator([of_key[place] for place in places], strategy)
            rows = [
                _Row(place, [self._sized(unit, itemsize) for unit in its])
                for place, its in zip(places, units, strict=True)
            ]
            self._groups.append((key, itemsize, rows))

    def cut(self, chunk_bytes: int) -> list[Cut]:
        """Chunks of at most `chunk_bytes`, in order of first use. Each parameter is in exactly one."""
        return self._cut(_Limit(chunk_bytes))

    def every_cut(self) -> Iterator[tuple[int, list[Cut]]]:
        """All ways to cut the model into chunks of one size, each with the least size that makes it, least first."""
        size: int | None = 1
        while size is not None:
            limit = _Limit(size)
            yield size, self._cut(limit)
            size = limit.next_bytes

    def num_units(self) -> int:
        """Of all chunks together, whatever their size."""
        return sum(len(row.units) for _, _, rows in self._groups for row in rows)

    def _cut(self, limit: _Limit) -> list[Cut]:
        cuts = [cut for group in self._groups for cut in self._fill(*group, limit)]
        return sorted(cuts, key=lambda cut: cut.place)  # stable: within an operator in the order of keys

    def seal(self, cuts: Sequence[Cut]) -> tuple[PackedChunk, ...]:
        """The same chunks, with every parameter's place."""
        return tuple(_seal(cut, self._spans_chunk, self._world_size) for cut in cuts)

    def exact_bytes(self) -> set[int]:
        """Payloads that hold one operator or one unit, and no more."""
        sizes: set[int] = set()
        for _, itemsize, rows in self._groups:
            for row in rows:
                sizes.add(itemsize * round_up(self._end_with(0, row.units), self._quantum))
                sizes.update(unit.payload_bytes for unit in row.units)
        return sizes

    def _fill(self, key: Hashable, itemsize: int, rows: list[_Row], limit: _Limit) -> list[Cut]:
        done: list[Cut] = []
        current: Cut | None = None
        for row in rows:
            small = []
            for unit in row.units:
                if limit.holds(unit.payload_bytes):
                    small.append(unit)
                else:
                    done.append(Cut(key, itemsize, row.place, True, [unit.specs], unit.end, unit.payload_bytes))
            if len(small) > 1 and current is not None:
                fits_into_one = limit.holds(itemsize * round_up(self._end_with(0, small), self._quantum))
                end = self._end_with(current.end, small)
                if fits_into_one and not limit.holds(itemsize * round_up(end, self._quantum)):
                    current = None
            for unit in small:
                if current is not None:
                    end = self._end_with(current.end, (unit,))
                    payload_bytes = itemsize * round_up(end, self._quantum)
                    if limit.holds(payload_bytes):
                        current.units.append(unit.specs)
                        current.end, current.payload_bytes = end, payload_bytes
                        continue
                current = Cut(key, itemsize, row.place, False, [unit.specs], unit.end, unit.payload_bytes)
                done.append(current)
        return done

    def _sized(self, unit: list[ParameterSpec], itemsize: int) -> _SizedUnit:
        end = 0
        for spec in unit:
            end = round_up(end, ALIGNMENT) + spec.numel
        return _SizedUnit(unit, end, itemsize * round_up(end, self._quantum))

    def _end_with(self, end: int, units: Iterable[_SizedUnit]) -> int:
        """Elements, if these units were added to as many as `end`."""
        for unit in units:
            end = round_up(end, self._unit_alignment) + unit.end
        return end


def pack(
    operators: Sequence[Sequence[PackingInput]], strategy: ShardStrategy, chunk_bytes: int, world_size: int
) -> tuple[PackedChunk, ...]:
    """Chunks of at most `chunk_bytes`, in order of first use. Each parameter of `operators` is in exactly one."""
    packer = Packer(operators, strategy, world_size)
    return packer.seal(packer.cut(chunk_bytes))


def _units_by_operator(
    operators: list[list[ParameterSpec]], strategy: ShardStrategy
) -> list[list[list[ParameterSpec]]]:
    """The strategy's units, each at the operator of its first parameter."""
    units = strategy.units(operators)
    check_units(strategy, operators, units)
    owner = {spec.name: index for index, operator in enumerate(operators) for spec in operator}
    groups: list[list[list[ParameterSpec]]] = [[] for _ in operators]
    for unit in units:
        if unit:
            groups[owner[unit[0].name]].append(unit)
    return groups


def _seal(cut: Cut, spans_chunk: bool, world_size: int) -> PackedChunk:
    units = [[spec for unit in cut.units for spec in unit]] if spans_chunk else cut.units
    names: list[str] = []
    offsets: list[int] = []
    laid_out: list[Unit] = []
    start = 0
    for unit in units:
        inside, numel = lay_out_unit([spec.numel for spec in unit], world_size)
        names += [spec.name for spec in unit]
        offsets += [start + offset for offset in inside]
        laid_out.append(Unit(start, numel))
        start += numel
    layout = ShardLayout(tuple(laid_out), world_size)
    return PackedChunk(cut.key, cut.itemsize, tuple(names), tuple(offsets), layout, cut.oversize)
