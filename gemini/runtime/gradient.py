"""A chunk's gradient on this rank: its payload while a backward fills it, and the home of the reduced sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor, nn

from gemini.memory.slot import Slot
from gemini.memory.transfer import Region, ready
from gemini.placement.demand import Kind, Tier
from gemini.placement.gradient import Gradient, ReducedState, SumRule
from gemini.placement.packing import has_later_replicas
from gemini.runtime.chunk import Chunk, ManagedParameter

# -- torch's own `.grad`, where autograd accumulates, past the class of wrapped parameters, which shows another one.


_GRAD: Any = Tensor.grad
grad_of, set_grad_of = _GRAD.__get__, _GRAD.__set__
"""Getter and setter. Call them where `__torch_function__` is disabled."""


def set_grads(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set the `.grad` of each parameter; the loop over them runs in C. Local."""
    with torch._C.DisableTorchFunctionSubclass():
        deque(map(set_grad_of, parameters, grads), 0)


# -- Says which part of a chunk's GRAD home, or of a payload, holds what.


def numel_without_sums(chunk: Chunk, keeps_whole: bool) -> int:
    """Elements of a GRAD home before the part for fp32 sums of micro-batches, which a plan may append."""
    if not keeps_whole or chunk.is_stepped_whole:
        return chunk.rest_numel
    # With several units the shard lies behind the payload, see `shard_of`.
    return chunk.numel + (chunk.optim_numel if len(chunk.layout.units) > 1 else 0)


def shard_of(home: Region, chunk: Chunk, keeps_whole: bool) -> Region:
    """(optim_numel,) the part of the GRAD home that holds what this rank updates; in groups (rest_numel,)."""
    if not keeps_whole or chunk.is_stepped_whole:
        return home[: chunk.rest_numel]
    # This rank's slices of several units are not contiguous in the payload: their shard lies behind it.
    if len(chunk.layout.units) > 1:
        return home[chunk.numel : chunk.numel + chunk.optim_numel]
    start = chunk.layout.slices(chunk.rank)[0].payload_start
    return home[start : start + chunk.optim_numel]


def gaps_of(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """The parts of a payload that belong to no parameter."""
    # Parameters begin at multiples of `ALIGNMENT`, and a unit is padded so that each rank's slice has such a multiple.
    ranges = sorted((managed.offset, managed.offset + managed.numel) for managed in chunk.parameters)
    ends, starts = [0, *(end for _, end in ranges)], [*(start for start, _ in ranges), chunk.numel]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


# -- Attached gradients: the `.grad` of a chunk's parameters are views of its gradient home, where autograd adds to
# them.
#
# [Note: Attached gradients] Autograd leaves a parameter's first gradient in `.grad` as it is, and adds later ones to
# it. On a CPU, an addition by autograd takes less time than a copy of a small gradient from there to the home. So where
# one rank accumulates in the home, `.grad` is a view of it, also between steps. The home is then *blank* where a step
# has no gradient yet: negative zeros, since x + -0.0 has the bits of every x, while 0.0 + -0.0 is 0.0. On a GPU each
# addition would be a launch of its own, where one launch copies all gradients that wait.


BLANK = -0.0
_DTYPES = {torch.float32, torch.float64}
"""Of several micro-batches, 16-bit gradients are added in fp32. A complex zero cannot be filled with both signs."""


class Attached:
    """One chunk's parameters, whose `.grad` are views of the home."""

    def __init__(self, parameters: Sequence[nn.Parameter], home: Region, views: Sequence[Tensor]) -> None:
        """home: of whole payloads, on the CPU. views: of it, by parameter."""
        self._parameters = parameters
        self._home = home
        self._views = views
        self._is_blank = False
        # False while some `.grad` are views and others are not, as an interrupt may leave them. Gradients are then
        # taken over as if nothing were attached: a gradient that is in the home already is copied to itself.
        self.is_complete = False

    def attach_all(self) -> None:
        """Make the home blank, and every `.grad` a view of it. Local."""
        # While the attachment is incomplete, gradients are copied into the home, of which `_is_blank` knows nothing.
        if not (self._is_blank and self.is_complete):
            ready(self._home).fill_(BLANK)
            self._is_blank = True
        if not self.is_complete:
            set_grads(self._parameters, self._views)
            self.is_complete = True

    def note_gradients(self) -> None:
        """Autograd has added to the home."""
        self._is_blank = False

    def detach_all(self) -> None:
        """Set every `.grad` to None. What was added stays in the home. Local."""
        self.is_complete = False
        set_grads(self._parameters, repeat(None))


def may_attach(chunk: Chunk, home: Region) -> bool:
    """Whether gradients of the chunk, which one rank accumulates in `home`, may be attached."""
    return chunk.is_fine and chunk.dtype in _DTYPES and home.flat.device.type == "cpu"


# -- One chunk's gradient on this rank: its books, and the memory that holds it. Nothing is moved here.


class ChunkGradient(Gradient):
    """One trainable chunk's gradient on this rank."""

    # the memory of the local gradient: written by `become`
    slot: Slot | None
    payload: Region | None
    views: tuple[Tensor, ...]
    spilled: Region | None
    whole: Region | None
    whole_views: tuple[Tensor, ...]

    def __init__(self, chunk: Chunk, keeps_whole: bool) -> None:
        """keeps_whole: the chunk's GRAD home, if it gets one, has room for a whole payload."""
        world_size, rests_as_is = chunk.layout.world_size, chunk.gradient_dtype is chunk.dtype
        sums = SumRule.of(world_size, chunk.dtype.itemsize, rests_as_is=rests_as_is, widens=chunk.widens)
        super().__init__(
            chunk.index,
            chunk.oversize,
            sums,
            _trained(chunk),
            is_alone=world_size == 1,
            is_chosen=chunk.is_chosen,
            has_replicas=has_later_replicas(chunk.grad_layout, chunk.optim_layout),
            in_groups=chunk.in_groups,
        )
        self.chunk: Final = chunk
        self.gaps: Final = gaps_of(chunk)  # (start, end) of each padding, in payload elements
        # A home in another dtype than the parameters' cannot take payloads as they are.
        self._keeps_whole: Final = keeps_whole and rests_as_is

        # memory, taken when it is needed for the first time, and kept from step to step
        self.home: Region | None = None
        self.wide: Region | None = None  # fp32, (optim_numel,)
        self.wide_is_planned = False  # `wide` is a view of the last part of the GRAD home
        self._attached: Attached | None = None
        self.adopt_home()
        self.unsynced: Region | None = None  # fp32 (fp64 for fp64), (numel,), on the host

        self.num_writes = 0  # writes of users to the reduced gradient so far

    def names(self) -> str:
        """See `Gradient`."""
        return self.chunk.names()

    def adopt_home(self) -> None:
        """Use the chunk's GRAD home, if it has one by now. Nothing is open or reduced at this moment."""
        self.detach_home()
        chunk, home = self.chunk, self.chunk.homes.get(Kind.GRAD)
        # Without a home of its own the gradient rests in the parameter home, see [Note: Lent homes].
        self.home = home
        self.own_shard = None if home is None else shard_of(home, chunk, self._keeps_whole)  # (optim_numel,)
        # A GRAD home with room for a whole payload on the device takes gradients directly, without a slot.
        self.has_whole = home is not None and self._keeps_whole and home.tier is Tier.DEVICE
        self.whole = home[: chunk.numel] if home is not None and self.has_whole else None
        self.whole_views = () if self.whole is None else chunk.views_of(self.whole.flat)
        # The plan may put the fp32 sums of micro-batches at the end of the home.
        sums = None if home is None else home[numel_without_sums(chunk, self._keeps_whole) :]
        # Memory for sums that was taken outside of the plan stays. A view of the old home's last part is replaced, or
        # dropped.
        if (sums is not None and sums.numel > 0) or self.wide_is_planned:
            self.wide_is_planned = sums is not None and sums.numel > 0
            self.wide = sums.view(torch.float32) if sums is not None and self.wide_is_planned else None

    def take_home(self, home: Region) -> None:
        """Rest in `home`, (optim_numel,), from now on, and not in the parameters'."""
        self.home = self.own_shard = home

    def replace(self, before: ChunkGradient) -> None:
        """Keep what `before` knew about this chunk's gradient, whose memory was replaced between steps."""
        self.num_writes = before.num_writes
        self.take_over(before)

    @property
    def attached(self) -> Attached | None:
        """What autograd adds to, or None if gradients are copied. See [Note: Attached gradients]."""
        return self._attached if self._attached is not None and self._attached.is_complete else None

    def attach_home(self) -> None:
        """Let autograd add to the home, if it may, and make it blank. Nothing is open or reduced now. Local."""
        if self._attached is None and self.in_place and self.whole is not None and may_attach(self.chunk, self.whole):
            self._attached = Attached(self.chunk.raw, self.whole, self.whole_views)
        if self._attached is not None:
            self._attached.attach_all()

    def detach_home(self) -> None:
        """Let gradients come in `.grad` from now on. Local."""
        if self._attached is not None:
            self._attached.detach_all()
            self._attached = None

    def count_write(self) -> None:
        """The reduced gradient was written to: whole copies that were gathered before are stale."""
        self.num_writes += 1

    # -- where it rests

    @property
    def resting(self) -> Region:
        """The home where the reduced gradient rests: its own, or the parameters'."""
        return self.chunk.homes[Kind.PARAM] if self.home is None else self.home

    @property
    def shard(self) -> Region:
        """(optim_numel,) the reduced gradient at rest."""
        return self.chunk.lendable() if self.own_shard is None else self.own_shard

    def reduced(self) -> Region:
        """(optim_numel,) the gradient of this step, `chunk.gradient_dtype` or fp32.

        In groups of ranks that have not exchanged it so far, it is (rest_numel,): the sum of this group.
        """
        if self.in_groups:
            return self.sum_of_group() if self.awaits_replicas else self.sum_of_group()[: self.chunk.optim_numel]
        if self.reduced_state is ReducedState.WIDE:
            assert self.wide is not None
            return self.wide
        return self.shard if self.own_shard is None else self.own_shard

    def parts_of(self, managed: ManagedParameter, reduced: Tensor) -> list[Tensor]:
        """Views of the parameter's elements in `reduced()`, whose content is given."""
        if not (self.in_groups and self.awaits_replicas):
            return managed.own_parts(reduced)
        chunk = self.chunk
        pieces = chunk.grad_layout.pieces(chunk.rank // chunk.num_groups, managed.offset, managed.numel)
        return [reduced[piece.in_shard] for piece in pieces]

    def sum_of_group(self) -> Region:
        """(rest_numel,) the memory in which a group of ranks adds up what each of its ranks then uses a part of."""
        region = self.wide if self.reduced_state is ReducedState.WIDE else self.shard
        assert region is not None
        return region

    def expect_all(self) -> None:
        """Count the payload as complete once every parameter has a gradient. Call it again after flags changed."""
        self.expect_from(_trained(self.chunk))


def _trained(chunk: Chunk) -> bytes:
    return bytes(managed.requires_grad for managed in chunk.parameters)
