"""Modelled seconds of a plan on a machine of given rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from gemini.placement.demand import Kind, Tier
from gemini.placement.packing import ChunkFacts
from gemini.placement.simulate import Exchange

if TYPE_CHECKING:
    from gemini.placement.plan import Plan
    from gemini.placement.predict import Predicted


# -- Rates: the bytes that a machine moves and the FLOPs that it computes per second, measured or published. Pure
# numbers.
#
# `gemini/monitor/rates.py` measures the rates of this machine, `gemini/placement/cost.py` has published ones, and a
# JSON file may have others (`Rates.to_json`). Only modelled seconds depend on them: no plan and no result does.


# One rank, or one node, has no such link to measure.
_MAY_BE_UNKNOWN = ("node_bytes_per_s", "network_bytes_per_s")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of one rank. Except for those between ranks, each holds while no other rank is busy.

    Args:
        source: the origin of the figures: "measured on ..." or "published by ...".
        flops_per_s: rate of matrix products on the device, by the dtype's name.
        device_memory_bytes_per_s: bytes read and written on the device.
        host_memory_bytes_per_s: the same in host memory.
        to_device_bytes_per_s: over the link from the host.
        to_host_bytes_per_s: over the link to the host.
        device_update_bytes_per_s: bytes that Adam's update reads and writes on the device.
        host_update_bytes_per_s: the same in host memory, with one rank's share of the cores.
        node_bytes_per_s: rate at which a rank sends to ranks of its node. None: unknown.
        network_bytes_per_s: rate at which a rank sends to other nodes. None: unknown.
        collective_s: seconds that a collective takes in addition to the time of its bytes.

    Raises ValueError for a number that is not positive and finite; `collective_s` may be 0.
    """

    source: str
    flops_per_s: Mapping[str, float]
    device_memory_bytes_per_s: float
    host_memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    device_update_bytes_per_s: float
    host_update_bytes_per_s: float
    node_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    collective_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(f"source must be a text, found {self.source!r}")
        if not isinstance(self.flops_per_s, Mapping) or not self.flops_per_s:
            raise ValueError(f"flops_per_s must have a number for each dtype, found {self.flops_per_s!r}")
        for dtype, value in self.flops_per_s.items():
            _check(f"flops_per_s of {dtype}", value)
        # The first two fields are no numbers, and are checked above.
        for each in fields(self)[2:]:
            value = getattr(self, each.name)
            if value is not None or each.name not in _MAY_BE_UNKNOWN:
                _check(each.name, value, may_be_zero=each.name == "collective_s")

    def to_json(self) -> dict[str, Any]:
        """The JSON object that `from_json` reads."""
        # `flops_per_s` may be any mapping, and json writes dicts only.
        return {each.name: getattr(self, each.name) for each in fields(self)} | {"flops_per_s": dict(self.flops_per_s)}

    @staticmethod
    def from_json(found: object) -> Rates:
        """Rates from a JSON object. Raises ValueError for an object that `to_json` would not have written."""
        names = [each.name for each in fields(Rates)]
        if not isinstance(found, dict):
            raise ValueError(f"rates are an object with the keys {', '.join(names)}, found {type(found).__name__}")
        # A misspelt key would otherwise be ignored, and the default taken in its place.
        unknown = sorted(set(found) - set(names))
        # A key that may be missing has a default: the rate is unknown, or the collective costs no extra time.
        missing = [name for name in names if name not in found and name not in (*_MAY_BE_UNKNOWN, "collective_s")]
        if unknown or missing:
            what = f"has no {missing[0]!r}" if missing else f"has {unknown[0]!r}, which is no rate"
            raise ValueError(f"the object {what}; its keys are {', '.join(names)}")
        return Rates(**found)


def _check(name: str, value: object, may_be_zero: bool = False) -> None:
    # JSON allows NaN and true, and Python takes a bool for an int: none of them is a rate.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not (value > 0 or (may_be_zero and value == 0)):  # type: ignore[operator]
        raise ValueError(f"{name} must be a finite number above 0, found {value!r}")


# -- Published figures of well-known machines, to plan for clusters that are not at hand. Nothing here is measured.
#
# Published figures are peaks. Real kernels, links and collectives reach a part of them, so modelled times are a floor
# and utilisations a ceiling. Launch times of collectives are not published, and count as 0.


THIS = "this"  # the name, on the command line, of the machine that it runs on


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One node, by the figures of its maker.

    Args:
        name: the name on the command line.
        ranks_per_node: the number of devices, one for each rank.
        device_bytes: memory of each device.
        host_bytes: memory of the node, shared by all of its ranks.
        rates: rates of one rank. A rate that the node's ranks share is divided by their number.
        source: the documents with the figures.
    """

    name: str
    ranks_per_node: int
    device_bytes: int
    host_bytes: int
    rates: Rates
    source: str


def _dgx(
    name: str,
    *,
    device_bytes: int,
    matrix_flops: float,
    tf32_flops: float,
    device_memory: float,
    nvlink: float,
    pcie: float,
    host_memory: float,
    network: float,
    source: str,
) -> Machine:
    """A node of eight devices. Bandwidths: bytes per second in one direction; `host_memory` is of the whole node."""
    rates = Rates(
        source=f"published figures of {name}, which are peaks",
        # fp32 weights: the rate of TF32, which torch uses if `allow_tf32` is set.
        flops_per_s={"bfloat16": matrix_flops, "float16": matrix_flops, "float32": tf32_flops},
        device_memory_bytes_per_s=device_memory,
        host_memory_bytes_per_s=host_memory / 8,
        to_device_bytes_per_s=pcie,
        to_host_bytes_per_s=pcie,
        device_update_bytes_per_s=device_memory,  # Adam is memory-bound
        host_update_bytes_per_s=host_memory / 8,
        node_bytes_per_s=nvlink,
        network_bytes_per_s=network,
    )
    return Machine(
        name=name, ranks_per_node=8, device_bytes=device_bytes, host_bytes=2 * 10**12, rates=rates, source=source
    )


MACHINES = {
    machine.name: machine
    for machine in (
        _dgx(
            "dgx-a100-80gb",
            device_bytes=80 * 10**9,
            matrix_flops=312e12,
            tf32_flops=156e12,
            device_memory=2039e9,
            nvlink=300e9,  # 600 GB/s in both directions
            pcie=32e9,  # gen 4, 64 GB/s in both directions
            host_memory=2 * 204.8e9,  # two sockets with eight channels of DDR4-3200 each
            network=25e9,  # eight adapters of 200 Gb/s
            source=(
                "NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB, dense); NVIDIA DGX A100 640GB datasheet; "
                "AMD EPYC 7742 product page (memory bandwidth)"
            ),
        ),
        _dgx(
            "dgx-h100",
            device_bytes=80 * 10**9,
            matrix_flops=989e12,
            tf32_flops=494e12,
            device_memory=3350e9,
            nvlink=450e9,  # 900 GB/s in both directions
            pcie=64e9,  # gen 5, 128 GB/s in both directions
            host_memory=2 * 307.2e9,  # two sockets with eight channels of DDR5-4800 each
            network=50e9,  # eight adapters of 400 Gb/s
            source=(
                "NVIDIA H100 Tensor Core GPU datasheet (SXM, dense: half of the figures with sparsity); NVIDIA DGX "
                "H100 datasheet; Intel Xeon Platinum 8480C (eight channels of DDR5-4800)"
            ),
        ),
        _dgx(
            "dgx-h200",
            device_bytes=141 * 10**9,
            matrix_flops=989e12,
            tf32_flops=494e12,
            device_memory=4800e9,
            nvlink=450e9,
            pcie=64e9,
            host_memory=2 * 307.2e9,
            network=50e9,
            source=(
                "NVIDIA H200 Tensor Core GPU datasheet (SXM, dense: half of the figures with sparsity); NVIDIA DGX "
                "H200 datasheet; Intel Xeon Platinum 8480C (eight channels of DDR5-4800)"
            ),
        ),
    )
}
"""Machines by name. Links have the rate of one direction: half of the figure that is published for both."""


# -- The bytes that a step moves and updates, by resource: the input of the cost model, from a plan's prediction.


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """Bytes of one rank in a step.

    Args:
        to_device_bytes: bytes over the link from the host.
        to_host_bytes: bytes over the link to the host.
        gathered_bytes: bytes of the payloads that are gathered from all ranks.
        num_gathers: the number of these gathers.
        exchanged_bytes: bytes of the gradient payloads that ranks exchange, in the dtype in which they travel.
        num_exchanges: the number of these exchanges.
        device_update_bytes: bytes that the optimizer's update reads and writes on the device.
        host_update_bytes: the same on the host.
    """

    to_device_bytes: int = 0
    to_host_bytes: int = 0
    gathered_bytes: int = 0
    num_gathers: int = 0
    exchanged_bytes: int = 0
    num_exchanges: int = 0
    device_update_bytes: int = 0
    host_update_bytes: int = 0


def moves_of(plan: Plan, predicted: Predicted | None = None) -> MovedBytes:
    """The moves of a training step in which every trained weight gets a gradient. Pure: local.

    predicted: the prediction of that step. None: `plan.predicted`.
    """
    predicted = predicted or plan.predicted
    links = predicted.bytes_by_link
    reduced = predicted.exchanged.get(Exchange.REDUCE, (0, 0))
    # Every exchange but a reduction is an all-gather.
    gathers = [found for what, found in predicted.exchanged.items() if what is not Exchange.REDUCE]
    updated = {Tier.DEVICE: 0, Tier.HOST: 0}
    its = zip(plan.packing.chunks, plan.demand.chunks, plan.placement.homes, strict=True)
    for facts, chunk, homes in its:
        if Kind.GRAD in homes:  # frozen chunks have no gradient and are not updated
            # An update runs on the tier of the optimizer state. A chunk without any, as with plain SGD, has such a tier
            # too.
            updated[homes[Kind.OPTIM]] += update_bytes(facts, chunk.optim_states)
    return MovedBytes(
        to_device_bytes=links.get("host->device", 0),
        to_host_bytes=links.get("device->host", 0),
        gathered_bytes=sum(num_bytes for _, num_bytes in gathers),
        num_gathers=sum(count for count, _ in gathers),
        exchanged_bytes=reduced[1],
        num_exchanges=reduced[0],
        device_update_bytes=updated[Tier.DEVICE],
        host_update_bytes=updated[Tier.HOST],
    )


def update_bytes(facts: ChunkFacts, optim_states: int) -> int:
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
    return facts.optim_layout.shard_numel * (states + master + weight + dtypes.rest.itemsize)


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

    @property
    def on_a_node(self) -> int:
        """Ranks that share one node."""
        return min(self.count, self.per_node)

    @property
    def num_nodes(self) -> int:
        """Nodes that are in use."""
        return self.count // self.on_a_node


@dataclass(frozen=True)
class ModelledStep:
    """The modelled seconds of one step.

    Args:
        parts: seconds by part: "forward and backward", "host to device", "device to host", "gathers", "exchanges",
            "update on the device", "update on the host". None: a rate that the part needs is unknown.
        flops: FLOPs of one rank's batch, forward and backward, recomputation included.
        model_flops: the same without recomputation.
        peak_flops_per_s: peak rate of the device in the dtype of the weights.
    """

    parts: Mapping[str, float | None]
    flops: float
    model_flops: float
    peak_flops_per_s: float

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
    "device": ("forward and backward", "update on the device"),
    "link to the device": ("host to device",),
    "link to the host": ("device to host",),
    "ranks": ("gathers", "exchanges"),
    "host": ("update on the host",),
}


def modelled_step(
    moves: MovedBytes, forward_flops: float, computed_again_flops: float, dtype: str, rates: Rates, ranks: Ranks
) -> ModelledStep:
    """The time of a step by these rates. A pure function: local.

    Args:
        moves: bytes that one rank moves and updates.
        forward_flops: FLOPs of the forward of one rank's batch. The backward takes twice as many.
        computed_again_flops: FLOPs of the forward that activation checkpointing runs again.
        dtype: dtype of matrix products, a key of `rates.flops_per_s`.
        rates: rates of one rank.
        ranks: the number of ranks and nodes.

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
    # With one rank nothing travels, so an unknown rate between ranks must not make a part unknown.
    if ranks.count > 1:
        gathers = all_gather_seconds(moves.gathered_bytes, ranks, rates)
        exchanges = exchange_seconds(moves.exchanged_bytes, ranks, rates)
        parts["gathers"] = None if gathers is None else gathers + moves.num_gathers * rates.collective_s
        parts["exchanges"] = None if exchanges is None else exchanges + moves.num_exchanges * rates.collective_s
    return ModelledStep(parts, flops, 3 * forward_flops, peak)


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
