"""A chunk: its facts, its homes on the tiers, its parameters' states and what they show meanwhile."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, partial
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from gemini.memory.memory import RankMemory
from gemini.memory.modes import untracked
from gemini.memory.slot import KeptSlot, Slot
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Region, wait_on_host, wait_on_stream
from gemini.placement.demand import Kind, Tier
from gemini.ranks.parts import TensorPart, gathered, is_dtensor
from optim import is_dense
from sharding import Piece, ShardLayout

# -- Facts about a chunk on one rank, which are fixed when the chunk is made, and what follows from them.


@dataclass(eq=False, kw_only=True)
class LocalFacts:
    """Facts about a chunk on this rank that never change. `Final` makes mypy refuse an assignment."""

    index: Final[int]
    dtype: Final[torch.dtype]
    layout: Final[ShardLayout]
    oversize: Final[bool]
    rank: Final[int]
    home_layout: Final[ShardLayout]  # of the parameter home: `layout`, or one rank's if every rank holds it whole
    optim_layout: Final[ShardLayout]  # likewise, of the reduced gradient, master and optimizer state
    fetch_layout: Final[ShardLayout]  # `layout`, as the weights travel when they are fetched
    grad_layout: Final[ShardLayout]  # likewise, of gradients that are reduced
    travel_dtype: Final[torch.dtype]  # of gradients between ranks
    gradient_dtype: Final[torch.dtype]  # of the reduced gradient at rest
    sum_dtype: Final[torch.dtype]  # of sums of several unreduced gradients between ranks
    secondary_layout: Final[ShardLayout | None] = None  # of the second copy in the node, behind the parameter home
    in_groups: Final[bool] = False  # gradients are shared in groups of ranks, and optimizer states by all
    replica: Final[int] = 0  # which of the replicas of its shard this rank holds: the first speaks for all
    exchange_bytes: Final[int] = 0  # of scratch, with which ranks exchange its gradient at once
    widens: Final[bool] = False  # the reduced gradient becomes fp32 when a second micro-batch is added
    narrows: Final[bool] = False  # the reduced gradient is rounded to `gradient_dtype` before it is stored
    splits_master: Final[bool] = False  # bf16: the fp32 master is the parameter home and the int16 remainders beside it
    may_lend_home: Final[bool] = False  # the parameter home may hold the reduced gradient between backward and step
    is_fine: Final[bool] = False  # many small parameters: Python's cost for each outweighs moving the bytes
    is_chosen: Final[bool] = False  # routing chooses which of its parameters are used, on each rank from its data

    @property
    def numel(self) -> int:
        return self.layout.numel

    @cached_property
    def payload_bytes(self) -> int:
        return self.layout.numel * self.dtype.itemsize

    @cached_property
    def optim_numel(self) -> int:
        """Number of elements that this rank updates."""
        return self.optim_layout.shard_numel

    @property
    def is_stepped_whole(self) -> bool:
        """Every rank updates the whole chunk, and holds its whole reduced gradient, master and optimizer state."""
        return self.optim_layout.world_size == 1

    @property
    def secondary_rank(self) -> int:
        """Which of the shards of the second copy in its node this rank holds."""
        assert self.secondary_layout is not None
        if self.in_groups:  # ranks are counted by their places in the groups
            return self.rank // self.num_groups
        return self.rank % self.secondary_layout.world_size

    @property
    def num_groups(self) -> int:
        """Groups of ranks that share gradients."""
        return self.layout.world_size // self.grad_layout.world_size

    @property
    def rest_numel(self) -> int:
        """Elements of the reduced gradient at rest, while backwards add to it."""
        return self.grad_layout.shard_numel if self.in_groups else self.optim_numel

    @property
    def arrives_exactly(self) -> bool:
        """Whether a payload that is fetched has the values of the homes, and not values near them."""
        return self.fetch_layout.wire is None

    @cached_property
    def is_updated_in_parts(self) -> bool:
        """Whether every rank keeps the weights whole and updates a part of them."""
        return self.home_layout.world_size < self.optim_layout.world_size

    @property
    def master_dtype(self) -> torch.dtype:
        """The dtype of the MASTER home: fp32 for whole masters, int16 for the remainders of split ones."""
        return torch.int16 if self.splits_master else torch.float32

    @cached_property
    def home_slices(self) -> tuple[Piece, ...]:
        """The elements that this rank updates, in its parameter home: `payload_start` is an offset in the home."""
        if self.home_layout.world_size == self.optim_layout.world_size:
            return (Piece(0, 0, self.optim_numel),)
        return self.layout.slices(self.rank)  # whole weights, sharded optimizer state


# -- A parameter's place in its chunk's payload, and the conversion between its shape and a flat run of elements.


@dataclass(eq=False)
class ParamPlace:
    """A parameter's place. Its elements are contiguous in the payload, in the order of its strides."""

    name: str  # the first of its names in the plain module
    position: int  # index among the chunk's parameters
    offset: int  # in the payload, in elements
    shape: torch.Size
    stride: tuple[int, ...]  # dense, see `dense_stride`

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def in_payload(self) -> slice:
        """The parameter's elements as a slice of a flat payload."""
        return slice(self.offset, self.offset + self.numel)

    def view(self, payload: Tensor) -> Tensor:
        """The parameter as a view of `payload`."""
        # The offset of `as_strided` counts from the start of the storage, where a payload need not begin.
        return torch.as_strided(payload, self.shape, self.stride, payload.storage_offset() + self.offset)

    def shaped(self, flat: Tensor) -> Tensor:
        """The parameter as a view of `flat`, (numel,), which holds its elements alone."""
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset())

    def laid_out(self, value: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """(numel,) the elements of `value`, which has the parameter's shape, in payload order.

        A view of `value` if its strides match already. A parameter that fetches itself is copied.
        """
        dtype, device = dtype or value.dtype, device or value.device
        if type(value) is not Tensor or (value.dtype, value.device, value.stride()) != (dtype, device, self.stride):
            value = torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device).copy_(value)
        # Not `view(-1)`: the elements are dense, but their strides may be those of a transposed weight.
        return torch.as_strided(value, (self.numel,), (1,), value.storage_offset())


# -- The states of a chunk's parameters: who holds memory in each of them, and which transitions are legal.


class ParamState(Enum):
    """Where a chunk's parameters are.

    RELEASED: in the home only, as this rank's shard or whole. There is no payload, and the parameters show an expanded
        NaN.
    GATHERED: in a payload beside the home: in a slot, until it is evicted or, while a model is built, in memory of its
        own.
    RESIDENT: in the home, which is on the device and which this rank holds whole: the home is the payload.
    HOLDS_GRAD: in the fp32 master only. The part of the home that this rank updates holds the reduced gradient
        (`reuse_fp16_shard`), and there is no payload.
    GATHERED_BESIDE_GRAD: in a payload in a slot of the pool, while the home holds the reduced gradient. Once the slot
        is given up the parameters are in the fp32 master only.

    [Note: Lent homes] in placement/gradient_rules.py says when a home holds the gradient.
    """

    RELEASED = "released"
    GATHERED = "gathered"
    RESIDENT = "resident"
    HOLDS_GRAD = "holding the gradient"
    GATHERED_BESIDE_GRAD = "gathered beside the gradient"


NEXT = {
    ParamState.RELEASED: (ParamState.GATHERED, ParamState.RESIDENT, ParamState.HOLDS_GRAD),
    ParamState.GATHERED: (ParamState.RELEASED, ParamState.GATHERED_BESIDE_GRAD),
    ParamState.RESIDENT: (ParamState.RELEASED, ParamState.HOLDS_GRAD),
    # No fetch is possible before the parameters are restored: the home has no weights to copy or to send.
    ParamState.HOLDS_GRAD: (ParamState.RELEASED, ParamState.RESIDENT),
    ParamState.GATHERED_BESIDE_GRAD: (ParamState.GATHERED, ParamState.HOLDS_GRAD),
}
"""The legal transitions. `Chunk.become` raises for any other."""


# -- The placeholder that a parameter shows while its chunk is released: its true shape over a single NaN.
#
# [Note: Guarded placeholders] A released parameter's `__torch_function__` fetches it before a function reads it. But
# torch does not call it everywhere: `torch.tensor(released)`, a function that takes a released scalar for a number, or
# `plain.weight.data = released` would go on with the NaN. A placeholder therefore carries a dispatch key that torch
# reserves for wrappers in its own tests. An operation that meets the key goes to `access/released.py` before any kernel
# or autograd. Assigning `.data` transfers the dispatch keys with the memory: a parameter has this key exactly while it
# shows a placeholder, and a parameter that is bound to its payload costs what a plain one does.


GUARD = "TESTING_ONLY_GenericWrapper"
_KEY = torch._C._dispatch_key_parse(GUARD)
_KEYS = torch._C.DispatchKeySet(_KEY)

# Entering and leaving `unguarded()` as plain calls, in a seventh of its time: for loops over a chunk's parameters.
lift_guard: Callable[[], None] = partial(torch._C._dispatch_tls_set_dispatch_key_excluded, _KEY, True)
set_guard: Callable[[], None] = partial(torch._C._dispatch_tls_set_dispatch_key_excluded, _KEY, False)

# torch's own setter. Inside a forward `parameter.data = value` is a write of the user's, see access/full_access.py.
set_own_data: Callable[[Tensor, Tensor], None] = cast(Any, Tensor).data.__set__


class _Keyed(Tensor):
    """A wrapper class. torch lets Python add dispatch keys only to tensors whose class has a `__torch_dispatch__`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Torch asks a vendor's device (PrivateUse1) whether `.data =` is possible by an operation, which comes here.
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True
        raise AssertionError("a placeholder keeps none of these")


def unguarded() -> Any:
    """A context in which this thread's operations on placeholders are torch's own; for shapes and `.data =` only."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def set_data(parameter: Tensor, value: Tensor) -> None:
    """Assign `parameter.data = value`, where one of the two is, or shows, a placeholder."""
    with unguarded():
        set_own_data(parameter, value)


def placeholder(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """A tensor of `shape` with one element everywhere: NaN, or 0 for integers.

    Parameters with the same dtype, device and shape may share it.
    """
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    # Without `untracked`, wrapping in inference mode fails: torch then calls the wrapper's `__torch_dispatch__`.
    with untracked(), unguarded():
        memory = torch.full((), nothing, dtype=dtype, device=device)
        keyed = torch.Tensor._make_wrapper_subclass(_Keyed, (), dtype=dtype, device=device, _extra_dispatch_keys=_KEYS)
        empty = torch.empty((), dtype=dtype, device=device)
        # Assigning `.data` transfers the guard key to a plain tensor, without the keys of the wrapper class.
        empty.data = keyed
        # The wrapper has brought no memory. `set_` changes the storage and leaves the key.
        return empty.set_(memory.untyped_storage(), 0, (), ()).expand(shape)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of `tensor` in a payload: its own if its elements are dense in memory, else contiguous ones."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def have_one_order(one: Sequence[int], other: Sequence[int], shape: torch.Size) -> bool:
    """Whether the elements of `shape` come in the same order in memory with either strides."""
    # A stride along one element reaches none, and a tensor without elements has no order.
    return not shape.numel() or all(a == b for a, b, size in zip(one, other, shape, strict=True) if size > 1)


# -- The memory of a chunk's states on this rank: a home for each, and the slot of its own that some chunks have.


@dataclass(eq=False, kw_only=True)
class ChunkHomes(LocalFacts):
    """A chunk's facts and homes. Nothing else writes `homes` and `own_slot`."""

    homes: dict[Kind, Region] = field(default_factory=dict)
    own_slot: KeptSlot | None = None  # a slot that only this chunk uses; the parameter home is a part of it

    def names(self) -> str:
        """See `Chunk`."""
        raise NotImplementedError

    def allocate_home(self, kind: Kind, tier: Tier, memory: RankMemory, num_bytes: int) -> None:
        """Take zeroed memory for the state `kind`. Raises BudgetError."""
        # A GRAD home may have fp32 sums at its end. The plan counts them in the bytes, and `ChunkGradient` views them
        # as fp32.
        dtype = {Kind.MASTER: self.master_dtype, Kind.GRAD: self.gradient_dtype}.get(kind, self.dtype)
        self.homes[kind] = memory.allocate(tier, num_bytes // dtype.itemsize, dtype, kind, self)

    def free_home(self, kind: Kind, memory: RankMemory) -> None:
        """Free the memory of the state `kind`, if it has any. Nothing may show or need it any more."""
        home = self.homes.pop(kind, None)
        if home is not None:
            memory.free(home, kind)

    def hand_out_home(self) -> tuple[Region, KeptSlot | None]:
        """Give the parameter home, and the own slot that it is a part of, to the caller, who moves the weights."""
        home, slot = self.homes.pop(Kind.PARAM), self.own_slot
        self.own_slot = None
        return home, slot

    def take_home_back(self, home: Region, slot: KeptSlot | None) -> None:
        """Have again what `hand_out_home` gave: the move found no memory."""
        self.own_slot, self.homes[Kind.PARAM] = slot, home

    def keep_slot(self, tier: MemoryTier) -> None:
        """Take a slot for good and move the parameter home, if there is one, into it. Raises BudgetError."""
        # Only chunks of one unit keep a slot: then this rank's shard is one part of the payload, and can lie inside it.
        (own,) = self.layout.slices(self.rank)
        start, end = own.payload_start, own.payload_start + own.numel
        itemsize = self.dtype.itemsize
        slot = KeptSlot(tier, self.payload_bytes, slice(start * itemsize, end * itemsize), self.dtype)
        # A home that is there lies inside the old slot, which the caller closes once no view shows it.
        before = self.homes.get(Kind.PARAM)
        if before is not None:
            wait_on_stream(before)
            slot.shard.flat.copy_(before.flat)
        self.own_slot, self.homes[Kind.PARAM] = slot, slot.shard

    def renew_own_slot(self, tier: MemoryTier) -> None:
        """Replace the memory of the own slot, without ever holding two slots: the shard waits in host memory."""
        assert self.own_slot is not None
        home = self.homes.pop(Kind.PARAM)
        wait_on_host(home)
        # The copy blocks, so the old slot may be closed right after it.
        shard = home.flat.to("cpu", copy=True)
        del home  # it would keep the memory of the old slot
        self.own_slot.close()
        self.keep_slot(tier)
        self.homes[Kind.PARAM].flat.copy_(shard)

    def close_own_slot(self) -> None:
        """Give back the own slot, and the parameter home, which is a part of it, for good."""
        assert self.own_slot is not None
        self.own_slot.close()
        del self.homes[Kind.PARAM]
        self.own_slot = None

    @property
    def lends_home(self) -> bool:
        """The reduced gradient rests in the parameter home. If the plan knows of micro-batches, it has its own home."""
        return self.may_lend_home and Kind.GRAD not in self.homes

    def lendable(self) -> Region:
        """(optim_numel,) the part of the home that this rank updates. It is contiguous wherever a home is lent."""
        home = self.homes[Kind.PARAM]
        if self.home_layout.world_size == self.optim_layout.world_size:
            return home[: self.optim_numel]
        # The home has the whole payload here, of which this rank updates its slice, as at stages 1 and 2.
        (own,) = self.layout.slices(self.rank)
        return home[own.in_payload]


# -- What a chunk's parameters show of its payload, and how often it was updated. Who uses it knows `PayloadRules`.
#
# Nothing else writes these fields. `Chunk` has them, by inheritance, and nothing is moved here.


@dataclass(eq=False, kw_only=True)
class ChunkUse:
    """The part of a chunk's state that changes with each use."""

    bound: bool = False  # the parameters' `.data` are views of the payload
    plain: bool = False  # the parameters' class is nn.Parameter, not the released class
    stays: bool = False  # gathered until the next update: see [Note: Staying chunks] in runtime/params.py
    num_updates: int = 0  # optimizer steps so far; backward through a graph from before the last one raises

    def note_bound(self) -> None:
        """The parameters' `.data` were made views of the payload."""
        self.bound = True

    def note_update(self) -> None:
        """The weights were given new values, by a step or by a user: a backward through an older graph raises."""
        self.num_updates += 1


# -- A chunk and its states.
#
# A chunk knows its parameters, where they lie in its payload, how the payload is divided over the ranks, and which
# memory holds each of its states on this rank. It moves nothing: the stores do.


# A getter as a function: `map` then reads the counters of many parameters in C.
_version_of: Callable[[Tensor], int] = cast(Any, Tensor)._version.__get__


@dataclass(eq=False, kw_only=True)
class ManagedParameter(ParamPlace):
    """A parameter and its place in the chunk. `index` numbers the model's distinct parameters in the order of chunks.

    The reference to the parameter is weak. The chunks of a wrapped model keep their parameters alive in `raw`. While a
    model is built a parameter belongs to its module alone: when the module drops it, its shards are freed too. A weak
    reference also makes `torch.utils.swap_tensors`, which would swap values behind our back, refuse the parameter.
    """

    index: int
    reference: weakref.ref[nn.Parameter]
    chunk: Chunk
    placeholder: Tensor = field(repr=False)  # expanded NaN of the true shape, on the compute device
    requires_grad: bool  # as of the last forward that built a graph
    operator: int  # position table index of the first operator that owns it
    has_fractions: bool = False  # its fp32 master may hold more than its 16-bit weights; equal on all ranks
    part: TensorPart | None = None  # of a whole parameter, which tensor parallelism divides; None: there is none

    @property
    def is_trained(self) -> bool:
        """Whether a step uses its gradient: memory follows the user's flag at the next forward only, so both count."""
        return self.requires_grad and self.parameter.requires_grad

    @property
    def counts(self) -> bool:
        """Of ranks that have copies for tensor parallelism, this one adds it to norms and writes it to checkpoints."""
        return self.part is None or self.part.counts

    @property
    def whole_shape(self) -> torch.Size:
        """The shape of the whole parameter, of which tensor parallelism may leave a part here."""
        return self.shape if self.part is None else self.part.shape

    def own(self, whole: Tensor) -> Tensor:
        """What the ranks of the data hold of a whole, together. Of a `DTensor`: collective over its ranks."""
        if self.part is not None:
            return self.part.of(whole)
        return gathered(whole) if is_dtensor(whole) else whole

    @property
    def parameter(self) -> nn.Parameter:
        alive = self.reference()
        assert alive is not None, f"{self.name} is used although it is gone"
        return alive

    @property
    def dtype(self) -> torch.dtype:
        return self.chunk.dtype

    @property
    def version(self) -> int:
        """In-place operations on the parameter and on what its `.data` gave. Reading it fetches nothing. Local."""
        with torch._C.DisableTorchFunctionSubclass():
            version = self.parameter._version
        data = self.chunk.shown_data.get(self.position)
        return version if data is None else version + data._version

    @property
    def home_pieces(self) -> tuple[Piece, ...]:
        """The parts of the parameter that this rank's parameter home holds."""
        # `home_layout` and not `layout`: at stages 0 to 2, and of weights that persist, every rank's home is whole.
        return self._pieces(self.chunk.home_layout)

    @property
    def weight_pieces(self) -> tuple[Piece, ...]:
        """`home_pieces` without the elements that the reduced gradient has overwritten (`reuse_fp16_shard`)."""
        chunk = self.chunk
        if not chunk.holds_grad:
            return self.home_pieces
        # The gradient covers the whole home: no weight is left in it. Otherwise the home holds every rank's weights and
        # the gradient covers this rank's slice only.
        if chunk.home_layout.world_size == chunk.optim_layout.world_size:
            return ()
        (own,) = chunk.layout.slices(chunk.rank)
        first, end = self.offset, self.offset + self.numel
        around = (first, min(end, own.payload_start)), (max(first, own.payload_start + own.numel), end)
        return tuple(Piece(start, start, stop - start) for start, stop in around if start < stop)

    @property
    def secondary_pieces(self) -> tuple[Piece, ...]:
        """The parts that the second copy has on this rank: `shard_start` is an offset in the parameter home."""
        chunk = self.chunk
        if chunk.secondary_layout is None:
            return ()
        behind = chunk.home_layout.shard_numel
        pieces = chunk.secondary_layout.pieces(chunk.secondary_rank, self.offset, self.numel)
        return tuple(Piece(each.payload_start, behind + each.shard_start, each.numel) for each in pieces)

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The parts that this rank's optimizer updates. Their `shard_start` is an offset in its flat state tensors."""
        return self._pieces(self.chunk.optim_layout)

    def _pieces(self, layout: ShardLayout) -> tuple[Piece, ...]:
        # What every rank holds whole has a layout of one rank, of which the only number is 0.
        return layout.pieces(self.chunk.rank if layout.world_size > 1 else 0, self.offset, self.numel)

    def own_parts(self, shard: Tensor) -> list[Tensor]:
        """Views of the parameter's elements in `shard`, (optim_numel,), that this rank updates."""
        return [shard[piece.in_shard] for piece in self.pieces]

    def parts_of(self, flat: Tensor) -> list[Tensor]:
        """The same elements as views of `flat`, (numel,), which is the whole parameter in payload order."""
        return [flat[piece.from_start(self.offset).in_payload] for piece in self.pieces]

    @property
    def owns_master(self) -> bool:
        """The fp32 master is part of the parameter's state: the parameter is trained, or was trained before.

        A frozen parameter in a trainable chunk has a master as well, but that is only its weights in fp32: it must not
        count, or results would depend on which parameters share a chunk.
        """
        return self.requires_grad or self.has_fractions

    def note_fractions(self) -> None:
        """The fp32 master may hold more than its 16-bit weights from now on: it cannot be made from them again."""
        self.has_fractions = True

    def follow_flag(self) -> None:
        """Memory has followed a change of the parameter's `requires_grad`: a refusal leaves the old one in force."""
        self.requires_grad = not self.requires_grad

    def number(self, position: int) -> None:
        """Other parameters of the chunk are gone: this one is at `position` now. Only while a model is built."""
        self.position = position

    def discard_fractions(self) -> None:
        """The fp32 master was made from the weights, or is given up. Every rank calls it at the same point."""
        self.has_fractions = False


@dataclass(eq=False, kw_only=True)
class Chunk(ChunkHomes, ChunkUse):
    """One chunk on this rank: its facts, the memory of its states, and its parameters."""

    trainable: bool  # at least one parameter is: the chunk has gradient, master and optimizer state
    parameters: list[ManagedParameter] = field(default_factory=list)
    raw: list[nn.Parameter] = field(default_factory=list)  # the parameters themselves, by position
    has_copies: bool = False  # of some parameter another rank's copy counts, see `ManagedParameter.counts`

    state: ParamState = ParamState.RELEASED  # `become` alone writes `state` and the three below
    holds_grad: bool = False  # the parameter home holds the reduced gradient now, see runtime/grad_places.py
    slot: Slot | None = None
    payload: Tensor | None = None  # (layout.numel,) on the device; None if RELEASED or HOLDS_GRAD
    resident_views: tuple[Tensor, ...] = ()  # the parameters' views of the home while the chunk is RESIDENT
    shown_data: dict[int, Tensor] = field(default_factory=dict)  # what `.data` gave, by position: see `show_data`
    num_bumps: int = 0  # times that `bump_versions` raised the version counters: these are not edits

    @cached_property
    def _remove_dead(self) -> Callable[[object], None]:
        return _forgetting(weakref.ref(self))

    @cached_property
    def _offsets(self) -> list[int]:
        # Only chunks of a wrapped model are asked, which keep their parameters for good, so the offsets may be cached.
        return [managed.offset for managed in self.parameters]

    def manage(
        self,
        parameter: nn.Parameter,
        name: str,
        index: int,
        offset: int,
        operator: int,
        placeholder: Tensor,
        part: TensorPart | None = None,
    ) -> ManagedParameter:
        """Add a parameter, which lies in the payload from element `offset` on. part: of a whole; None: it is whole."""
        managed = ManagedParameter(
            name=name,
            position=len(self.parameters),
            offset=offset,
            shape=parameter.shape,
            stride=dense_stride(parameter),
            index=index,
            reference=weakref.ref(parameter, self._remove_dead),
            chunk=self,
            placeholder=placeholder,
            requires_grad=parameter.requires_grad,
            operator=operator,
            part=part,
        )
        self.has_copies |= not managed.counts
        self.parameters.append(managed)
        return managed

    def hold_parameters(self, some: Sequence[tuple[ManagedParameter, nn.Parameter]]) -> None:
        """Have these parameters only, and keep them alive until `let_parameters_die`. While a model is built."""
        self.parameters, self.raw = [managed for managed, _ in some], [parameter for _, parameter in some]

    def let_parameters_die(self) -> None:
        """Hold no parameter alive: a module may drop it, and with it its shards. While a model is built."""
        self.raw = []

    def drop_parameters(self, gone: Collection[ManagedParameter]) -> None:
        """Have these parameters no more: they belong to another chunk, or to nobody. While a model is built."""
        self.parameters = [managed for managed in self.parameters if managed not in gone]

    def hold(self, parameter: nn.Parameter) -> None:
        """Keep the parameter that was managed last alive, as the chunks of a wrapped model do."""
        self.raw.append(parameter)

    def versions(self) -> list[int]:
        """`ManagedParameter.version` of all parameters, by position."""
        with torch._C.DisableTorchFunctionSubclass():
            versions = list(map(_version_of, self.raw))
        for position, data in self.shown_data.items():
            versions[position] += data._version
        return versions

    def show_data(self, position: int) -> Tensor:
        """The answer of `.data` of the parameter at `position`, which is a view of the payload.

        As in plain PyTorch, writes to it raise no counter that autograd looks at: a backward through an earlier use
        goes on with the new values. They raise that of the tensor in `shown_data`, which all answers share: `versions`
        counts them, also when the answer and its views are gone.
        """
        assert self.payload is not None
        view = self.parameters[position].view(self.payload)
        if position not in self.shown_data:
            # A counter of its own, as that of every `.data`.
            self.shown_data[position] = view.data
        elif self.shown_data[position].data_ptr() != view.data_ptr():
            set_data(self.shown_data[position], view)  # keeps the counter
        return self.shown_data[position].detach()

    def hide_data(self) -> None:
        """Let `shown_data` hold no memory of the payload. The counters stay those of answers that live on."""
        for position, data in self.shown_data.items():
            set_data(data, self.parameters[position].placeholder)

    def parameter_at(self, element: int) -> ManagedParameter:
        """The parameter that payload element `element` belongs to; for padding, the parameter before it."""
        return self.parameters[bisect_right(self._offsets, element) - 1]

    def num_edits(self, element: int) -> int:
        """In-place operations on the parameter at payload element `element`, without our bumps, up to a constant."""
        # Our bumps are subtracted, because a chunk that has left its slot and come back has higher versions, while
        # graphs that refer to it by handles stay valid.
        owner = self.raw[bisect_right(self._offsets, element) - 1]
        with torch._C.DisableTorchFunctionSubclass():
            return owner._version - self.num_bumps

    def bump_versions(self) -> None:
        """Raise all parameters' version counters: what autograd saved of them without our hooks is stale."""
        self.num_bumps += 1
        torch.autograd.graph.increment_version(self.raw)

    @property
    def may_leave(self) -> bool:
        """The chunk is gathered, and its payload may leave its slot, or move, before the next update."""
        return self.slot is not None and not self.stays

    def become(self, state: ParamState, slot: Slot | None = None, payload: Tensor | None = None) -> None:
        """Move the parameters to `state`. Raises RuntimeError if the transition is not in `NEXT`.

        slot: of a gathered chunk; it has the chunk's views. payload: the memory of a chunk without a slot.
        """
        if state not in NEXT[self.state]:
            raise RuntimeError(f"chunk {self.index} is {self.state.value} and cannot be {state.value} next")
        if ParamState.GATHERED_BESIDE_GRAD in (state, self.state) and state is not ParamState.HOLDS_GRAD:
            # Only the home changes its content here: the gathered payload stays in its slot.
            slot, payload = self.slot, self.payload
        elif slot is not None:
            # `payload_in` has cached it when the fetch began.
            payload = slot.views[self.index][0].flat
        elif state is ParamState.RESIDENT:
            payload = self.homes[Kind.PARAM].flat
        # A state and its memory change together: a payload left behind after a release would be read as current.
        if (payload is None) != (state is ParamState.RELEASED or state is ParamState.HOLDS_GRAD):
            raise RuntimeError(f"chunk {self.index} that is {state.value} has other memory than that")
        self.slot, self.payload, self.state = slot, payload, state
        self.holds_grad = state is ParamState.HOLDS_GRAD or state is ParamState.GATHERED_BESIDE_GRAD

    def follow_plan(self, trainable: bool) -> None:
        """Another plan is about to be carried out, which trains some parameter of the chunk or none."""
        self.trainable = trainable

    def names(self) -> str:
        """Parameter names for messages, shortened."""
        names = [managed.name for managed in self.parameters]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

    def reside_at_home(self) -> None:
        """Make the home the payload if this rank holds the whole chunk on the device."""
        if self.home_layout.world_size == 1 and self.homes[Kind.PARAM].tier is Tier.DEVICE:
            # The views are made once: a chunk that lends its home is bound to them again after each step.
            self.resident_views = self.views_of(self.homes[Kind.PARAM].flat)
            self.become(ParamState.RESIDENT)

    def reside_in(self, payload: Tensor) -> None:
        """Let `payload` be the chunk's gathered content, without a slot: while a model is built."""
        self.resident_views = self.views_of(payload)
        self.become(ParamState.GATHERED, payload=payload)

    def end_residence(self) -> None:
        """End residence: the home is no longer the payload."""
        self.become(ParamState.RELEASED)
        self.resident_views = ()

    def region(self) -> Region:
        """(layout.numel,) the payload, which must be present, with its tickets."""
        assert self.payload is not None
        if self.slot is not None:
            return self.slot.views[self.index][0]
        # Under construction a payload has memory of its own. Its region is made again at each call and would forget the
        # copies that are under way, all of which are from or to the home: it shares the home's tickets.
        home = self.homes[Kind.PARAM]
        return home if home.flat is self.payload else Region(Tier.DEVICE, self.payload, home.tickets)

    def payload_in(self, slot: Slot) -> Region:
        """(layout.numel,) the chunk's payload in `slot`. The slot caches it together with the parameters' views."""
        cached = slot.views.get(self.index)
        if cached is not None:
            return cached[0]
        assert slot.region is not None
        # All slots of a pool have one size. A payload that is smaller takes the front.
        payload = slot.region[: self.payload_bytes].view(self.dtype)
        if self.home_layout.world_size > 1:
            # `remember` counts these parts as ours. Cut later, they would pass for views that a user holds.
            payload.cut(piece.in_payload for piece in self.layout.slices(self.rank))
        slot.remember(self.index, payload, self.views_of(payload.flat))
        return payload

    def views_of(self, payload: Tensor) -> tuple[Tensor, ...]:
        """A view of `payload` for every parameter."""
        return tuple(managed.view(payload) for managed in self.parameters)


def _forgetting(reference: weakref.ref[Chunk]) -> Callable[[object], None]:
    """The callback of the weak references: the chunk forgets a parameter that was freed, and is freed with the last."""

    def remove_dead(gone: object) -> None:
        chunk = reference()
        if chunk is not None:
            # The parameter itself is gone, so its record is found by the weak reference that has just died.
            chunk.drop_parameters([managed for managed in chunk.parameters if managed.reference is gone])

    return remove_dead
