"""The states of a model's parameters, to read and to write between steps: one parameter, or one chunk, at a time.

A state is the weights as they are used, the weights in full precision, the gradient, or what the optimizer keeps under
a name. Each rank has a part of it, in the tier where the chunk's state rests. `States` hands out a `StateAccess` for a
chunk and a state. Everything that reads or writes a state uses one: `safe_get_*` and `safe_set_*`, state dicts,
gradients that users write to, plain copies. *Local* is this rank's part of a parameter, 1-D, in payload order. *Whole*
is gathered from all ranks, or given equally on all ranks: (numel,) in the same order (`ParamPlace.shaped` gives it the
parameter's shape). Nothing here holds more than one chunk's state.

All of it is called between steps, after `Step.check_idle`, so that nothing is on its way from or to a home.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from gemini.memory.modes import untracked
from gemini.memory.transfer import Region, ready
from gemini.placement.demand import Kind
from gemini.runtime.binding import (
    follow_edits,
    master_in,
    regions_of_master,
    round_as_master,
    set_secondary,
    set_weights,
    weights_in,
    weights_of,
    write_master,
)
from gemini.runtime.chunk import Chunk, ManagedParameter
from gemini.runtime.gradient import ChunkGradient
from gemini.runtime.manager import ChunkManager, OptimizerPart
from gemini.runtime.migrate import StateStore
from gemini.runtime.step import Step
from optim import FP32, HALF_DTYPES, StateFormat, StateLayout, StoredRun
from sharding import ALIGNMENT, ShardLayout, Unit, as_received, round_up

Cut = Callable[[Tensor], Tensor]
"""The part of a tensor that is copied, as a view of it."""


class States:
    """All states of one model's parameters."""

    def __init__(self, manager: ChunkManager) -> None:
        self.manager = manager
        self.step = manager.step

    @property
    def optimizer(self) -> OptimizerPart | None:
        """The model's optimizer, once there is one."""
        return self.manager.optimizer

    @property
    def kept(self) -> StateStore | None:
        """The states that the optimizer keeps."""
        return None if self.optimizer is None else self.optimizer.states

    def weights(self, chunk: Chunk) -> WeightAccess:
        """The weights in the dtype in which they are used."""
        return WeightAccess(self.step, chunk)

    def full_precision(self, chunk: Chunk) -> FullPrecisionAccess:
        """The fp32 masters of 16-bit weights; other weights themselves, in fp32 or fp64."""
        return FullPrecisionAccess(self.step, chunk)

    def saved_weights(self, chunk: Chunk, wanted: Iterable[ManagedParameter]) -> dict[int, Tensor]:
        """What state dicts have of parameters of the chunk, by index: copies in host memory. Collective over the data.

        Wholes, of which tensor parallelism may leave a part here, in the dtype in which they are used. Inside
        `ChunkManager.sharding_rows()` they are `DTensor`s of rows, and fp32 masters of what is trained in 16 bits:
        torch's `get_optimizer_state_dict` leaves the optimizer's masters out.
        """
        shards = self.manager.row_shards
        if shards is None:
            return self.weights(chunk).copies(wanted)
        mastered = {each.index for each in chunk.parameters if _is_saved_as_master(each)}
        found: dict[int, Tensor] = {}
        # All ranks read both states, or neither: they know alike which parameters have masters.
        if len(mastered) < len(chunk.parameters):
            found |= self.weights(chunk).copies([each for each in wanted if each.index not in mastered], shards.rows)
        if mastered:
            access = self.full_precision(chunk)
            found |= access.copies([each for each in wanted if each.index in mastered], shards.rows)
        return {each.index: self.shown_rows(each, found[each.index]) for each in wanted}

    def saved_weight(self, managed: ManagedParameter) -> Tensor:
        """`saved_weights` of one parameter."""
        shards, chunk = self.manager.row_shards, managed.chunk
        if shards is None:
            return self.weights(chunk).copies([managed])[managed.index]
        if _is_saved_as_master(managed):  # of this parameter alone: no slot keeps the chunk's masters for the next one
            rows = _copy_of(managed.shaped(self.full_precision(chunk).whole(managed)), shards.rows)
        else:
            rows = self.weights(chunk).copies([managed], shards.rows)[managed.index]
        return self.shown_rows(managed, rows)

    def shown_rows(self, managed: ManagedParameter, rows: Tensor) -> Tensor:
        """A `DTensor` over the rows of a parameter's state that this rank has, inside `sharding_rows()`. Local."""
        shards = self.manager.row_shards
        assert shards is not None, "state dicts are whole"
        return shards.shown(rows, managed.part, managed.whole_shape)

    def gradients(self, chunk: Chunk) -> GradientAccess | None:
        """The reduced gradients; None if no backward since the last step has left any in the chunk.

        Call `Reductions.catch_up()` before, which may be collective.
        """
        gradient = self.step.grads.find(chunk)
        if gradient is None or not gradient.is_reduced:
            return None
        return GradientAccess(self.step, chunk, gradient, self.factors_of)

    def factors_of(self, managed: ManagedParameter) -> tuple[float, float]:
        """(1 / loss scale, clip coefficient): stored gradients times both are what users see."""
        return (1.0, 1.0) if self.optimizer is None else self.optimizer.factors_to_come(managed)

    def before_gradient_write(self) -> None:
        """A gradient is about to be changed: a clip that was asked for applies to all as they were before. Local."""
        if self.optimizer is not None:
            self.optimizer.before_gradient_write()

    def of_optimizer(self, chunk: Chunk, name: str) -> FlatAccess:
        """A state that the optimizer keeps of the chunk, such as "exp_avg"."""
        assert self.kept is not None, "there is no optimizer"
        layout = self.kept.layout_of(chunk, name)
        if layout is not None:
            return StoredAccess(self.step, chunk, self.kept, name, layout)
        return OptimizerAccess(self.step, chunk, self.kept, name)

    def names_of(self, managed: ManagedParameter) -> tuple[str, ...]:
        """The names for `of_optimizer` that a parameter has."""
        return () if self.kept is None else self.kept.names_of(managed)


class StateAccess(ABC):
    """One state of the parameters of one chunk. Elements are numbered as in the optimizer's flat tensors."""

    def __init__(self, step: Step, chunk: Chunk) -> None:
        self.step = step
        self.chunk = chunk
        self.device = step.params.device.device

    @property
    @abstractmethod
    def regions(self) -> tuple[Region, ...]:
        """The memory in which this rank's part lies."""

    @abstractmethod
    def read_in(self, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
        """(numel,) elements from `start` on of this rank's part; it may be a view.

        contents: of `regions`, or copies of them.
        """

    def read(self, start: int, numel: int) -> Tensor:
        """(numel,) elements from `start` on of this rank's part, in the tier where they rest; it may be a view."""
        return self.read_in([ready(region) for region in self.regions], start, numel)

    def local(self, managed: ManagedParameter) -> Tensor:
        """A copy of this rank's part of a parameter. Local."""
        return self._shown(managed, self._own(managed))

    def whole(self, managed: ManagedParameter) -> Tensor:
        """(numel,) a copy of a whole parameter, on the compute device. Collective."""
        return self._shown(managed, self.join(managed, self._own(managed)))

    def copies(self, wanted: Iterable[ManagedParameter], cut: Cut | None = None) -> dict[int, Tensor]:
        """Copies of whole parameters of the chunk in host memory, in their shapes, by index. Collective.

        The whole chunk is gathered at once, whatever this rank wants of it. cut: the part of each that is copied.
        """
        whole = self.read(0, self.chunk.optim_numel)
        if self.chunk.optim_layout.world_size > 1:
            # One all-gather for the chunk: a state dict would otherwise take one for each parameter.
            own, whole = whole.to(self.device), whole.new_empty(self.chunk.numel, device=self.device)
            self.step.communicator.all_gather(whole, own, self.chunk.layout, self.chunk.index)
        # Without `copy=True` the user would get a view of a state that is on the CPU already.
        return {each.index: self._shown(each, _copy_of(each.view(whole), cut)) for each in wanted}

    def dtype_of(self, managed: ManagedParameter) -> torch.dtype:
        """The dtype of what `whole()` returns. Local."""
        return self._shown(managed, self.read(0, 0)).dtype

    def join(self, managed: ManagedParameter, own: Tensor) -> Tensor:
        """(numel,) on the compute device: all ranks' parts joined, of which `own` is this rank's. Collective."""
        own = own.to(self.device)
        if managed.chunk.optim_layout.world_size == 1:
            return own
        return _joined(self.step, managed, own)

    def _own(self, managed: ManagedParameter) -> Tensor:
        """A copy of this rank's part of a parameter, as it is kept."""
        # `read(0, 0)` gives dtype and device if this rank has no piece.
        # `cat` copies even a single piece, so nobody gets a view of a home.
        return torch.cat([self.read(0, 0), *(self.read(piece.shard_start, piece.numel) for piece in managed.pieces)])

    def _shown(self, managed: ManagedParameter, kept: Tensor) -> Tensor:
        """Convert elements that are kept as `kept` to what users see."""
        return kept


class WeightAccess(StateAccess):
    """The weights. Copies are made of the payload. See `States.weights`."""

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self.chunk.homes[Kind.PARAM],)

    def read_in(self, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
        return weights_in(self.chunk, contents[0], start, numel)

    def copies(self, wanted: Iterable[ManagedParameter], cut: Cut | None = None) -> dict[int, Tensor]:
        if not self.chunk.arrives_exactly:
            self.step.binding.write_back_all([self.chunk])
            return super().copies(wanted, cut)
        # A fetch like an operator's: the payload stays in its slot until another chunk needs the slot.
        with untracked():
            payload = self.step.payloads.fetch(self.chunk)
        return {managed.index: _copy_of(managed.view(payload), cut) for managed in wanted}


class FullPrecisionAccess(StateAccess):
    """The weights in full precision. Writes reach the used weights, too. See `States.full_precision`."""

    @property
    def regions(self) -> tuple[Region, ...]:
        return regions_of_master(self.chunk)

    def read_in(self, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
        return master_in(self.chunk, contents, start, numel)

    def _own(self, managed: ManagedParameter) -> Tensor:
        # An edit of the payload counts: bring it to the master first.
        self.step.binding.write_back_one(managed)
        return super()._own(managed)

    def copies(self, wanted: Iterable[ManagedParameter], cut: Cut | None = None) -> dict[int, Tensor]:
        self.step.binding.write_back_all([self.chunk])
        return super().copies(wanted, cut)

    def set_local(self, managed: ManagedParameter, values: Tensor) -> None:
        """Set this rank's part to `values`, 1-D. Collective: payloads and whole weights need the other ranks' parts."""
        # Ranks may give values of different dtypes, but what is gathered must have one: that of the state.
        whole = self.join(managed, values.to(self.read(0, 0).dtype))
        self.set_whole(managed, _of_first_replica(self.step, managed, whole))

    def set_whole(self, managed: ManagedParameter, values: Tensor) -> None:
        """Set a parameter to `values`, (numel,), equal on all ranks, of any dtype and device. Local.

        A master takes them unrounded, and the weights are rounded. Without a master, or if `values` have the weights'
        dtype, the weights are set: a master then changes only where it rounds to another weight.
        """
        chunk, binding = self.chunk, self.step.binding
        # A prefetch in flight would arrive with the old weights.
        self.step.params.finish_prefetch()
        # An edit that is not at home yet counts by itself: see `Binding.before_write`.
        if Kind.MASTER in chunk.homes:
            binding.write_back_one(managed)
        # Weights are about to be written to the home, so a gradient has to leave it.
        if chunk.holds_grad:
            self.step.payloads.restore_parameters(chunk)
        # A model that has only inferred so far may get its master here, so the line below looks for one only then.
        take_masters(self.step, [(managed, values)])
        weights, has_master = round_as_master(values, chunk.dtype), Kind.MASTER in chunk.homes
        if has_master and managed.owns_master and values.dtype is not chunk.dtype:
            managed.note_fractions()
            set_weights(managed, values)
        else:
            for piece, part in zip(managed.pieces, managed.parts_of(weights), strict=True):
                if has_master:
                    # The home still has the old weights, which tell what changes.
                    before = weights_of(chunk, piece.shard_start, piece.numel)
                    follow_edits(chunk, piece.shard_start, part, before)
            set_weights(managed, weights, with_master=False)
        shown = as_received(chunk.fetch_layout, weights)
        set_secondary(managed, shown)
        if chunk.payload is not None:
            # The payload is not gathered again before the next update.
            ready(chunk.region())[managed.in_payload].copy_(shown)
        binding.note_write(managed)

    def fill(self, managed: ManagedParameter, read: Callable[[int, int], Tensor]) -> None:
        """Set this rank's parts of weights and master from a file, by no more than the elements that it holds. Local.

        read: returns elements of the parameter, in payload order, given the first one and their number. Between
            `ParamStore.make_stale` and `ParamStore.after_update`, which see to payloads and graphs.
        """
        chunk = self.chunk
        has_master = Kind.MASTER in chunk.homes
        home = ready(chunk.homes[Kind.PARAM])
        is_alike = chunk.home_layout == chunk.optim_layout
        for piece in managed.home_pieces:
            values = read(piece.payload_start - managed.offset, piece.numel)
            home[piece.in_shard].copy_(round_as_master(values, chunk.dtype))
            if has_master and is_alike:
                write_master(chunk, piece.shard_start, values.float())
        if has_master and not is_alike:
            # The home is whole, and the master is this rank's part.
            for piece in managed.pieces:
                values = read(piece.payload_start - managed.offset, piece.numel)
                write_master(chunk, piece.shard_start, values.float())


def _is_saved_as_master(managed: ManagedParameter) -> bool:
    return managed.owns_master and managed.dtype in HALF_DTYPES


def _copy_of(whole: Tensor, cut: Cut | None) -> Tensor:
    return (whole if cut is None else cut(whole)).to("cpu", copy=True)


def take_masters(step: Step, values: Iterable[tuple[ManagedParameter, Tensor]]) -> None:
    """Take memory for masters that parameters need for `values`, in a model that has only inferred so far.

    Local. Raises BudgetError, and nothing has changed then.
    """
    pairs = (managed for managed, value in values if managed.owns_master and value.dtype is not managed.chunk.dtype)
    training = step.grads.training
    training.take_masters(list(dict.fromkeys(managed.chunk for managed in pairs)))


class FlatAccess(StateAccess):
    """A state that rests in one flat tensor, (optim_numel,)."""

    def __init__(self, step: Step, chunk: Chunk, region: Region) -> None:
        super().__init__(step, chunk)
        self._region = region

    @property
    def regions(self) -> tuple[Region, ...]:
        return (self._region,)

    @property
    def _flat(self) -> Tensor:
        return ready(self._region)

    def read_in(self, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
        return contents[0][start : start + numel]

    def set_local(self, managed: ManagedParameter, values: Tensor) -> None:
        """Set this rank's part of a parameter to `values`, 1-D, of any dtype and device. Local."""
        parts = values.split([piece.numel for piece in managed.pieces])
        for target, part in zip(managed.own_parts(self._flat), parts, strict=True):
            target.copy_(part)

    def set_whole(self, managed: ManagedParameter, values: Tensor) -> None:
        """Set a parameter to `values`, (numel,), equal on all ranks, of any dtype and device. Local."""
        # The empty first part gives dtype and device if this rank has no piece.
        self.set_local(managed, torch.cat([values[:0], *managed.parts_of(values)]))

    def set_of_each_rank(self, managed: ManagedParameter, values: Tensor) -> None:
        """Call `set_whole` with values that may differ by rank: each rank's own part counts.

        Of replicas the first one's counts. Collective at stage 0, and where there are replicas. Without the exchange,
        ranks that hold whole gradients or states would step their copies of the weights apart.
        """
        chunk = self.chunk
        if chunk.layout.world_size > 1 and chunk.optim_layout.world_size == 1:
            # Every rank holds all of it here. Each contributes the part that would be its shard.
            pieces = chunk.layout.pieces(chunk.rank, managed.offset, managed.numel)
            own = [values[piece.from_start(managed.offset).in_payload] for piece in pieces]
            values = _joined(self.step, managed, torch.cat([values[:0], *own]).to(self.device))
        self.set_whole(managed, _of_first_replica(self.step, managed, values))

    def fill(self, managed: ManagedParameter, read_into: Callable[[int, Tensor], None]) -> None:
        """Set this rank's part of a parameter from a file. Local.

        read_into: given the first element, in payload order, fills a 1-D tensor, in whose memory the state rests.
        """
        for piece, target in zip(managed.pieces, managed.own_parts(self._flat), strict=True):
            read_into(piece.payload_start - managed.offset, target)


class OptimizerAccess(FlatAccess):
    """A state that the optimizer keeps."""

    def __init__(self, step: Step, chunk: Chunk, kept: StateStore, name: str) -> None:
        super().__init__(step, chunk, kept.region_of(chunk, name))
        self._kept, self._name = kept, name

    def set_local(self, managed: ManagedParameter, values: Tensor) -> None:
        super().set_local(managed, values)
        self._kept.note_write(managed, self._name)


class StoredAccess(OptimizerAccess):
    """A state that the optimizer keeps in fewer bits than it shows: all reads are fp32, and writes are rounded."""

    def __init__(self, step: Step, chunk: Chunk, kept: StateStore, name: str, layout: StateLayout) -> None:
        super().__init__(step, chunk, kept, name)
        self._layout = layout

    def format_of(self, managed: ManagedParameter) -> StateFormat:
        """How the state of a parameter is stored, on whatever ranks. fp32 for one without elements here."""
        for piece in managed.pieces:
            return self._layout.format_at(piece.shard_start)
        return FP32

    def stored_in(self, contents: Sequence[Tensor], start: int, numel: int) -> StoredRun:
        """(numel,) elements from `start` on, of one tensor, as they are stored. contents: as for `read_in`."""
        (found,) = self._layout.stored(contents[0], start, numel)
        return found

    def fill_stored(self, managed: ManagedParameter, read_into: Callable[[int, StoredRun], None]) -> None:
        """Set this rank's part of a parameter as it is stored. Local. read_into: as of `fill`."""
        for piece in managed.pieces:
            read_into(
                piece.payload_start - managed.offset, self.stored_in([self._flat], piece.shard_start, piece.numel)
            )

    def read_in(self, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
        return self._layout.read(contents[0], self._name, start, numel)

    def set_local(self, managed: ManagedParameter, values: Tensor) -> None:
        parts = values.split([piece.numel for piece in managed.pieces])
        for piece, part in zip(managed.pieces, parts, strict=True):
            self._layout.write(self._flat, self._name, piece.shard_start, part)
        self._kept.note_write(managed, self._name)

    def fill(self, managed: ManagedParameter, read_into: Callable[[int, Tensor], None]) -> None:
        for piece in managed.pieces:
            values = torch.empty(piece.numel, dtype=torch.float32, device="cpu")
            read_into(piece.payload_start - managed.offset, values)
            self._layout.write(self._flat, self._name, piece.shard_start, values)


class GradientAccess(FlatAccess):
    """The gradient. It rests times the loss scale; reads return the gradient itself, clipped if that was asked for.

    If there is a loss scale, reads return fp32, where the unscaled values do not underflow. Written values have no loss
    scale either.
    """

    def __init__(
        self,
        step: Step,
        chunk: Chunk,
        gradient: ChunkGradient,
        factors_of: Callable[[ManagedParameter], tuple[float, float]],
    ) -> None:
        super().__init__(step, chunk, gradient.reduced())
        self._gradient = gradient
        self._factors_of = factors_of

    def set_local(self, managed: ManagedParameter, values: Tensor) -> None:
        """Set this rank's part. The parameter has a gradient now, on all ranks."""
        # The clip is not undone: callers have called `before_gradient_write`, which applies it to all gradients.
        inv_scale, _ = self._factors_of(managed)
        if inv_scale != 1.0:  # in fp32 (fp64 for fp64), so that a 16-bit gradient is rounded once
            values = values.to(torch.promote_types(values.dtype, torch.float32)) / inv_scale
        super().set_local(managed, values)
        self._gradient.note_given(managed.position)
        # What earlier reads of `.grad` have gathered is stale from here on.
        self._gradient.count_write()

    def _shown(self, managed: ManagedParameter, kept: Tensor) -> Tensor:
        inv_scale, clip = self._factors_of(managed)
        if inv_scale != 1.0:
            kept = (kept if kept.dtype is torch.float64 else kept.float()) * inv_scale
        return kept if clip == 1.0 else kept * clip


def _of_first_replica(step: Step, managed: ManagedParameter, values: Tensor) -> Tensor:
    """`values`, (numel,), as the first replica has them: with others, replicas would be trained apart. Collective."""
    if managed.chunk.layout.num_replicas == 1:
        return values
    shared = values.to(step.communicator.device, copy=True)
    step.communicator.spread_over_replicas_(shared, f"a value for {managed.name}")
    return shared


def _joined(step: Step, managed: ManagedParameter, own: Tensor) -> Tensor:
    """(numel,) all ranks' parts joined in payload order, of which `own` is this rank's. Collective."""
    communicator = step.communicator
    ranks = communicator.num_shards
    pieces = managed.chunk.layout.owner_pieces(managed.offset, managed.numel)
    taken = [0] * ranks
    for rank, piece in pieces:
        taken[rank] += piece.numel
    # Ranks have parts of different sizes: each gets the room of the largest, so that one all-gather carries all.
    room = round_up(max(taken), ALIGNMENT)
    every, whole = own.new_zeros(ranks * room), own.new_empty(managed.numel)
    # `room` is equal on all ranks: either all of them gather or, for an empty parameter, none does.
    if room:
        shard = every[communicator.shard_rank * room :][:room]
        shard[: own.numel()].copy_(own)
        # In this layout rank r's shard is the r-th piece of `room` elements, whatever the chunk's own layout is.
        layout = ShardLayout((Unit(0, ranks * room),), ranks)
        communicator.all_gather(every, shard, layout, managed.chunk.index)
    # Now the place in `every` where each rank's next piece begins.
    taken = [rank * room for rank in range(ranks)]
    for rank, piece in pieces:
        whole[piece.from_start(managed.offset).in_payload].copy_(every[taken[rank] :][: piece.numel])
        taken[rank] += piece.numel
    return whole
