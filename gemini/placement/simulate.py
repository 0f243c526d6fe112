"""A step without tensors: which payload and which gradient home is where, and the bytes that move."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from gemini.placement.decisions import Decisions
from gemini.placement.demand import ChunkDtypes, Dtype, Kind, Tier
from sharding import ShardLayout

# -- Counts the bytes that cross the links and that ranks exchange in a step, by purpose, without moving any.


class MoveReason(StrEnum):
    """Why bytes cross the link between the tiers.

    PAYLOAD: parameters are fetched into a slot. GRADIENT: a reduced gradient comes to rest, or a sum is resumed. SPILL:
    an open gradient leaves its slot for another one, and comes back. UPDATE: states travel to the update and home.
    """

    PAYLOAD = "payload"
    GRADIENT = "gradient"
    SPILL = "spill"
    UPDATE = "update"


class Exchange(StrEnum):
    """The collectives on model data.

    GATHER: shards of parameters become a payload. NEARBY: those of a second copy in a node do. REDUCE: gradients become
    shards of their mean. REPLICAS: groups that hold the same shards add their sums up. MEAN_ACROSS: where all ranks
    share optimizer states, each gets its part of the mean over groups. GATHER_ACROSS: a group's part of the weights
    comes together. WHOLE_GRADIENT and WHOLE_WEIGHT: every rank computed a part, and all ranks gather the whole.
    """

    GATHER = "gather"
    NEARBY = "gather in the node"
    REDUCE = "reduce"
    REPLICAS = "reduce over replicas"
    MEAN_ACROSS = "reduce across groups"
    GATHER_ACROSS = "gather across groups"
    WHOLE_GRADIENT = "gather of reduced gradients"
    WHOLE_WEIGHT = "gather of updated weights"


class Traffic:
    """The traffic of one rank, counted."""

    def __init__(self) -> None:
        self.copies: Counter[tuple[str, MoveReason]] = Counter()  # bytes by link ("host->device") and purpose
        self.launches: Counter[Exchange] = Counter()
        self.exchanged: Counter[Exchange] = Counter()  # bytes of payloads that are filled or sent
        self.ahead_bytes = 0  # of the copies to the device, those that begin before they are waited for

    def copy(self, source: Tier, target: Tier, num_bytes: int, purpose: MoveReason) -> None:
        """Count a copy. A copy within one tier crosses no link and is not counted."""
        # Without bytes no entry is made, so that `copies` names only links over which something goes.
        if source is not target and num_bytes:
            self.copies[f"{source}->{target}", purpose] += num_bytes

    def exchange(self, what: Exchange, num_bytes: int, launches: int = 1) -> None:
        """Count collectives in which all ranks together fill, or send, a payload of `num_bytes`."""
        self.launches[what] += launches
        self.exchanged[what] += num_bytes

    def reduce(self, layout: ShardLayout, dtypes: ChunkDtypes, launches: int) -> None:
        """Count the reduction of a gradient: in the group of ranks that share the shards, then over the replicas."""
        self.exchange(Exchange.REDUCE, layout.traveling_bytes(layout.numel, dtypes.travel.itemsize), launches)
        if layout.num_replicas > 1:
            self.exchange_with_replicas(layout, dtypes.rest, launches, dtypes.travel)

    def exchange_with_replicas(
        self, layout: ShardLayout, rest: Dtype, launches: int, travel: Dtype | None = None
    ) -> None:
        """Count the exchange of a shard over the replicas. travel: the dtype before the sum; None: `rest`."""
        # A sum is sent in the dtype in which it is added, and comes back in that in which it rests.
        summed = (rest if travel is None else travel).summed
        both = (layout.traveling_bytes(layout.shard_numel, each.itemsize) for each in (summed, rest))
        self.exchange(Exchange.REPLICAS, sum(both), launches)

    def clear(self) -> None:
        """Count from zero."""
        self.copies.clear()
        self.launches.clear()
        self.exchanged.clear()
        self.ahead_bytes = 0


class PayloadTraffic:
    """What `PayloadRules` has a simulated run do: it counts the bytes of each fetch. An eviction moves none."""

    def __init__(self, plan: Decisions, traffic: Traffic) -> None:
        self._facts = plan.packing.chunks
        self._tiers = [homes[Kind.PARAM] for homes in plan.placement.homes]
        self._fills: dict[int, int] = {}  # chunks on their way whose second copy they fill: its bytes
        self._traffic = traffic

    def depart(
        self, chunk: int, lane: int, *, ahead: bool = False, only_own: bool = False, nearby: bool = False
    ) -> None:
        """Each rank copies its own part over the link. The other parts come from the other ranks."""
        facts = self._facts[chunk]
        secondary, itemsize = facts.secondary_layout, facts.dtypes.weight.itemsize
        if secondary is not None and nearby:
            self._traffic.exchange(Exchange.NEARBY, facts.payload_bytes)
            self._copy(chunk, secondary.shard_numel * itemsize, MoveReason.PAYLOAD, ahead)
            return
        if secondary is not None:
            self._fills[chunk] = secondary.shard_numel * itemsize
        layout, purpose = facts.home_layout, MoveReason.PAYLOAD
        # Every rank holds the chunk whole, and copies what it has updated.
        if only_own:
            layout, purpose = facts.layout, MoveReason.UPDATE
        elif facts.in_groups and secondary is not None:
            count = sum(unit.numel > 0 for unit in secondary.units)
            self._traffic.exchange(Exchange.GATHER_ACROSS, secondary.shard_numel * itemsize, count)
            self._traffic.exchange(Exchange.NEARBY, facts.payload_bytes)
        elif layout.world_size > 1:
            traveling = facts.fetch_layout.traveling_bytes(facts.layout.numel, facts.itemsize)
            self._traffic.exchange(Exchange.GATHER, traveling)
        self._copy(chunk, layout.shard_numel * itemsize, purpose, ahead)

    def _copy(self, chunk: int, num_bytes: int, purpose: MoveReason, ahead: bool) -> None:
        self._traffic.copy(self._tiers[chunk], Tier.DEVICE, num_bytes, purpose)
        if ahead and self._tiers[chunk] is not Tier.DEVICE:
            self._traffic.ahead_bytes += num_bytes

    def arrive(self, chunk: int) -> None:
        """All bytes were counted when they departed, but for those of the second copy in the node."""
        if chunk in self._fills:
            self._traffic.copy(Tier.DEVICE, self._tiers[chunk], self._fills.pop(chunk), MoveReason.PAYLOAD)

    def refusal(self, chunk: int) -> Exception:
        """No plan has too few slots for its schedule."""
        return AssertionError(f"chunk {chunk} finds no slot that is not in use")

    def evict(self, chunk: int, successor: int) -> None:
        """The home has the same weights."""
