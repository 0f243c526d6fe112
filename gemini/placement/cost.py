"""Modelled seconds of a plan on a machine of given rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemini.placement.demand import Kind, Tier, update_tier
from gemini.placement.machines import Rates
from gemini.placement.packing import ChunkFacts
from gemini.placement.simulate import Exchange

if TYPE_CHECKING:
    from gemini.placement.plan import Plan
    from gemini.placement.predict import Predicted

# -- The bytes that a step moves and updates, by resource: the input of the cost model, from a plan's prediction.


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """Bytes of one rank in a step.

    Args:
        to_device_bytes: bytes over the link from the host.
        to_host_bytes: bytes over the link to the host.
        ahead_bytes: bytes over the link from the host that are fetched ahead: kernels do not wait for them.
        gathered_bytes: bytes of the payloads that are gathered from all ranks.
        num_gathers: the number of these gathers.
        nearby_bytes: bytes of the payloads that are gathered from a second copy, among `nearby_ranks` consecutive ones.
        num_nearby: the number of these gathers.
        nearby_ranks: ranks that hold such a copy. 1: there is none.
        exchanged_bytes: bytes of the gradient payloads that ranks exchange, in the dtype in which they travel.
        num_exchanges: the number of these exchanges.
        replicated_bytes: bytes of the sums of gradients that groups exchange, and of means that come back to replicas.
        num_replicated: the number of launches for that.
        across_bytes: bytes of updated weights that groups gather from one another, where all share optimizer states.
        num_across: the number of these gathers.
        num_replicas: groups of ranks that hold the same weights. All other bytes travel within one of them.
        device_update_bytes: bytes that the optimizer's update reads and writes on the device.
        host_update_bytes: the same on the host.
        from_disk_bytes: bytes of states that are read for their update.
        to_disk_bytes: bytes of states that are written after it.
    """

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    ahead_bytes: int = 0
    gathered_bytes: int = 0
    num_gathers: int = 0
    nearby_bytes: int = 0
    num_nearby: int = 0
    nearby_ranks: int = 1
    exchanged_bytes: int = 0
    num_exchanges: int = 0
    replicated_bytes: int = 0
    num_replicated: int = 0
    across_bytes: int = 0
    num_across: int = 0
    num_replicas: int = 1
    device_update_bytes: int = 0
    host_update_bytes: int = 0
    from_disk_bytes: int = 0
    to_disk_bytes: int = 0


def _num_groups(facts: ChunkFacts) -> int:
    return facts.num_groups if facts.in_groups else facts.layout.num_replicas


def moves_of(plan: Plan, predicted: Predicted | None = None) -> MovedBytes:
    """The moves of a training step in which every trained weight gets a gradient. Pure: local.

    predicted: the prediction of that step. None: `plan.predicted`.
    """
    predicted = predicted or plan.predicted
    links = predicted.bytes_by_link
    reduced = predicted.exchanged.get(Exchange.REDUCE, (0, 0))
    # Every exchange but a reduction is an all-gather.
    others = Exchange.REDUCE, Exchange.REPLICAS, Exchange.NEARBY, Exchange.MEAN_ACROSS, Exchange.GATHER_ACROSS
    gathers = [found for what, found in predicted.exchanged.items() if what not in others]
    nearby = predicted.exchanged.get(Exchange.NEARBY, (0, 0))
    across = predicted.exchanged.get(Exchange.GATHER_ACROSS, (0, 0))
    num_replicas = max((_num_groups(facts) for facts in plan.packing.chunks), default=1)
    # An exchange with replicas takes one launch, and one for each part that comes back.
    with_replicas, means = (predicted.exchanged.get(each, (0, 0)) for each in (Exchange.REPLICAS, Exchange.MEAN_ACROSS))
    launches = with_replicas[0] * (1 + num_replicas) + means[0]
    updated = {Tier.DEVICE: 0, Tier.HOST: 0}
    its = zip(plan.packing.chunks, plan.demand.chunks, plan.placement.homes, strict=True)
    for facts, chunk, homes in its:
        if Kind.GRAD in homes:  # frozen chunks have no gradient and are not updated
            # An update runs on the tier of the optimizer state. A chunk without any, as with plain SGD, has such a tier
            # too.
            updated[update_tier(homes[Kind.OPTIM])] += update_bytes(facts, chunk.optim_states)
    return MovedBytes(
        to_device_bytes=links.get("host->device", 0),
        to_host_bytes=links.get("device->host", 0),
        ahead_bytes=predicted.ahead_bytes,
        gathered_bytes=sum(num_bytes for _, num_bytes in gathers),
        num_gathers=sum(count for count, _ in gathers),
        nearby_bytes=nearby[1],
        num_nearby=nearby[0],
        nearby_ranks=plan.settings.num_in_group or plan.settings.secondary_group_size or 1,
        exchanged_bytes=reduced[1],
        num_exchanges=reduced[0],
        replicated_bytes=with_replicas[1] + means[1],
        num_replicated=launches,
        across_bytes=across[1],
        num_across=across[0],
        num_replicas=num_replicas,
        device_update_bytes=updated[Tier.DEVICE],
        host_update_bytes=updated[Tier.HOST],
        from_disk_bytes=links.get("disk->host", 0),
        to_disk_bytes=links.get("host->disk", 0),
    )


def update_bytes(facts: ChunkFacts, optim_states: float) -> int:
    """Bytes that an update reads and writes for a chunk on one rank.

    Adam, with two states, takes 26 bytes per parameter with split masters and 28 in fp32.
    """
    dtypes = facts.dtypes
    # The factors of 2 stand for a read and a write. The gradient is only read, once. fp64 weights have fp64 states, all
    # others have fp32 ones.
    states = 2 * optim_states * max(4, dtypes.weight.itemsize)
    master = 2 * facts.master_itemsize if dtypes.weight.is_half else 0
    # The update writes the weight. It reads the weight only where that is the master or the upper half of a split one.
    weight = dtypes.weight.itemsize * (1 if dtypes.weight.is_half and not facts.splits_master else 2)
    return round(facts.optim_layout.shard_numel * (states + master + weight + dtypes.rest.itemsize))


# -- The cost model: seconds of a step from bytes, FLOPs and rates. All of its figures are *modelled*, not measured.
#
# Each part of a step takes its bytes divided by its rate. Two sums bound the time of a run: nothing overlaps
# (`seconds`, as copies and kernels on one stream run), or everything hides behind the resource that is busy longest
# (`least_seconds`, which no schedule beats). Kernel launches and the Python around them are not modelled.
#
# Between ranks, N of them, r on a node, of a payload of B bytes:
#
#     an all-gather, by rings over all nodes   B (N-1)/N / link inside a node;  B (N-1)/N / (r x network) between nodes
#     an exchange, every rank with every other B (r-1)/N / link;                B (N-r)/N / network
#
# The slower of the two counts, because both run at once (Thakur, Rabenseifner and Gropp 2005 for the rings). In an
# exchange every rank sends each other rank the part that the other one sums: over the network a ring would send r times
# less.


@dataclass(frozen=True)
class Ranks:
    """The number of ranks and their distribution over nodes.

    Args:
        count: ranks in all.
        per_node: ranks on each node, which fill the nodes evenly.
    """

    count: int
    per_node: int

    def __post_init__(self) -> None:
        if self.count < 1 or self.per_node < 1:
            raise ValueError(f"ranks must be at least 1, found {self.count} with {self.per_node} on each node")
        # The formulas take all nodes to be alike, with as many ranks on each.
        if not self.fill_nodes(self.count):
            raise ValueError(f"{self.count} ranks do not fill nodes of {self.per_node}: give a multiple of it")

    def fill_nodes(self, count: int) -> bool:
        """Whether so many share one such node, or leave no place empty on several."""
        return count <= self.per_node or count % self.per_node == 0

    def divided(self, num_replicas: int) -> tuple[Ranks, Ranks]:
        """The ranks of one group of consecutive ones, and those that hold one shard: one of each of so many groups."""
        if num_replicas == 1:
            return self, Ranks(1, 1)
        size = self.count // num_replicas
        beside = self.per_node // size if self.per_node % size == 0 else 1
        return Ranks(size, math.gcd(size, self.per_node)), Ranks(num_replicas, math.gcd(num_replicas, beside))

    @property
    def on_a_node(self) -> int:
        """Ranks that share one node."""
        return min(self.count, self.per_node)

    @property
    def num_nodes(self) -> int:
        """Nodes that are in use."""
        return self.count // self.on_a_node


KERNELS = "kernels beside them"
_PASSES = 8
"""How often the kernels between the products read or write what a forward keeps: twice in it, twice where it is
computed again, and four times in the backward, which reads activations and gradients and writes gradients."""


@dataclass(frozen=True)
class ModelledStep:
    """The modelled seconds of one step.

    Args:
        parts: seconds by part: "forward and backward" (products), "kernels beside them", "host to device", "device to
            host", "gathers", "exchanges", "update on the device", "update on the host", "disk to host", "host to disk".
            None: a rate that it needs is unknown.
        flops: FLOPs of one rank's batch, forward and backward, recomputation included.
        model_flops: the same without recomputation.
        peak_flops_per_s: peak rate of the device in the dtype of the weights.
        ahead_share: the part of the bytes from the host that is fetched ahead.
        defers: whether the host's update runs beside the next forward.
    """

    parts: Mapping[str, float | None]
    flops: float
    model_flops: float
    peak_flops_per_s: float
    ahead_share: float = 0.0
    defers: bool = False

    @property
    def unknown(self) -> tuple[str, ...]:
        """Parts whose rate is unknown, which the sums leave out."""
        return tuple(name for name, seconds in self.parts.items() if seconds is None)

    @property
    def seconds(self) -> float:
        """The time of a step in which nothing overlaps."""
        return sum(seconds or 0.0 for seconds in self.parts.values())

    @property
    def least_seconds(self) -> float:
        """The time of a step in which everything overlaps: that of the resource that is busy longest."""
        # With one rank the parts have neither gathers nor exchanges.
        busy = {
            resource: sum(self.parts[part] or 0.0 for part in parts if part in self.parts)
            for resource, parts in _RESOURCES.items()
        }
        return max(busy.values())

    @property
    def likely_seconds(self) -> float:
        """The time of a step on an accelerator, as the runtime lets its parts run beside each other.

        Kernels wait for what is not fetched ahead. What goes to the host hides behind the backward, and a deferred
        update of the host behind the next forward, which has a third of the products, or a fourth with recomputation.
        """
        own = {name: seconds or 0.0 for name, seconds in self.parts.items()}
        kernels = own["forward and backward"] + own.get(KERNELS, 0.0)
        # Weights are fetched once in the forward and once in the backward.
        waited_for = own["host to device"] * (1 - self.ahead_share) / 2
        ahead, gathers = own["host to device"] * self.ahead_share / 2, own.get("gathers", 0.0) / 2
        # States of the disk stream through the host's update.
        update = max(own["update on the host"], own.get("disk to host", 0.0), own.get("host to disk", 0.0))
        in_forward = kernels * (self.model_flops / 3 / self.flops if self.flops else 0.0)
        forward = max(in_forward + waited_for, ahead, gathers, update if self.defers else 0.0)
        in_backward = kernels - in_forward + waited_for
        backward = max(in_backward, ahead, own["device to host"], gathers + own.get("exchanges", 0.0))
        return forward + backward + own["update on the device"] + (0.0 if self.defers else update)

    @property
    def utilisation(self) -> float:
        """Model FLOP utilisation with `seconds` (Chowdhery et al. 2022, PaLM, appendix B)."""
        return self._utilisation(self.seconds)

    @property
    def most_utilisation(self) -> float:
        """The same with `least_seconds`."""
        return self._utilisation(self.least_seconds)

    def _utilisation(self, seconds: float) -> float:
        return self.model_flops / seconds / self.peak_flops_per_s if seconds else 0.0


# Parts of one resource never overlap. Copies in the two directions of the link can, so each direction is a resource.
_RESOURCES = {
    "device": ("forward and backward", KERNELS, "update on the device"),
    "link to the device": ("host to device",),
    "link to the host": ("device to host",),
    "ranks": ("gathers", "exchanges"),
    "host": ("update on the host",),
    # Their rates are those beside each other.
    "reads of the disk": ("disk to host",),
    "writes to the disk": ("host to disk",),
}


def modelled_step(
    moves: MovedBytes,
    forward_flops: float,
    computed_again_flops: float,
    dtype: str,
    rates: Rates,
    ranks: Ranks,
    *,
    kept_bytes: int = 0,
    defers: bool = False,
) -> ModelledStep:
    """The time of a step by these rates. A pure function: local.

    Args:
        moves: bytes that one rank moves and updates.
        forward_flops: FLOPs of the forward of one rank's batch. The backward takes twice as many.
        computed_again_flops: FLOPs of the forward that activation checkpointing runs again.
        dtype: dtype of matrix products, a key of `rates.flops_per_s`.
        rates: rates of one rank.
        ranks: the number of ranks and nodes.
        kept_bytes: activations that a forward without checkpointing keeps, which norms, activation functions and
            residuals read and write. 0: they are not modelled.
        defers: whether the host's update runs beside the next forward.

    Raises ValueError if the rates have none for the dtype.
    """
    if dtype not in rates.flops_per_s:
        there = ", ".join(rates.flops_per_s)
        raise ValueError(f"flops_per_s has no rate for {dtype}: there are {there}")
    # A backward makes two products for each one of the forward: for the gradients of the input and of the weight.
    peak, flops = rates.flops_per_s[dtype], 3 * forward_flops + computed_again_flops
    parts: dict[str, float | None] = {
        "forward and backward": flops / peak,
        "host to device": moves.to_device_bytes / rates.to_device_bytes_per_s,
        "device to host": moves.to_host_bytes / rates.to_host_bytes_per_s,
        "update on the device": moves.device_update_bytes / rates.device_update_bytes_per_s,
        "update on the host": moves.host_update_bytes / rates.host_update_bytes_per_s,
    }
    if kept_bytes:
        passes = _PASSES if computed_again_flops else _PASSES - 2
        parts = {"forward and backward": parts.pop("forward and backward"), KERNELS: None, **parts}
        parts[KERNELS] = passes * kept_bytes / rates.device_memory_bytes_per_s
    # Without a disk its unknown rate must not make a part unknown.
    for part, num_bytes, rate in (
        ("disk to host", moves.from_disk_bytes, rates.disk_read_bytes_per_s),
        ("host to disk", moves.to_disk_bytes, rates.disk_write_bytes_per_s),
    ):
        if num_bytes:
            parts[part] = None if rate is None else num_bytes / rate
    # With one rank nothing travels, so an unknown rate between ranks must not make a part unknown.
    if ranks.count > 1:
        group, replicas = ranks.divided(moves.num_replicas)
        gathers = all_gather_seconds(moves.gathered_bytes, group, rates)
        if gathers is not None and moves.num_nearby:
            beside = Ranks(moves.nearby_ranks, math.gcd(moves.nearby_ranks, ranks.per_node))
            nearby = all_gather_seconds(moves.nearby_bytes, beside, rates)
            gathers = None if nearby is None else gathers + nearby + moves.num_nearby * rates.collective_s
        exchanges = exchange_seconds(moves.exchanged_bytes, group, rates)
        if exchanges is not None and moves.num_replicas > 1:
            over_replicas = exchange_seconds(moves.replicated_bytes, replicas, rates)
            launches_s = moves.num_replicated * rates.collective_s
            exchanges = None if over_replicas is None else exchanges + over_replicas + launches_s
        if gathers is not None and moves.num_across:
            across = all_gather_seconds(moves.across_bytes, replicas, rates)
            gathers = None if across is None else gathers + across + moves.num_across * rates.collective_s
        parts["gathers"] = None if gathers is None else gathers + moves.num_gathers * rates.collective_s
        parts["exchanges"] = None if exchanges is None else exchanges + moves.num_exchanges * rates.collective_s
    ahead = moves.ahead_bytes / moves.to_device_bytes if moves.to_device_bytes else 0.0
    return ModelledStep(parts, flops, 3 * forward_flops, peak, ahead, defers)


def all_gather_seconds(payload_bytes: int, ranks: Ranks, rates: Rates) -> float | None:
    """Seconds of an all-gather by rings, one for each network adapter of a node. None: a rate is unknown.

    Each ring passes through all ranks of a node before it goes on to the next node.
    """
    # Every rank has its own part already.
    received = payload_bytes * (ranks.count - 1) / ranks.count
    between = None if rates.network_bytes_per_s is None else rates.network_bytes_per_s * ranks.on_a_node
    return _slower(received, rates.node_bytes_per_s, received if ranks.num_nodes > 1 else 0, between)


def exchange_seconds(payload_bytes: int, ranks: Ranks, rates: Rates) -> float | None:
    """Seconds of an exchange, in which every rank sends each other rank its part. None: a rate is unknown."""
    inside = payload_bytes * (ranks.on_a_node - 1) / ranks.count
    outside = payload_bytes * (ranks.count - ranks.on_a_node) / ranks.count
    return _slower(inside, rates.node_bytes_per_s, outside, rates.network_bytes_per_s)


def _slower(inside: float, node: float | None, outside: float, network: float | None) -> float | None:
    """The slower of the two ways. None where bytes travel at an unknown rate."""
    if not inside and not outside:
        return 0.0
    if outside and network is None:
        return None
    if inside and node is None and not outside:
        return None
    # A rate measured between nodes includes the way inside them, so an unknown rate of the node adds nothing.
    within = inside / node if node is not None else 0.0
    return max(within, outside / network if network is not None else 0.0)
