"""A chunk and its states.

A chunk knows its parameters, where they lie in its payload, how the payload is divided over the ranks, and which
memory holds each of its states on this rank. It moves nothing: `gemini.manager` does.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from gemini.chunks.chunk_homes import ChunkHomes
from gemini.chunks.chunk_use import ChunkUse
from gemini.chunks.param_state import NEXT, ParamState
from gemini.chunks.place import ParamPlace
from gemini.chunks.placeholder import dense_stride, set_data
from gemini.memory.region import Region
from gemini.memory.slot import Slot
from gemini.placement.demand import Kind, Tier
from sharding import Piece, ShardLayout

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

    state: ParamState = ParamState.RELEASED  # `become` alone writes `state`, `slot` and `payload`
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
        self, parameter: nn.Parameter, name: str, index: int, offset: int, operator: int, placeholder: Tensor
    ) -> ManagedParameter:
        """Add a parameter, which lies in the payload from element `offset` on."""
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
        )
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

    @property
    def holds_grad(self) -> bool:
        """The parameter home holds the reduced gradient now, see manager/grad_homes.py."""
        return self.state is ParamState.HOLDS_GRAD or self.state is ParamState.GATHERED_BESIDE_GRAD

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
