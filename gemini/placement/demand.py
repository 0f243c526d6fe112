"""A model's demand for memory, in numbers: the input of every placement policy. No tensor, no device, no rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple


class Tier(StrEnum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"


class Kind(StrEnum):
    """A chunk's states, each with a home of its own."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    OPTIM = "optim"  # everything that the optimizer keeps per element (exp_avg, exp_avg_sq, ...)


def kind_named(name: str) -> Kind:
    """The kind with this name. Raises ValueError."""
    try:
        return Kind(name)
    except ValueError:
        raise ValueError(f"{name!r} is no state of a model: name one of {', '.join(Kind)}") from None


WRAPPED_KINDS = (Kind.PARAM, Kind.GRAD, Kind.MASTER)
"""States that take memory when a model is wrapped. Optimizer state follows when the optimizer is made."""

OPTIM_STATES = 2
"""States per element that a plan counts until an optimizer is made: Adam's two moments."""


class StateHome(NamedTuple):
    """Where a plan has room for a chunk's optimizer state, and for how many states per element."""

    tier: Tier
    num_states: int = OPTIM_STATES


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of a chunk that cross the link in a step when its states rest on two tiers, on one rank."""

    read: int = 0  # parameters, if the update runs on the other tier and reads them
    written: int = 0  # parameters, if the update runs on the other tier
    summed: int = 0  # the reduced gradient, if the update runs on the other tier
    reduced: int = 0  # gradients of all micro-batches, to a home on the host and back for the next sum
    made_whole: int = 0  # parameters that rest whole on the host although each rank updates only a part of them


@dataclass(frozen=True)
class ChunkDemand:
    """One chunk's demand on this rank, in bytes."""

    payload_bytes: int  # full content on the device: a slot's worth
    home_bytes: dict[Kind, int]  # bytes at rest on this rank; a missing kind needs none
    oversize: bool  # needs a slot of the second size
    needs_slot: bool  # even with its parameters at home on the device, using it takes a slot (shards)
    needs_gradient_slot: bool  # likewise for its gradient
    may_keep_slot: bool = False  # the parameter home is one piece of the payload, so that both can share memory
    is_frozen: bool = False  # no step reads its master and optimizer state, which are kept for when it is unfrozen
    persists: bool = False  # the parameters must rest whole on the device: they never take a slot
    numel: int = 0  # elements of the payload
    link: LinkBytes = LinkBytes()
    optim_states: int = field(default=OPTIM_STATES, compare=False)  # per element; in `home_bytes`, if it has any

    def needs_slot_of(self, kind: Kind) -> bool:
        """Whether using its parameters (or gradient) takes a slot even where they are at home on the device.

        Local; raises nothing.
        """
        return self.needs_gradient_slot if kind is Kind.GRAD else self.needs_slot


@dataclass(frozen=True)
class Demand:
    """The demand of the whole model, chunks in order of first use."""

    chunks: tuple[ChunkDemand, ...]
    slot_bytes: tuple[int, int]  # regular, oversize (0: none)
    # Every pair is by size: regular slots first, then oversize ones.
    min_slots: tuple[int, int]
    gradient_slot_bytes: tuple[int, int]
    min_gradient_slots: tuple[int, int]
    scratch_bytes: int  # receive buffers of collectives
    slot_numel: tuple[int, int] = (0, 0)  # elements that a slot of each size may hold
    max_live_numel: int | None = None  # elements that all slots together may hold, kept ones included. None: no bound
    micro_batches: int = 1  # per step, as the settings say or earlier steps have shown
    max_host_bytes: int | None = None  # host budget, kept to if some placement can. None: no bound
    tiled_scratch_bytes: int | None = None  # enough if the largest weights' gradients are exchanged in tiles
    whole_scratch_bytes: int | None = None  # enough to exchange each gradient at once. None: `scratch_bytes` is

    def in_tiles(self) -> Demand:
        """This demand with the least scratch: see [Note: Tiles] in scratch.py. Itself if tiles would need no less.

        Local; raises nothing.
        """
        least, now = self.tiled_scratch_bytes, self.scratch_bytes
        if least is None or least >= now:
            return self
        return replace(self, scratch_bytes=least, whole_scratch_bytes=now)

    def at_once(self) -> Demand:
        """This demand with scratch to exchange each gradient at once. Local; raises nothing."""
        whole = self.whole_scratch_bytes
        return self if whole is None else replace(self, scratch_bytes=whole, whole_scratch_bytes=None)


_Homes = Sequence[dict[Kind, Tier]]
_Alike = list[tuple[ChunkDemand, dict[Kind, Tier], int]]


class _Groups:
    """Groups of identical chunks, cached for the last (chunks, homes) that were asked for."""

    def __init__(self) -> None:
        self._asked: tuple[Sequence[ChunkDemand], _Homes] = (), ()
        self._found: _Alike = []

    def of(self, chunks: Sequence[ChunkDemand], homes: _Homes) -> _Alike:
        """One member of each group and the group's size. Local.

        The caller must not write to `homes` afterwards: the cache compares objects, not contents.
        """
        before, had = self._asked
        if before is not chunks or had is not homes:
            # Group by identity: homes are dicts, which have no hash. `_asked` holds references to all members, so no id
            # is reused while the cache is valid.
            keys = list(zip(map(id, chunks), map(id, homes), strict=True))
            first = dict(zip(keys, zip(chunks, homes, strict=True), strict=True))
            self._asked, self._found = (chunks, homes), [(*first[key], count) for key, count in Counter(keys).items()]
        return self._found


@dataclass(frozen=True)
class Placement:
    """Every state's home, and the number of slots of each size."""

    # Equal chunks may share one dict, so nobody may write to it.
    homes: tuple[dict[Kind, Tier], ...]
    num_slots: tuple[int, int]
    num_gradient_slots: tuple[int, int]
    kept: frozenset[int] = frozenset()  # chunks with a permanent slot of their own, which contains their parameter home
    # Placements that differ only in their slots share homes, and through `dataclasses.replace` this cache too.
    groups: _Groups = field(default_factory=_Groups, compare=False, repr=False)

    def alike(self, demand: Demand) -> _Alike:
        """Group identical (demand, homes) pairs and count them, so that planning is linear in distinct chunks.

        Pairs are identical if they are the same two objects. `needs.demand_of` shares one object among equal chunks.

        Local; raises nothing.
        """
        return self.groups.of(demand.chunks, self.homes)

    def bytes_by_kind(self, demand: Demand, tier: Tier) -> dict[str, int]:
        """Bytes that this placement puts on a tier: states by kind, and on the device slots and scratch.

        Local; raises nothing.
        """
        found: dict[str, int] = {str(kind): 0 for kind in Kind}
        for chunk, homes, count in self.alike(demand):
            for kind, num_bytes in chunk.home_bytes.items():
                if homes[kind] is tier:
                    found[kind] += count * num_bytes
        if tier is Tier.DEVICE:
            # A kept slot contains the chunk's parameter home, which is counted above. Add what is around it.
            kept = (demand.chunks[index] for index in self.kept)
            around = sum(chunk.payload_bytes - chunk.home_bytes[Kind.PARAM] for chunk in kept)
            found["slots"] = around + _total(self.num_slots, demand.slot_bytes)
            found["gradient slots"] = _total(self.num_gradient_slots, demand.gradient_slot_bytes)
            found["scratch"] = demand.scratch_bytes
        return found

    def optim_home(self, demand: Demand, index: int) -> StateHome:
        """The home of the optimizer state of chunk `index`, which must have one.

        Local; raises KeyError if it has none.
        """
        return StateHome(self.homes[index][Kind.OPTIM], demand.chunks[index].optim_states)

    def device_bytes(self, demand: Demand) -> int:
        """Model data that this placement puts on the device, slots and scratch included. Local; raises nothing."""
        # Slots and scratch take their memory together at the first use, so their whole size counts at every moment.
        return sum(self.bytes_by_kind(demand, Tier.DEVICE).values())

    def live_numel(self, demand: Demand) -> int:
        """Elements that all slots may hold together, kept ones included. Local; raises nothing."""
        return sum(demand.chunks[index].numel for index in self.kept) + _total(self.num_slots, demand.slot_numel)

    def host_bytes(self, demand: Demand, kinds: Collection[Kind] = tuple(Kind)) -> int:
        """Bytes of these states at rest in host memory. Local; raises nothing."""
        by_kind = self.bytes_by_kind(demand, Tier.HOST)
        return sum(by_kind[kind] for kind in kinds)


def _total(counts: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Bytes of so many slots of both sizes."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
