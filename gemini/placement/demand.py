"""What plans are about: tiers, kinds of states, dtypes, specs, workloads, and sizes in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import NamedTuple

# -- Byte sizes in text: "2GB" and "2G" are 2 * 10**9, "2GiB" and "2Gi" 2 * 2**30.
#
# A bare "2G" is taken for the smaller of the two sizes that people mean by it: a budget of less than was meant trains,
# and one of more runs out of memory.


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {unit.removesuffix("B"): size for unit, size in _UNITS.items() if unit != "B"}


def parse_bytes(value: int | str | float | None, name: str) -> int | None:
    """Bytes of `value`; None stays None. `name` is the argument named in errors.

    Raises TypeError for what is neither a whole number nor a string, ValueError for no size or a negative one.
    """
    if value is None:
        return None
    # Whoever writes 8.0 means GB, and would get 8 bytes.
    if isinstance(value, float):
        raise ValueError(
            f"{name}={value!r} is a fraction of a byte, or of what it does not say: write a size with its unit, such "
            "as '8GB', or whole bytes, such as 8 * 10**9"
        )
    # For Python a bool is an int, so True would be one byte.
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(f"{name} must be bytes (int) or a string such as '8GiB', found {type(value).__name__}")
    if isinstance(value, str):
        match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]+)\s*", value)
        if match is None or match[2].upper() not in _UNITS:
            valid = "B, KB, MB, GB, TB (powers of 10) or KiB, MiB, GiB, TiB (powers of 2)"
            raise ValueError(f"{name}={value!r} is not a size: write a number and one of {valid}")
        return int(float(match[1]) * _UNITS[match[2].upper()])
    if value < 0:
        raise ValueError(f"{name} must be a finite number of bytes >= 0, found {value}")
    return value


def format_bytes(num_bytes: int) -> str:
    """`num_bytes` for display: exact below 10 KiB, else four significant digits and a binary unit."""
    if abs(num_bytes) < 10 * 2**10:
        return f"{num_bytes} B"
    # At this point the number is at least 10 KiB, so one of the units fits.
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if abs(num_bytes) >= 2**power:
            return f"{num_bytes / 2**power:.4g} {unit}"
    raise AssertionError("unreachable")


def in_units(num_bytes: int) -> str:
    """` (20 KiB)`, to stand behind the exact number in an error; nothing where it would repeat the number."""
    words = format_bytes(num_bytes)
    return "" if words == f"{num_bytes} B" else f" ({words})"


# -- Dtypes for planning: a name and a number of bytes. No tensor and no torch.


@dataclass(frozen=True)
class Dtype:
    """A dtype by its name in torch."""

    name: str  # "bfloat16"
    itemsize: int  # bytes per element

    @property
    def is_half(self) -> bool:
        """Whether weights of this dtype have fp32 masters."""
        return self.name in ("float16", "bfloat16")

    @property
    def summed(self) -> Dtype:
        """In which ranks add gradients that travel in this dtype."""
        return FLOAT32 if self.is_half else self


FLOAT32 = Dtype("float32", 4)


@dataclass(frozen=True)
class ChunkDtypes:
    """The dtypes of one chunk's weights and of their gradients."""

    weight: Dtype
    travel: Dtype  # a gradient on its way between ranks
    rest: Dtype  # the reduced gradient
    sums: Dtype  # on its way between ranks: the sum of several gradients that a rank has not reduced yet
    widens: bool  # the reduced gradient becomes fp32 when a second micro-batch is added

    @property
    def narrows(self) -> bool:
        """Whether a gradient is rounded when it comes to rest."""
        return self.rest.is_half and self.rest != self.weight

    @property
    def rests_as_is(self) -> bool:
        """Whether the reduced gradient has the weights' dtype."""
        return self.rest == self.weight

    def arriving(self, is_alone: bool) -> Dtype:
        """In which a gradient leaves the device for a home on the host. is_alone: there is one rank."""
        # One rank copies it in the weights' dtype, unless it was rounded before: the narrower one crosses the link.
        return self.weight if is_alone and not self.narrows else self.rest


# -- A model's demand for memory, in numbers: the input of every placement policy. No tensor, no device, no rank.


class Tier(StrEnum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"  # of what the host has no room for; never of gradients


class Kind(StrEnum):
    """A chunk's states, each with a home of its own."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    OPTIM = "optim"  # everything that the optimizer keeps per element (exp_avg, exp_avg_sq, ...)


OF_OPTIMIZER = (Kind.MASTER, Kind.OPTIM)
"""States that move together: an update needs both, so one of them alone on the device would travel in every step."""


def kind_named(name: str) -> Kind:
    """The kind with this name. Raises ValueError."""
    try:
        return Kind(name)
    except ValueError:
        raise ValueError(f"{name!r} is no state of a model: name one of {', '.join(Kind)}") from None


WRAPPED_KINDS = (Kind.PARAM, Kind.GRAD, Kind.MASTER)
"""States that take memory when a model is wrapped. Optimizer state follows when the optimizer is made."""

OPTIM_STATES = 2
"""States per element that a plan counts until an optimizer is made: Adam's two moments.

Numbers of states are in states of full precision: moments of 8 bits count as 2 x 260 / 1,024."""


def optimizer_tier(homes: dict[Kind, Tier]) -> Tier:
    """Where a chunk's optimizer state rests, or would rest beside its parameters if it has none."""
    return homes.get(Kind.OPTIM, homes[Kind.PARAM])


def update_tier(tier: Tier) -> Tier:
    """Where a chunk is updated whose optimizer state rests on `tier`: from the disk it is brought to the host."""
    return Tier.HOST if tier is Tier.DISK else tier


class StateHome(NamedTuple):
    """Where a plan has room for a chunk's optimizer state, and for how many states per element."""

    tier: Tier
    num_states: float = OPTIM_STATES


@dataclass(frozen=True)
class LinkBytes:
    """Bytes of a chunk that cross the link in a step when its states rest on two tiers, on one rank."""

    read: int = 0  # parameters, if the update runs on the other tier and reads them
    written: int = 0  # parameters, if the update runs on the other tier
    summed: int = 0  # the reduced gradient, if the update runs on another tier than where it is
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
    may_be_on_disk: bool = True  # its parameters: no gradient rests in their home, and no step makes them whole there
    frees_gradient: bool = False  # the backward uses the gradient up, on the device: it never comes to rest
    persists: bool = False  # the parameters must rest whole on the device: they never take a slot
    numel: int = 0  # elements of the payload
    link: LinkBytes = LinkBytes()
    updated_numel: int = 0  # elements that this rank updates in a step
    optim_states: float = field(default=OPTIM_STATES, compare=False)  # per element; in `home_bytes`, if it has any

    @property
    def around_bytes(self) -> int:
        """What a kept slot takes beside the parameter home, which is a part of it."""
        return self.payload_bytes - self.home_bytes[Kind.PARAM]

    def needs_slot_of(self, kind: Kind) -> bool:
        """Whether using its parameters (or gradient) takes a slot even where they are at home on the device.

        Local; raises nothing.
        """
        return self.needs_gradient_slot if kind is Kind.GRAD else self.needs_slot


class Costs(NamedTuple):
    """What else takes time in a step, as the bytes that the link could carry meanwhile."""

    copy: int
    """To launch a copy over the link, with all that is done for it."""
    host_update: int
    """By which the update of an element takes longer on the host than on the device."""
    waits_for_fetch: bool
    """Kernels run beside a prefetch and wait for a fetch: bytes that find no slot ahead count twice."""


ON_THE_CPU = Costs(128 * 2**10, 0, False)
"""Of the emulated device: 10 us a launch at 12 GB/s, not measured. An update takes as long on either tier."""
WITH_STREAMS = Costs(4 * 2**20, 10, True)
"""Of an accelerator. One H200 with 16 cores and a link of 50 GB/s (`bash benchmarks/gpu.sh`, "7B in 40GiB"): the host
updates 4.5e9 elements in 0.9 s, against which the device's time is nothing. A fetch is taken at 0.08 ms of the thread
that launches all kernels: read off the trace of such a step, whose profiler slows that thread down."""


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
    costs: Costs = ON_THE_CPU  # of what a step does beside moving bytes
    holds_sums: bool = False  # homes of gradients have room for what a second backward of a step adds

    def in_tiles(self) -> Demand:
        """This demand with the least scratch: see [Note: Tiles] in needs.py. Itself if tiles would need no less.

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


def identities(chunks: Sequence[ChunkDemand], homes: _Homes) -> list[tuple[int, int]]:
    """A key for each chunk, which equal chunks share: homes are dicts, which have no hash. Local; raises nothing."""
    return list(zip(map(id, chunks), map(id, homes), strict=True))


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
            # `_asked` holds references to all members, so no id is reused while the cache is valid.
            keys = identities(chunks, homes)
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

    def around_bytes(self, demand: Demand) -> int:
        """What kept slots take beside the homes in them. Local; raises nothing."""
        return sum(demand.chunks[index].around_bytes for index in self.kept)

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
            found["slots"] = self.around_bytes(demand) + _total(self.num_slots, demand.slot_bytes)
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

    def disk_bytes(self, demand: Demand) -> int:
        """Bytes at rest on the disk. Local; raises nothing."""
        return sum(self.bytes_by_kind(demand, Tier.DISK).values())

    def host_bytes(self, demand: Demand, kinds: Collection[Kind] = tuple(Kind)) -> int:
        """Bytes of these states at rest in host memory. Local; raises nothing."""
        by_kind = self.bytes_by_kind(demand, Tier.HOST)
        return sum(by_kind[kind] for kind in kinds)


def _total(counts: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Bytes of so many slots of both sizes."""
    return sum(count * size for count, size in zip(counts, sizes, strict=True))


# -- Specs: the description of a model for planning. Names, shapes, dtypes and operators; no module and no tensor.


@dataclass(frozen=True)
class WeightSpec:
    """One distinct parameter. Tied parameters are one `WeightSpec`."""

    name: str  # the first of its names
    shape: tuple[int, ...]
    dtype: Dtype  # in its chunk
    trainable: bool  # its `requires_grad` when the model is wrapped
    is_rounded: bool = False  # given in another dtype than its chunk's 16 bits: the fp32 master holds more than it

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return prod(self.shape)


@dataclass(frozen=True)
class OperatorSpec:
    """A module whose weights are fetched and released together."""

    name: str
    weights: tuple[int, ...]  # places in `ModelSpec.weights`; a tied weight is in every operator that uses it
    ancestors: tuple[int, ...]  # places in `ModelSpec.operators` of those on the call stack around this one
    is_chosen: bool = False  # each rank's data decides whether that rank uses it
    edits_weights: bool = False  # its forward may write to its weights
    routes: bool = False  # ranks may use different parts of it
    is_compiled: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """All operators, parents before children, and all weights in order of their first operator."""

    weights: tuple[WeightSpec, ...]
    operators: tuple[OperatorSpec, ...]

    def first_uses(self) -> list[list[WeightSpec]]:
        """The weights that each operator is the first to use, by operator. Every weight is in one row only."""
        taken: set[int] = set()  # membership only
        rows = []
        for operator in self.operators:
            # A tied weight is packed with the first operator that uses it: it is one parameter and has one home.
            own = [place for place in dict.fromkeys(operator.weights) if place not in taken]
            taken.update(own)
            rows.append([self.weights[place] for place in own])
        return rows


# -- The workload of a batch of tokens besides model data: FLOPs, and the activations that autograd keeps. Pure.
#
# Both follow from the sizes of the modules' weights, for models of tokens such as transformers:
#
# - FLOPs of a forward: 2 for each element of a weight that a token is multiplied with, and 2 x length x (width of keys
# +   width of values) for the products of attention in each layer (Chowdhery et al. 2022, PaLM, appendix B, where
# forward   and backward together are 6 N + 12 L H Q T for each token). Only the experts that a token is routed to
# count. - Activations: an upper bound. A matrix (in, out) keeps its input, and what follows keeps at most two tensors
# of the   size of its output: 1 x in + 2 x out elements for each token, and 4 x out more if an activation function is
# written   as several operations (GPT-2's GELU). A norm keeps its input in fp32 and two outputs. Scores of attention
# are not   kept (fused kernels). The last matrix makes logits, of which a loss keeps three copies in fp32.   This is
# Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4, for any   module:
# their 34 s b h bytes of a GPT layer are at most 66 s b h by this rule, where norms keep fp32. - With activation
# checkpointing each block keeps only its input, and one block at a time keeps all that it recomputes.


LOSS_BYTES = 12
"""Bytes that a loss keeps for each logit: the value, the log-probability and the gradient, each in fp32."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The workload of one token through one model, in elements unless the name says bytes.

    Args:
        product_elements: elements of weights that the token is multiplied with.
        block_product_elements: those in blocks, which activation checkpointing computes again.
        attention_width: width of keys and values that the token is compared with at each position, over all layers.
        block_bytes: bytes of the activations that each block keeps, block by block.
        block_input_bytes: bytes of the input of one block.
        outer_bytes: bytes of the activations that modules outside of blocks keep.
        logit_bytes: bytes of the logits and of what the loss keeps of them.
        notes: sentences about parts of the model that these formulas do not know.
        covers_activations: whether the formulas cover the activations of this model.
    """

    product_elements: float
    block_product_elements: float
    attention_width: int
    block_bytes: tuple[int, ...]
    block_input_bytes: int
    outer_bytes: int
    logit_bytes: int
    notes: tuple[str, ...] = ()
    covers_activations: bool = True

    def forward_flops(self, tokens: int, length: int) -> float:
        """FLOPs of the forward of a batch of `tokens`, in sequences of `length`."""
        return 2.0 * tokens * (self.product_elements + length * self.attention_width)

    def computed_again_flops(self, tokens: int, length: int) -> float:
        """FLOPs that activation checkpointing of every block adds to that."""
        return 2.0 * tokens * (self.block_product_elements + length * self.attention_width)

    def activation_bytes(
        self, tokens: int, *, is_checkpointed: bool | Sequence[bool], num_without_graph: int = 0
    ) -> int:
        """An upper bound of the bytes that a batch of `tokens` keeps at once.

        Without checkpointing the peak is at the start of the backward: all blocks and the logits. With checkpointing it
        is the inputs of all blocks plus the larger of the logits and one block, because the logits are freed before the
        first block is recomputed.

        is_checkpointed: whether all blocks are checkpointed, or one flag for each. num_without_graph: the number of
            blocks before everything that is trained. They keep nothing; one at a time needs its activations.
        """
        flags = [is_checkpointed] * len(self.block_bytes) if isinstance(is_checkpointed, bool) else is_checkpointed
        pairs = list(zip(self.block_bytes, flags, strict=True))
        kept = sum(self.block_input_bytes if flag else each for each, flag in pairs[num_without_graph:])
        again = (each for place, (each, flag) in enumerate(pairs) if flag or place < num_without_graph)
        return tokens * (kept + self.outer_bytes + max(self.logit_bytes, max(again, default=0)))
