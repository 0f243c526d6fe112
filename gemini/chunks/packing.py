"""Packing: which parameter lies in which chunk, where. Numbers only.

Operators come in the order in which the module tree lists them. Their parameters are grouped by key (dtype,
trainable: only equal keys share a chunk), turned into units by the shard strategy, and units are laid one after
the other into chunks of at most `chunk_bytes`. The units of one operator go to one chunk if they fit into one,
so that no border cuts an operator; a unit larger than a chunk gets a chunk of its own, of the second slot size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from sharding import ParameterSpec, ShardLayout, ShardStrategy, Unit, check_units, lay_out_unit


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
    oversize: bool

    @property
    def payload_bytes(self) -> int:
        return self.layout.numel * self.itemsize


@dataclass
class _Filling:
    """A chunk being filled: its units so far, in the order given."""

    key: Hashable
    itemsize: int
    units: list[list[ParameterSpec]] = field(default_factory=list)


def pack(
    operators: Sequence[Sequence[PackingInput]], strategy: ShardStrategy, chunk_bytes: int, world_size: int
) -> list[PackedChunk]:
    """Chunks in order of first use. Each parameter of `operators` is in exactly one chunk."""
    inputs = {item.spec.name: item for operator in operators for item in operator}
    keys = list(dict.fromkeys(item.key for item in inputs.values()))
    chunks: list[tuple[int, PackedChunk]] = []  # (place of the chunk's first operator, chunk)
    for key in keys:
        of_key = [[item.spec for item in operator if item.key == key] for operator in operators]
        places = [place for place, specs in enumerate(of_key) if specs]
        groups = _units_by_operator([of_key[place] for place in places], strategy)
        itemsize = next(item.itemsize for item in inputs.values() if item.key == key)
        chunks += [
            (places[group], chunk)
            for group, chunk in _fill(groups, key, itemsize, strategy.spans_chunk, chunk_bytes, world_size)
        ]
    chunks.sort(key=lambda placed: placed[0])  # stable: within an operator in the order of keys
    return [chunk for _, chunk in chunks]


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


def _fill(
    groups: list[list[list[ParameterSpec]]],
    key: Hashable,
    itemsize: int,
    spans_chunk: bool,
    chunk_bytes: int,
    world_size: int,
) -> list[tuple[int, PackedChunk]]:
    done: list[tuple[int, PackedChunk]] = []
    current: tuple[int, _Filling] | None = None

    def close() -> None:
        nonlocal current
        if current is not None and current[1].units:
            done.append((current[0], _seal(current[1], spans_chunk, world_size, oversize=False)))
        current = None

    def bytes_of(units: list[list[ParameterSpec]]) -> int:
        merged = [[spec for unit in units for spec in unit]] if spans_chunk else units
        return itemsize * sum(lay_out_unit([s.numel for s in unit], world_size)[1] for unit in merged)

    for place, units in enumerate(groups):
        small = [unit for unit in units if bytes_of([unit]) <= chunk_bytes]
        for unit in units:
            if unit not in small:
                done.append((place, _seal(_Filling(key, itemsize, [unit]), spans_chunk, world_size, oversize=True)))
        together = bytes_of(small) <= chunk_bytes
        if together and current is not None and bytes_of([*current[1].units, *small]) > chunk_bytes:
            close()
        for unit in small:
            if current is not None and bytes_of([*current[1].units, unit]) > chunk_bytes:
                close()
            if current is None:
                current = place, _Filling(key, itemsize)
            current[1].units.append(unit)
    close()
    return sorted(done, key=lambda placed: placed[0])


def _seal(filling: _Filling, spans_chunk: bool, world_size: int, oversize: bool) -> PackedChunk:
    units = [[spec for unit in filling.units for spec in unit]] if spans_chunk else filling.units
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
    return PackedChunk(filling.key, filling.itemsize, tuple(names), tuple(offsets), layout, oversize)
