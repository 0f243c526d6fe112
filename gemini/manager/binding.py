"""Binding: makes parameters views of their chunk's payload, or placeholders again, and keeps what users write to them.

[Note: Edits] Parameters may be written to outside their operators (`p.mul_()`, `p.data.zero_()`). The payload is then
newer than its home and the fp32 master. It is written back before the chunk leaves its slot, before a step, and before
anything reads the home. A write through the parameter raises its version counter; `.data` marks the parameter edited.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.param_state import ParamState
from gemini.chunks.placeholder import lift_guard, set_guard, set_own_data, unguarded
from gemini.errors import ReleasedParameterError
from gemini.manager.masters import follow_edits, write_master
from gemini.manager.snapshots import Snapshots, has_split_master
from gemini.memory.memory import Memory
from gemini.memory.modes import unseen, untracked
from gemini.memory.region import Region
from gemini.memory.transfer import wait_on_stream
from gemini.placement.demand import Kind
from gemini.script import warn_at_script


class Binding:
    """Binds and unbinds the parameters of one model's chunks."""

    def __init__(self, chunks: Collection[Chunk], memory: Memory, released_class: type[nn.Parameter]) -> None:
        self.chunks = chunks
        self.memory = memory
        self.released_class = released_class
        self.plain_chunks: list[Chunk] = []
        self.edited: dict[int, set[int]] = {}  # chunk -> positions of edited parameters
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
                # The parameters show placeholders, whose guard would send each assignment to `access/unasked.py`.
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
        chunk.note_plain()
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
            chunk.note_covered()

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
        chunk.note_unbound()

    def outdate(self, chunk: Chunk) -> None:
        """A gathered chunk that stays is about to be updated: its next user gathers it again. Local.

        Its parameters fetch themselves until then, and stay views of its slot. See [Note: Staying chunks] in
        staying.py.
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
                chunk.note_covered()
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
        self._copy_home(managed, payload)
        if Kind.MASTER in chunk.homes:
            parts = master.split([piece.numel for piece in managed.pieces])
            for piece, part in zip(managed.pieces, parts, strict=True):
                write_master(chunk, piece.shard_start, part)
        if has_split_master(chunk):
            self.snapshots.refresh(managed)

    def write_home(self, managed: ManagedParameter, payload: Region) -> None:
        """Copy the parameter's elements of `payload` to the home. The master changes only where the weight did.

        Where no `before_write` announced the write, all elements of a split master count as edited.
        """
        chunk = managed.chunk
        # They are read before the copy: without a snapshot the old weights are those in the home.
        before = self.snapshots.read(managed)
        self._copy_home(managed, payload)
        if Kind.MASTER in chunk.homes:
            for number, piece in enumerate(managed.pieces):
                was = None if before is None else before[number]
                follow_edits(chunk, piece.shard_start, payload.flat[piece.in_payload], was)
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

    def _warn_of_lost_fractions(self, managed: ManagedParameter) -> None:
        if managed.index not in self._warned_of:
            self._warned_of.add(managed.index)
            warn_at_script(
                f"parameter {managed.name!r} was written to where that shows only afterwards (in its own operator's "
                "forward, or through an old view): its fp32 master became its bf16 weights. If that goes on, updates "
                "below bf16's precision are lost; dtype= can keep the module in fp32",
            )
