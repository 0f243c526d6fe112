"""What a model asks of memory, in numbers: the input of every placement policy. No tensor, no device, no rank."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


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
"""What takes memory when a model is wrapped; optimizer state does when the optimizer comes."""

OPTIM_STATES = 2
"""States per element that placement counts on: Adam's two moments. What an optimizer keeps beyond goes to the host."""


@dataclass(frozen=True)
class LinkBytes:
    """What of a chunk crosses the link in a step because its states rest on two tiers, in bytes of one rank."""

    read: int = 0  # parameters, by an update on the other tier
    written: int = 0  # likewise
    summed: int = 0  # the reduced gradient, by an update on the other tier
    reduced: int = 0  # gradients of all micro-batches, on their way to a home on the host and back
    made_whole: int = 0  # parameters that rest on the host whole, while each rank updates a part of them


@dataclass(frozen=True)
class ChunkDemand:
    """One chunk's bytes on this rank."""

    payload_bytes: int  # full content on the device: a slot's worth
    home_bytes: dict[Kind, int]  # bytes at rest on this rank; a missing kind needs none
    oversize: bool  # needs a slot of the second size
    needs_slot: bool  # even with its parameters at home on the device, using it takes a slot (shards)
    needs_gradient_slot: bool  # likewise for its gradient
    may_keep_slot: bool = False  # its parameter home is one piece of its payload, so that both can share memory
    is_frozen: bool = False  # no step reads what it has of a master and optimizer state: kept for when it is unfrozen
    persists: bool = False  # its parameters must rest on the device, where they are whole: they never take a slot
    numel: int = 0  # elements of the payload
    link: LinkBytes = LinkBytes()

    def needs_slot_of(self, kind: Kind) -> bool:
        """Using its parameters, or its gradient, takes a slot even where they are at home on the device."""
        return self.needs_gradient_slot if kind is Kind.GRAD else self.needs_slot


@dataclass(frozen=True)
class Demand:
    """The whole model's, chunks in order of first use."""

    chunks: tuple[ChunkDemand, ...]
    slot_bytes: tuple[int, int]  # regular, oversize (0: none)
    min_slots: tuple[int, int]
    gradient_slot_bytes: tuple[int, int]
    min_gradient_slots: tuple[int, int]
    scratch_bytes: int  # receive buffers of collectives
    slot_numel: tuple[int, int] = (0, 0)  # elements that a slot of each size may hold
    max_live_numel: int | None = None  # elements that all slots together may hold, kept ones included. None: no bound
    micro_batches: int = 1  # of a step, as far as the settings tell or steps have shown
    max_host_bytes: int | None = None  # of states at rest there, if some placement keeps to it. None: no bound


_Homes = Sequence[dict[Kind, Tier]]
_Alike = list[tuple[ChunkDemand, dict[Kind, Tier], int]]


class _Groups:
    """Chunks that are alike, found once for all that is asked about the same chunks with the same homes."""

    def __init__(self) -> None:
        self._asked: tuple[Sequence[ChunkDemand], _Homes] = (), ()
        self._found: _Alike = []

    def of(self, chunks: Sequence[ChunkDemand], homes: _Homes) -> _Alike:
        """One of each group, and how many there are. Nobody writes to `homes` after the first question. Local."""
        before, had = self._asked
        if before is not chunks or had is not homes:
            keys = list(zip(map(id, chunks), map(id, homes), strict=True))
            first = dict(zip(keys, zip(chunks, homes, strict=True), strict=True))
            self._asked, self._found = (chunks, homes), [(*first[key], count) for key, count in Counter(keys).items()]
        return self._found


@dataclass(frozen=True)
class Placement:
    """Every state's home, and how many slots of each size there are."""

    homes: tuple[dict[Kind, Tier], ...]
    num_slots: tuple[int, int]
    num_gradient_slots: tuple[int, int]
    kept: frozenset[int] = frozenset()  # chunks with a slot of their own for good, in which their parameter home lies
    groups: _Groups = field(default_factory=_Groups, compare=False, repr=False)

    def alike(self, demand: Demand) -> _Alike:
        """Chunks with their homes, those of one object each together, with their number.

        A model of thousands of equal chunks has few such objects: see `needs.demand_of`.
        """
        return self.groups.of(demand.chunks, self.homes)

    def bytes_by_kind(self, demand: Demand, tier: Tier) -> dict[str, int]:
        """Model data that this placement puts on a tier: states by kind; on the device slots and scratch, too."""
        found: dict[str, int] = {str(kind): 0 for kind in Kind}
        for chunk, homes, count in self.alike(demand):
            for kind, num_bytes in chunk.home_bytes.items():
                if homes[kind] is tier:
                    found[kind] += count * num_bytes
        if tier is Tier.DEVICE:
            kept = (demand.chunks[index] for index in self.kept)
            around = sum(chunk.payload_bytes - chunk.home_bytes[Kind.PARAM] for chunk in kept)
            found["slots"] = around + _total(self.num_slots, demand.slot_bytes)
            found["gradient slots"] = _total(self.num_gradient_slots, demand.gradient_slot_bytes)
            found["scratch"] = demand.scratch_bytes
        return found

    def device_bytes(self, demand: Demand) -> int:
        """Model data that this placement puts on the device, slots and scratch included."""
        return sum(self.bytes_by_kind(demand, Tier.DEVICE).values())

    def live_numel(self, demand: Demand) -> int:
        """Elements that all slots may hold together, kept ones included."""
        return sum(demand.chunks[index].numel for index in self.kept) + _total(self.num_slots, demand.slot_numel)

    def host_bytes(self, demand: Demand, kinds: Collection[Kind] = tuple(Kind)) -> int:
        """Bytes of these states at rest in host memory."""
        by_kind = self.bytes_by_kind(demand, Tier.HOST)
        return sum(by_kind[kind] for kind in kinds)


def _total(counts: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Bytes of so many slots of both sizes."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))
