"""Parameters become views of payloads, and what users write to them comes home, to weights and masters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn

from gemini.errors import BudgetError, ReleasedParameterError
from gemini.log import warn_at_script
from gemini.memory.memory import RankMemory
from gemini.memory.modes import unseen, untracked, unwrapped
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Region, ready, wait_on_stream
from gemini.placement.demand import Kind
from gemini.runtime.chunk import Chunk, ManagedParameter, ParamState, lift_guard, set_guard, set_own_data, unguarded
from optim import HALF_DTYPES, absorb_edits_, join_master_, round_master_, split_master_
from sharding import as_received, pieces_within

_BITS = {2: torch.int16, 4: torch.int32}  # NaN and -0.0 would be wrong as floats

# -- The fp32 masters of 16-bit chunks on this rank, in either layout.
#
# *Whole*: the MASTER home holds fp32 values. *Split* (bf16): it holds int16 remainders, and the master's upper half is
# the parameter home itself (`optim.master`). Elements are numbered as in the optimizer's flat tensors, up to
# `optim_numel`.
#
# [Note: Edits of split masters] When a weight is edited its remainder becomes zero. The values from before tell which
# elements were edited. The home still has them unless it is the payload; then a copy is made before a write is possible
# (below). A write to a weight inside its own operator is noticed only afterwards: the whole parameter loses
# its remainders, and a warning says so. Embeddings with `max_norm`, which write so in every forward, have whole
# masters.


def full_precision(chunk: Chunk, start: int, numel: int) -> Tensor:
    """(numel,) elements of the master from `start` on, on its tier; of the weights if there is no master.

    fp32, or fp64 for fp64 weights. It may be a view.
    """
    return master_in(chunk, [ready(region) for region in regions_of_master(chunk)], start, numel)


def regions_of_master(chunk: Chunk) -> tuple[Region, ...]:
    """The homes in which the master lies; without one the weights' home."""
    home, master = chunk.homes[Kind.PARAM], chunk.homes.get(Kind.MASTER)
    if master is None:
        return (home,)
    # A split master is nowhere whole: upper halves are in the parameter home, remainders in the MASTER home.
    return (home, master) if chunk.splits_master else (master,)


def master_in(chunk: Chunk, contents: Sequence[Tensor], start: int, numel: int) -> Tensor:
    """(numel,) elements of the master from `start` on; of the weights if there is no master.

    contents: of `regions_of_master(chunk)`. Returns fp32, or fp64 for fp64 weights, on the master's tier; it may be a
    view.
    """
    if Kind.MASTER not in chunk.homes:
        weights = weights_in(chunk, contents[0], start, numel)
        return weights if weights.dtype is torch.float64 else weights.float()
    if not chunk.splits_master:
        return contents[0][start : start + numel]
    home, remainders = contents
    joined = torch.empty(numel, dtype=torch.float32, device=remainders.device)
    for piece in pieces_within(chunk.home_slices, start, numel):
        # The two halves may rest on different tiers.
        weight = home[piece.in_payload].to(joined.device)
        join_master_(joined.narrow(0, piece.shard_start - start, piece.numel), weight, remainders[piece.in_shard])
    return joined


def write_master(chunk: Chunk, start: int, values: Tensor) -> None:
    """Set elements from `start` on to `values` (1-D), and with a split master also its upper half, the parameter."""
    master = ready(chunk.homes[Kind.MASTER])
    if not chunk.splits_master:
        master[start : start + values.numel()].copy_(values)
        return
    home = ready(chunk.homes[Kind.PARAM])
    for piece in pieces_within(chunk.home_slices, start, values.numel()):
        # The split works on contiguous memory of one device. `values` may be on another one than a home, and of another
        # dtype.
        part = values.narrow(0, piece.shard_start - start, piece.numel).to(torch.float32).contiguous()
        weight = torch.empty(piece.numel, dtype=chunk.dtype, device=part.device)
        remainder = torch.empty(piece.numel, dtype=torch.int16, device=part.device)
        split_master_(weight, remainder, part)
        home[piece.in_payload].copy_(weight)
        master[piece.in_shard].copy_(remainder)


def round_as_master(value: Tensor, dtype: torch.dtype) -> Tensor:
    """`value` in a parameter's dtype, rounded like `round_master_` in the step.

    With any other rounding the next step would see the weight as edited and replace the master by it.
    """
    if dtype not in HALF_DTYPES or value.dtype is dtype:
        return value.to(dtype)
    rounded = torch.empty(value.numel(), dtype=dtype, device=value.device)
    round_master_(rounded, value.reshape(-1).float())
    return torch.empty_like(value, dtype=dtype).copy_(rounded.view(value.shape))


def weights_of(chunk: Chunk, start: int, numel: int) -> Tensor:
    """(numel,) elements of the parameter home, from `start` on; it may be a view."""
    return weights_in(chunk, ready(chunk.homes[Kind.PARAM]), start, numel)


def weights_in(chunk: Chunk, home: Tensor, start: int, numel: int) -> Tensor:
    """The same of a parameter home with the content `home`."""
    runs = [home[piece.in_payload] for piece in pieces_within(chunk.home_slices, start, numel)]
    # `torch.cat` refuses an empty list, which is what a range without elements gives.
    return torch.cat(runs) if len(runs) > 1 else runs[0] if runs else home[:0]


def set_weights(managed: ManagedParameter, flat: Tensor, with_master: bool = True) -> None:
    """Set the homes to this rank's elements of `flat` (numel,): weights are rounded, a master takes them unrounded."""
    chunk = managed.chunk
    home = ready(chunk.homes[Kind.PARAM])
    for piece in managed.home_pieces:
        values = flat[piece.from_start(managed.offset).in_payload]
        home[piece.in_shard].copy_(round_as_master(values, chunk.dtype))
    if with_master and Kind.MASTER in chunk.homes:
        # Home and master may be divided differently: at stages 1 and 2 the home is whole, and the master is this rank's
        # part.
        for piece, part in zip(managed.pieces, managed.parts_of(flat), strict=True):
            write_master(chunk, piece.shard_start, part)


def set_secondary(managed: ManagedParameter, flat: Tensor) -> None:
    """Set this rank's part of the second copy in the node, if there is one, to elements of `flat`, (numel,)."""
    for piece in managed.secondary_pieces:
        ready(managed.chunk.homes[Kind.PARAM])[piece.in_shard].copy_(flat[piece.from_start(managed.offset).in_payload])


def set_all_weights(chunk: Chunk, payload: Tensor) -> None:
    """Set all parameters as `set_weights` sets one, from a `payload` (layout.numel,) that is zero between them."""
    home, layout = ready(chunk.homes[Kind.PARAM]), chunk.home_layout
    # What every rank holds whole has a layout of one rank, of which the only number is 0.
    for piece in layout.slices(chunk.rank if layout.world_size > 1 else 0):
        home[piece.in_shard].copy_(round_as_master(payload[piece.in_payload], chunk.dtype))
    if Kind.MASTER in chunk.homes:
        layout = chunk.optim_layout
        for piece in layout.slices(chunk.rank if layout.world_size > 1 else 0):
            write_master(chunk, piece.shard_start, payload[piece.in_payload])


def follow_edits(chunk: Chunk, start: int, weights: Tensor, before: Tensor | None) -> None:
    """The parameter has `weights` (numel,) from `start` on: the master takes over the elements that were edited.

    before: the weights before the edit, for a split master; None means that all elements count as edited.
    """
    master = ready(chunk.homes[Kind.MASTER])[start : start + weights.numel()]
    if not chunk.splits_master:
        # A whole master tells edits by itself: an unedited weight is its rounded value.
        absorb_edits_(master, weights.to(master.device))
    elif before is None:
        # With zero remainders the master equals the 16-bit weights.
        master.zero_()
    else:
        # Compare bits: NaN and -0.0 would be wrong as floats.
        edited = weights.view(torch.int16) != before.to(weights.device).view(torch.int16)
        master.masked_fill_(edited.to(master.device), 0)


def master_from_weights(chunk: Chunk, only: ManagedParameter | None = None) -> None:
    """Set the master of a chunk, or of one of its parameters, to the 16-bit weights. Local."""
    runs = [(0, chunk.optim_numel)]
    if only is not None:
        runs = [(piece.shard_start, piece.numel) for piece in only.pieces]
    for start, numel in runs:
        # The upper half of a split master is the home itself, so only the remainders are written.
        if chunk.splits_master:
            ready(chunk.homes[Kind.MASTER])[start : start + numel].zero_()
        else:
            write_master(chunk, start, weights_of(chunk, start, numel))


# -- The weights from before a write, for split masters: they show which elements were edited.
#
# They are kept from the moment when a write is possible until the step, in host memory that the ledger counts. If the
# payload is not the home, the home itself still has them.


KIND = "weights before edits"


class Snapshots:
    """The snapshots of one model's parameters."""

    def __init__(self, host: MemoryTier) -> None:
        self._host = host
        # chunk -> position -> the weights that this rank updates, on the host; None if the home still has them
        self._kept: dict[int, dict[int, Tensor | None]] = {}

    def announce(self, managed: ManagedParameter) -> None:
        """The payload may be written to from now on. Without room for a copy, all elements will count as edited."""
        chunk = managed.chunk
        if not has_split_master(chunk):
            return
        position, kept = managed.position, self._kept.setdefault(chunk.index, {})
        # A second snapshot would be taken after the first write.
        if position in kept:
            return
        if not _payload_is_home(chunk):
            kept[position] = None
            return
        weights = _own_weights(managed)
        # An edit must not fail for lack of host memory: it only costs the parameter its remainders.
        with suppress(BudgetError):
            kept[position] = self._host.allocate(weights.nbytes, KIND).view(chunk.dtype).copy_(weights)

    def read(self, managed: ManagedParameter) -> list[Tensor] | None:
        """The old weights of each piece that this rank updates; None if the write was not announced."""
        kept = self._kept.get(managed.chunk.index, {})
        if managed.position not in kept:
            return None
        weights = kept[managed.position]
        weights = _own_weights(managed) if weights is None else weights
        return list(weights.split([piece.numel for piece in managed.pieces]))

    def refresh(self, managed: ManagedParameter) -> None:
        """Take the home's new weights: views of the payload may be written to again."""
        weights = self._kept.get(managed.chunk.index, {}).get(managed.position)
        # None stands for the home, which is up to date by itself.
        if weights is not None:
            weights.copy_(_own_weights(managed))

    def drop(self, chunk: Chunk) -> None:
        """Drop the chunk's snapshots: writes through views of its payload do not count any more."""
        for weights in self._kept.pop(chunk.index, {}).values():
            if weights is not None:
                self._host.free(weights, KIND)

    def drop_all(self, chunks: list[Chunk]) -> None:
        """Drop the snapshots of all `chunks`."""
        for chunk in chunks:
            if chunk.index in self._kept:
                self.drop(chunk)


def _own_weights(managed: ManagedParameter) -> Tensor:
    """A copy of the parameter's elements that this rank updates, from the home, its pieces joined."""
    chunk = managed.chunk
    pieces = (weights_of(chunk, piece.shard_start, piece.numel) for piece in managed.pieces)
    # The empty first part gives dtype and device if this rank has no piece.
    return torch.cat([weights_of(chunk, 0, 0), *pieces])


def has_split_master(chunk: Chunk) -> bool:
    """Whether the chunk is trained and its parameters are the upper halves of their masters."""
    return chunk.splits_master and Kind.MASTER in chunk.homes


def _payload_is_home(chunk: Chunk) -> bool:
    """Whether the payload is the home, or the home is a part of it."""
    return chunk.payload is not None and shares_memory(chunk.homes[Kind.PARAM].flat, chunk.payload)


def shares_memory(tensor: Tensor, payload: Tensor) -> bool:
    """Whether `tensor` is a view of `payload`'s storage. Empty storages have no address and share nothing."""
    tensor = unwrapped(tensor)
    if tensor.layout != torch.strided or tensor.device != payload.device:
        return False
    address = payload.untyped_storage().data_ptr()
    return address != 0 and tensor.untyped_storage().data_ptr() == address


# -- Binding: makes parameters views of their chunk's payload, or placeholders again, and keeps what users write to
# them.
#
# [Note: Edits] Parameters may be written to outside their operators (`p.mul_()`, `p.data.zero_()`). The payload is then
# newer than its home and the fp32 master. It is written back before the chunk leaves its slot, before a step, and
# before anything reads the home. A write through the parameter raises its version counter; `.data` marks the parameter
# edited.


class Binding:
    """Binds and unbinds the parameters of one model's chunks."""

    def __init__(self, chunks: Collection[Chunk], memory: RankMemory, released_class: type[nn.Parameter]) -> None:
        self.chunks = chunks
        self.memory = memory
        self.released_class = released_class
        self.plain_chunks: list[Chunk] = []
        self.edited: dict[int, set[int]] = {}  # chunk -> positions of edited parameters
        self._overwritten: set[int] = set()  # chunks for `pop_overwritten`
        self.versions: dict[int, list[int]] = {}  # chunk -> its parameters' versions at the last write-back
        self.snapshots = Snapshots(memory.host)
        self._warned_of: set[int] = set()  # parameters by index: membership only
        self._edits_when_left: dict[int, list[int]] = {}  # chunk -> its parameters' edits when it was released

    def bind(self, chunk: Chunk) -> None:
        """Make the chunk's parameters plain `nn.Parameter`s that are views of its payload."""
        if chunk.plain:
            return
        if chunk.bound:
            # The parameters are views of this payload already and only fetch themselves: the class alone changes.
            for parameter in chunk.raw:
                parameter.__class__ = nn.Parameter
            # The chunk was outdated by an update and has been gathered since, into the same memory.
            if chunk.index in self._edits_when_left:
                self.rebase_versions(chunk)
                self._refuse_lost_edits(chunk)
        else:
            # A payload without a slot is the home, or the memory of a chunk under construction.
            views = chunk.resident_views if chunk.slot is None else chunk.slot.views[chunk.index][1]
            with untracked():
                # The parameters show placeholders, whose guard would send each assignment to `access/released.py`.
                lift_guard()
                try:
                    for parameter, view in zip(chunk.raw, views, strict=True):
                        # Set the class first: assigning `.data` of the released class would fetch.
                        parameter.__class__ = nn.Parameter
                        set_own_data(parameter, view)
                finally:
                    set_guard()
            # Whatever raises a version from here on is an edit of the user's, or a bump of ours, after which versions
            # are recorded again.
            self.versions[chunk.index] = chunk.versions()
        chunk.plain = True
        self.plain_chunks.append(chunk)
        if not chunk.bound:
            chunk.note_bound()
            self._refuse_lost_edits(chunk)

    def _refuse_lost_edits(self, chunk: Chunk) -> None:
        """Raises if a view that outlived the release was written to: versions show it, the reused memory does not."""
        before = self._edits_when_left.pop(chunk.index, None)
        now = [version - chunk.num_bumps for version in self.versions[chunk.index]]
        if before is not None and before != now:
            lost = next(m.name for m, a, b in zip(chunk.parameters, before, now, strict=True) if a != b)
            raise ReleasedParameterError(
                f"parameter {lost!r} was written to through a view that was taken before it left the device; the write "
                "is lost. Write to the parameter itself, or take the view again"
            )

    def shows_payload(self, chunk: Chunk) -> bool:
        """Whether the chunk's parameters are views of its current payload, plain or not."""
        # An outdated chunk is bound, too, but to a slot whose weights are from before an update.
        return chunk.bound and chunk.index not in self._edits_when_left

    @contextmanager
    def plain(self, touched: Iterable[ManagedParameter]) -> Iterator[None]:
        """Inside, the bound parameters among `touched` are plain. Other parameters of their chunks stay as they are."""
        covered = [each.parameter for each in touched if type(each.parameter) is self.released_class]
        for parameter in covered:
            parameter.__class__ = nn.Parameter
        try:
            yield
        finally:
            for parameter in covered:
                parameter.__class__ = self.released_class

    def cover(self) -> None:
        """Make all parameters fetch themselves again. Those of chunks in a slot or at home stay bound."""
        for chunk in self.plain_chunks:
            self._cover(chunk)
        self.plain_chunks.clear()

    def cover_chunk(self, chunk: Chunk) -> None:
        """Make the parameters of a plain chunk fetch themselves again. They stay bound."""
        self.plain_chunks.remove(chunk)
        self._cover(chunk)

    def _cover(self, chunk: Chunk) -> None:
        if chunk.plain:
            for parameter in chunk.raw:
                parameter.__class__ = self.released_class
            chunk.plain = False

    def unbind(self, chunk: Chunk) -> None:
        """Make the chunk's parameters show their placeholders."""
        if not chunk.bound:
            return
        self.snapshots.drop(chunk)
        self.note_edits_when_left(chunk, self.versions[chunk.index])
        with untracked():
            lift_guard()
            try:
                for managed, parameter in zip(chunk.parameters, chunk.raw, strict=True):
                    # As in `bind`: assigning `.data` of the released class would copy into the payload.
                    parameter.__class__ = nn.Parameter
                    set_own_data(parameter, managed.placeholder)
                    parameter.__class__ = self.released_class
                chunk.hide_data()
            finally:
                set_guard()
        chunk.bound = chunk.plain = False

    def outdate(self, chunk: Chunk) -> None:
        """A gathered chunk that stays is about to be updated: its next user gathers it again. Local.

        Its parameters fetch themselves until then, and stay views of its slot. See [Note: Staying chunks] in
        params.py.
        """
        slot = chunk.own_slot
        assert slot is not None and chunk.slot is slot
        self.write_back(chunk)
        if chunk.plain:
            self.cover_chunk(chunk)
        self.snapshots.drop(chunk)
        if chunk.bound:
            self.note_edits_when_left(chunk, self.versions[chunk.index])
        with untracked():
            chunk.hide_data()
        chunk.bump_versions()  # see [Note: Version bump]
        self.rebase_versions(chunk)
        chunk.become(ParamState.RELEASED)
        slot.vacate()
        # Poison the old weights, unless a view of the user's shows them until the next gather.
        # Each bound parameter is one holder.
        if chunk.bound and slot.num_holders() <= len(chunk.parameters):
            slot.wipe()

    def reset(self) -> None:
        """Cover all parameters after a failure, which may have interrupted `bind` or `unbind` half way."""
        with untracked(), unguarded():
            for chunk in self.chunks:
                for managed, parameter in zip(chunk.parameters, chunk.raw, strict=True):
                    # Parameters that are bound keep their views here. `ParamStore.reset` releases their slots next,
                    # which unbinds them.
                    if not chunk.bound:
                        parameter.__class__ = nn.Parameter
                        set_own_data(parameter, managed.placeholder)
                    parameter.__class__ = self.released_class
                chunk.hide_data()
                chunk.plain = False
        self.plain_chunks.clear()
        # An interrupt may have come between a bump of versions and its count: the numbers would show edits that never
        # were.
        self._edits_when_left.clear()

    # -- edits

    def before_write(self, managed: ManagedParameter) -> None:
        """The payload may be written to from now on. A split master's old weights are kept, to tell what is edited."""
        # An earlier edit counts by itself. Were this one to restore the old weights, the master would keep its
        # fractions, or not, as the chunk happens to have been released in between.
        if Kind.MASTER in managed.chunk.homes:
            self.write_back_one(managed)
        self.snapshots.announce(managed)

    def show_data(self, managed: ManagedParameter, writes: bool = True) -> Tensor:
        """What `.data` gives of a parameter that is bound. Whoever gets it may write to it without a trace.

        Functions that run as one kernel, numpy and kernels of the user's raise no counter: the parameter counts as
        edited at once. Where nothing is written, bringing it home changes no bit.
        """
        self._adopt(managed)
        if writes:
            self.before_write(managed)
            self.mark_edited(managed)
        with unseen(), untracked():
            return managed.chunk.show_data(managed.position)

    def _adopt(self, managed: ManagedParameter) -> None:
        """Take over the values of other memory that compiled code, or `Tensor.set_`, has given to a plain parameter."""
        parameter, chunk = managed.parameter, managed.chunk
        if chunk.payload is None or not chunk.bound:
            return
        view = managed.view(chunk.payload)
        # The parameter may fetch itself again by now.
        with torch._C.DisableTorchFunctionSubclass(), unseen(), untracked():
            if parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride():
                return
            value = parameter.detach()
            set_own_data(parameter, view)
            if value.shape != view.shape or value.dtype is not view.dtype:
                raise ReleasedParameterError(
                    f"parameter {managed.name!r} is {tuple(view.shape)} {view.dtype}; its memory cannot become "
                    f"{tuple(value.shape)} {value.dtype}. Assign values of its own shape and dtype to its .data"
                )
            view.copy_(value)
            self.mark_edited(managed)

    def mark_edited(self, managed: ManagedParameter) -> None:
        """The parameter's payload was written to, or may have been."""
        chunk = managed.chunk
        self.edited.setdefault(chunk.index, set()).add(managed.position)

    def write_back(self, chunk: Chunk) -> None:
        """Bring edits of the payload to the home and the master. See [Note: Edits]."""
        positions = self.edited.pop(chunk.index, set())
        if chunk.bound and chunk.payload is not None:
            recorded, now = self.versions[chunk.index], chunk.versions()
            # Versions differ only if a parameter was written to: our own bumps are followed by `rebase_versions` or a
            # release.
            if now != recorded:
                positions.update(i for i, (one, other) in enumerate(zip(recorded, now, strict=True)) if one != other)
                self.versions[chunk.index] = now
                for position in sorted(positions):
                    self._adopt(chunk.parameters[position])
                self.edited.pop(chunk.index, None)
        if positions and chunk.payload is not None:
            with untracked():
                # The order is fixed, because a build broadcasts each edited parameter: all ranks must do it in one
                # order.
                for position in sorted(positions):
                    self.write_parameter(chunk.parameters[position], chunk.region())

    def pop_overwritten(self) -> list[Chunk]:
        """The chunks whose payload a user has written to, and which would arrive with other values. In order. Local.

        What is written near others of its block changes how all of these are rounded on their way.
        """
        if not self._overwritten:
            return []
        found = [chunk for chunk in self.chunks if chunk.index in self._overwritten]
        self._overwritten.clear()
        return found

    def edited_in(self, chunk: Chunk) -> list[ManagedParameter]:
        """The chunk's parameters that were written to since the last write-back. Local."""
        return [] if chunk.payload is None else [each for each in chunk.parameters if self.is_edited(each)]

    def is_edited(self, managed: ManagedParameter) -> bool:
        """Whether the parameter was written to since the last write-back."""
        chunk = managed.chunk
        position = managed.position
        is_marked = position in self.edited.get(chunk.index, ())
        return is_marked or (chunk.bound and managed.version != self.versions[chunk.index][position])

    def write_back_one(self, managed: ManagedParameter) -> None:
        """Write back one parameter, in time that does not depend on the size of its chunk."""
        chunk = managed.chunk
        if chunk.payload is not None and self.is_edited(managed):
            self.forget_edits(managed)
            with untracked():
                self.write_parameter(managed, chunk.region())

    def note_write(self, managed: ManagedParameter) -> None:
        """The parameter was given new values at home and in its payload: graphs that need the old ones are stale."""
        chunk = managed.chunk
        # Like a write of the user's: of the chunk's other parameters graphs stay valid.
        torch.autograd.graph.increment_version(managed.parameter)
        # Not bound to the payload since it was released or outdated: `bind` would take our write for a lost edit.
        if chunk.index in self._edits_when_left:
            self._edits_when_left[chunk.index][managed.position] += 1
        if chunk.bound and chunk.payload is not None:
            self.snapshots.refresh(managed)
        self.forget_edits(managed)

    def forget_edits(self, managed: ManagedParameter) -> None:
        """Stop counting the parameter as edited: the edit is at home, undone or overwritten. Local."""
        chunk = managed.chunk
        self.edited.get(chunk.index, set()).discard(managed.position)
        if chunk.bound:
            self.versions[chunk.index][managed.position] = managed.version

    def rebase_versions(self, chunk: Chunk) -> None:
        """Take the current versions for those of an unedited chunk."""
        if chunk.bound:
            self.versions[chunk.index] = chunk.versions()

    def note_versions(self, chunk: Chunk) -> None:
        """Take the current versions for those of an unedited chunk that is about to be bound."""
        self.versions[chunk.index] = chunk.versions()

    def note_edits_when_left(self, chunk: Chunk, versions: Sequence[int]) -> None:
        """With these versions, by position, the parameters stop showing the payload: see `_refuse_lost_edits`."""
        # A release bumps the versions after this. Without bumps both numbers show writes of the user's only.
        self._edits_when_left[chunk.index] = [version - chunk.num_bumps for version in versions]

    def renumber_edits(self, chunk: Chunk, positions: Sequence[int] | None) -> None:
        """Parameters of the chunk are gone, the rest had these positions. None: no edit of a view can be lost."""
        left = self._edits_when_left.pop(chunk.index, None)
        if left is not None and positions is not None:
            self._edits_when_left[chunk.index] = [left[position] for position in positions]

    def drop_chunk(self, chunk: Chunk) -> None:
        """None of the chunk's parameters is plain or edited any more: it was closed."""
        self.plain_chunks = [other for other in self.plain_chunks if other is not chunk]
        self.edited.pop(chunk.index, None)

    def write_back_all(self, chunks: Iterable[Chunk] | None = None) -> None:
        """Write back every chunk that has a payload."""
        for chunk in self.chunks if chunks is None else chunks:
            if chunk.payload is not None:
                self.write_back(chunk)

    def write_parameter(self, managed: ManagedParameter, payload: Region) -> None:
        """Make the parameter's elements in `payload` count from now on. A build overrides it."""
        self.write_home(managed, payload)

    def restore_home(self, managed: ManagedParameter, payload: Region, master: Tensor) -> None:
        """Set home and master to what they were before an edit that may have reached them. Local.

        payload: with the old weights. master: this rank's part of the old master, 1-D, in the order of memory.
        """
        chunk = managed.chunk
        with self._unwritten_exact(managed, payload):
            self._copy_home(managed, payload)
        if Kind.MASTER in chunk.homes:
            parts = master.split([piece.numel for piece in managed.pieces])
            for piece, part in zip(managed.pieces, parts, strict=True):
                write_master(chunk, piece.shard_start, part)
        set_secondary(managed, payload.flat[managed.in_payload])
        if has_split_master(chunk):
            self.snapshots.refresh(managed)

    def write_home(self, managed: ManagedParameter, payload: Region) -> None:
        """Copy the parameter's elements of `payload` to the home. The master changes only where the weight did.

        Where no `before_write` announced the write, all elements of a split master count as edited.
        """
        chunk = managed.chunk
        # They are read before the copy: without a snapshot the old weights are those in the home.
        before = self.snapshots.read(managed)
        with self._unwritten_exact(managed, payload):
            self._copy_home(managed, payload)
            if Kind.MASTER in chunk.homes:
                for number, piece in enumerate(managed.pieces):
                    was = None if before is None else before[number]
                    follow_edits(chunk, piece.shard_start, payload.flat[piece.in_payload], was)
        if chunk.secondary_layout is not None:
            set_secondary(managed, payload.flat[managed.in_payload])
        if not chunk.arrives_exactly:
            self._overwritten.add(chunk.index)
        if has_split_master(chunk):
            self.snapshots.refresh(managed)
            if before is None:
                self._warn_of_lost_fractions(managed)

    def _copy_home(self, managed: ManagedParameter, payload: Region) -> None:
        home = managed.chunk.homes[Kind.PARAM]
        # Where the home is the payload, or its first part, the values are at home already.
        if home.flat.data_ptr() != payload.flat.data_ptr():
            # A part of the home that holds the gradient is left alone: the step makes those weights from the master.
            for piece in managed.weight_pieces:
                self.memory.transfer.copy(home[piece.in_shard], payload[piece.in_payload])
            # Whoever writes to the payload next must come after the copies out of it.
            wait_on_stream(payload)

    @contextmanager
    def _unwritten_exact(self, managed: ManagedParameter, payload: Region) -> Iterator[None]:
        """Inside, elements of the payload that are as they have arrived have the values of the home.

        Where a payload is only near the home, nobody has written to such elements, and the home keeps its own.
        """
        chunk = managed.chunk
        shown: list[tuple[Tensor, Tensor]] = []
        if not chunk.arrives_exactly:
            home, bits = ready(chunk.homes[Kind.PARAM]), _BITS[chunk.dtype.itemsize]
            for piece in managed.weight_pieces:
                own, exact = payload.flat[piece.in_payload], home[piece.in_shard].to(payload.flat.device, copy=True)
                shown.append((own, own.clone()))
                is_written = own.view(bits) != as_received(chunk.fetch_layout, exact).view(bits)
                own.copy_(torch.where(is_written, own, exact))
        try:
            yield
        finally:
            for own, before in shown:
                own.copy_(before)

    def _warn_of_lost_fractions(self, managed: ManagedParameter) -> None:
        if managed.index not in self._warned_of:
            self._warned_of.add(managed.index)
            warn_at_script(
                f"parameter {managed.name!r} was written to where that shows only afterwards (in its own operator's "
                "forward, or through an old view): its fp32 master became its bf16 weights. If that goes on, updates "
                "below bf16's precision are lost; dtype= can keep the module in fp32",
            )
