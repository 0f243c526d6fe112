"""Where gradients are: open payloads in gradient slots, reduced shards at home, unreduced ones on the host.

A chunk's gradient is *open* from its first to its last local gradient; then it is reduced and merged into its
home. An open payload that must make room moves to the host as it is, by this rank alone, and comes back when it is
needed. Where this rank holds the whole gradient on the device anyway, gradients are written to the home directly.
A gradient without a home of its own rests in its chunk's parameter home, see shared_homes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, Home
from gemini.errors import BudgetError
from gemini.memory.ledger import Traffic
from gemini.memory.slot import Slot, SlotPool
from gemini.memory.tier import MemoryTier, copy
from gemini.observe import Observer
from gemini.placement.demand import Kind, Tier


@dataclass(eq=False)
class ChunkGradient:
    """One trainable chunk's gradient on this rank."""

    chunk: Chunk
    home: Home | None  # its own; `own_shard` (and `whole`, where this rank keeps that) are views of it
    own_shard: Tensor | None  # (optim_numel,)
    whole: Tensor | None  # (numel,) on the device: a payload of its own, no slot needed
    got: bytearray  # by position: a gradient came since the last step, on this rank
    agreed: bytearray  # the same on any rank, as of the last reduction, equal on all ranks; with one rank `got` itself
    had: bytearray  # by position: `agreed` of some step since gradients were last set to None
    fired: bytearray  # by position: a gradient came since the payload was opened
    trained: bytes  # by position: the parameter is not frozen
    expected: int  # gradients after which the payload is complete
    num_fired: int = 0  # ones in `fired`
    payload: Tensor | None = None  # (numel,) parameter dtype, while open
    views: tuple[Tensor, ...] = ()
    expects: list[Tensor | None] = field(default_factory=list)  # by position: see `expect`
    slot: Slot | None = None
    spilled: Tensor | None = None  # the open payload's bytes on the host, while it has no slot
    unsynced: Home | None = None  # fp32, (numel,): what backwards under no_sync() left
    has_unsynced: bool = False  # on this rank
    is_behind: bool = False  # there were backwards under no_sync() since its last reduction; equal on all ranks
    num_writes: int = 0  # how often a user changed the reduced gradient, ever
    merged: bool = False  # the shard holds a gradient of this step
    merged_in: int = -1  # the backward that was merged first
    is_clean: bool = False  # what no gradient wrote to since the payload was opened is zero
    resumed: bool = False  # the payload began with what the home holds; gradients are added to that
    direct: bool = False  # one rank, whole gradient at home: what is written there is reduced already
    in_pieces: bool = False  # some backward brought a parameter's gradient more than once
    reducing: bool = False  # the payload is on its way to the other ranks
    wide: Home | None = None  # fp32 shard, once several micro-batches were added to a 16-bit one
    use_wide: bool = False
    whole_views: tuple[Tensor, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()  # (start, end) of the paddings, in payload elements

    @property
    def is_open(self) -> bool:
        """Local gradients are in the payload, and its reduction has not begun."""
        return (self.payload is not None or self.spilled is not None) and not self.reducing

    @property
    def adds_to_home(self) -> bool:
        """The payload is open and began with what the home holds of this step, or is that home."""
        return self.resumed or (self.direct and self.slot is None and self.merged)

    def expect(self) -> None:
        """The payload is open: the next gradients of these parameters are copied to the views that stand in `expects`.

        Those of the others are added to what the view holds, or refused.
        """
        held = self.got if self.adds_to_home else self.fired
        if not any(held) and all(self.trained):
            self.expects = list(self.views)
            return
        rows = zip(self.fired, held, self.trained, self.views, strict=True)
        self.expects = [
            view if is_trained and not (fired or is_held) else None for fired, is_held, is_trained, view in rows
        ]

    def expect_nothing(self) -> None:
        """The payload is closed, or on its way."""
        self.expects = [None] * len(self.fired)

    @property
    def resting(self) -> Home:
        """Where the reduced gradient rests: its own home, or the parameters'."""
        return self.chunk.homes[Kind.PARAM] if self.home is None else self.home

    @property
    def shard(self) -> Tensor:
        """(optim_numel,) the reduced gradient at rest."""
        return self.chunk.lendable() if self.own_shard is None else self.own_shard

    def reduced(self) -> Tensor:
        """(optim_numel,) the gradient of this step, `chunk.gradient_dtype` or fp32."""
        if self.use_wide:
            assert self.wide is not None
            return self.wide.flat
        return self.shard

    def reduced_tier(self) -> Tier:
        return self.wide.tier if self.use_wide and self.wide is not None else self.resting.tier


class GradientStore:
    """Gradient slots and the memory behind every `ChunkGradient`."""

    def __init__(self, device: MemoryTier, host: MemoryTier, traffic: Traffic, observer: Observer) -> None:
        self.device = device
        self.host = host
        self.traffic = traffic
        self.observer = observer
        self.gradients: dict[int, ChunkGradient] = {}  # by chunk index
        self.pools: tuple[SlotPool, SlotPool] | None = None
        self.finish_reduction: Callable[[], None] = lambda: None  # the one in flight holds a slot
        self.peak_open = 0
        self._num_open = 0  # in a slot or spilled, and not on the way to the other ranks

    def open_pools(self, regular: tuple[int, int], oversize: tuple[int, int]) -> None:
        """(bytes, count) of both sizes."""
        self.pools = (
            SlotPool(self.device, regular[0], regular[1], "gradient slots"),
            SlotPool(self.device, oversize[0], oversize[1], "gradient slots"),
        )

    def take_slots(self) -> None:
        """The memory of all gradient slots. Raises BudgetError."""
        for pool in self.pools or ():
            pool.fill()

    def add(self, chunk: Chunk, keeps_whole: bool) -> ChunkGradient:
        """The gradient of a trainable chunk. `keeps_whole`: its GRAD home, if it has one, holds a whole payload."""
        home = chunk.homes.get(Kind.GRAD)
        rank = chunk.rank if chunk.optim_layout.world_size > 1 else 0
        keeps_whole = keeps_whole and chunk.gradient_dtype is chunk.dtype
        whole = home.flat[: chunk.numel] if home is not None and keeps_whole and home.tier is Tier.DEVICE else None
        if home is None:
            shard = None
        elif not keeps_whole or chunk.optim_layout.world_size == 1:
            shard = home.flat[: chunk.optim_numel]
        elif len(chunk.layout.units) == 1:
            start = chunk.layout.slices(rank)[0].payload_start
            shard = home.flat[start : start + chunk.optim_numel]
        else:  # slices of several units do not lie together
            shard = home.flat[chunk.numel :]
        count = len(chunk.parameters)
        got, fired = bytearray(count), bytearray(count)
        agreed = got if chunk.layout.world_size == 1 else bytearray(count)
        had = bytearray(count)
        gradient = ChunkGradient(
            chunk, home, shard, whole, got, agreed, had, fired, _trained(chunk), count, gaps=_gaps(chunk)
        )
        gradient.expect_nothing()
        if whole is not None:
            gradient.whole_views = chunk.views_of(whole)
            gradient.direct = chunk.layout.world_size == 1
        self.gradients[chunk.index] = gradient
        return gradient

    def expect_all(self) -> None:
        """Payloads are complete with a gradient of every parameter. Called after flags have changed."""
        for gradient in self.gradients.values():
            gradient.trained = _trained(gradient.chunk)
            gradient.expected = len(gradient.fired)

    def remove_all(self) -> None:
        """Between steps: no chunk has a gradient any more, and what was taken beside the homes is given back."""
        for gradient in self.gradients.values():
            late = None if Kind.GRAD in gradient.chunk.homes else gradient.home  # of one that began without a home
            spares = (gradient.wide, Kind.GRAD), (late, Kind.GRAD), (gradient.unsynced, "unsynced gradients")
            for spare, kind in spares:
                if spare is not None:
                    self.tier(spare.tier).give(spare.buffer, kind)
        self.gradients.clear()

    def open(self, gradient: ChunkGradient, resume: bool = False) -> None:
        """Make the payload writable: the whole home where that is free, else a slot, filled from a spill if any.

        resume: go on from what was merged before. One rank alone does so, since (a + b) + c, as autograd adds, has
        other bits than a + (b + c).
        """
        if gradient.payload is not None:
            return
        chunk = gradient.chunk
        if gradient.whole is not None and gradient.spilled is None and self._may_write_home(gradient):
            gradient.payload, gradient.views = gradient.whole, gradient.whole_views
            gradient.expect()
            return
        slot = self._free_slot(gradient)
        assert slot.buffer is not None
        if gradient.spilled is None:
            self._num_open += 1
            self.peak_open = max(self.peak_open, self._num_open)
        if chunk.index not in slot.views:
            payload = slot.buffer[: chunk.payload_bytes].view(chunk.dtype)
            slot.views[chunk.index] = payload, chunk.views_of(payload)
        slot.chunk = chunk.index
        gradient.slot = slot
        gradient.payload, gradient.views = slot.views[chunk.index]
        if gradient.spilled is not None:
            self._unspill(gradient, gradient.payload, gradient.spilled)
        elif resume:
            gradient.resumed = True
            copy(gradient.payload, gradient.shard, self.device, self.tier(gradient.resting.tier), self.traffic)
        gradient.expect()

    def complete(self, gradient: ChunkGradient) -> None:
        """Zeros where no gradient was written since the payload was opened: paddings and unused parameters."""
        if gradient.resumed or gradient.is_clean or gradient.payload is None:
            return
        for start, end in gradient.gaps:
            gradient.payload[start:end].zero_()
        if gradient.num_fired < len(gradient.fired):
            for fired, view in zip(gradient.fired, gradient.views, strict=True):
                if not fired:
                    view.zero_()

    def _may_write_home(self, gradient: ChunkGradient) -> bool:
        """Before anything was reduced into it; or to add to it, if one rank does that in full precision."""
        return not gradient.merged or (gradient.direct and gradient.chunk.dtype.itemsize >= 4)

    def leave(self, gradient: ChunkGradient) -> None:
        """The payload goes to the other ranks: it is not open any more."""
        self._num_open -= gradient.slot is not None
        gradient.reducing = True
        gradient.expect_nothing()

    def close(self, gradient: ChunkGradient) -> None:
        """The payload's content is not needed any more."""
        gradient.expect_nothing()
        if not gradient.reducing:
            self._num_open -= gradient.slot is not None or gradient.spilled is not None
        if gradient.slot is not None:
            assert self.pools is not None
            self.pools[gradient.chunk.oversize].vacate(gradient.slot)
        if gradient.spilled is not None:
            self.host.give(gradient.spilled, "spilled gradients")
        gradient.slot = None
        gradient.payload = gradient.spilled = None
        gradient.views = ()
        gradient.resumed = gradient.reducing = gradient.is_clean = False
        gradient.fired = bytearray(len(gradient.fired))
        gradient.num_fired = 0

    def _free_slot(self, wanted: ChunkGradient) -> Slot:
        assert self.pools is not None
        pool = self.pools[wanted.chunk.oversize]
        slot = pool.free()
        if slot is None:
            self.finish_reduction()
            slot = pool.free()
        if slot is not None:
            return slot
        open_chunks = [self.gradients[slot.chunk] for slot in pool.slots if slot.chunk is not None]
        # complete ones wait for their turn; of the others the first in the model gets its next gradient last
        victim = max(open_chunks, key=lambda g: (g.num_fired == g.expected, -g.chunk.index))
        return self._spill(victim, wanted)

    def _spill(self, victim: ChunkGradient, wanted: ChunkGradient) -> Slot:
        """Move an open payload to the host, unreduced: `wanted` needs its slot. Local to this rank: no collective."""
        assert victim.slot is not None and victim.payload is not None and self.pools is not None
        try:
            buffer = self.host.take(victim.chunk.payload_bytes, "spilled gradients")
        except BudgetError as error:
            raise error.reworded(
                f"no gradient slot is free and the host cannot take an open gradient of chunk {victim.chunk.index} "
                f"({victim.chunk.names()}): {error}"
            ) from None
        index, ends = victim.chunk.index, ("gradient slot", self.host.name)
        why = f"room for the gradient of chunk {wanted.chunk.index}"
        with self.observer.moving("spill", index, *ends, buffer.nbytes, why):
            copy(buffer, victim.payload.view(torch.uint8), self.host, self.device, self.traffic)
            self.device.synchronize()
        slot = victim.slot
        victim.spilled, victim.slot, victim.payload, victim.views = buffer, None, None, ()
        victim.expect_nothing()
        self.pools[victim.chunk.oversize].vacate(slot)
        return slot

    def _unspill(self, gradient: ChunkGradient, payload: Tensor, spilled: Tensor) -> None:
        index, ends = gradient.chunk.index, (self.host.name, "gradient slot")
        with self.observer.moving("unspill", index, *ends, spilled.nbytes, "gradients of it, or its reduction"):
            copy(payload.view(torch.uint8), spilled, self.device, self.host, self.traffic)
            self.device.synchronize()
        self.host.give(spilled, "spilled gradients")
        gradient.spilled = None

    def widen(self, gradient: ChunkGradient) -> None:
        """From the second micro-batch on a 16-bit shard is added up in fp32; its room is kept for later steps."""
        if gradient.use_wide or not gradient.chunk.widens:
            return
        if gradient.wide is None:
            gradient.wide = self._take(gradient, torch.float32)
        gradient.use_wide = True
        if not gradient.merged:  # the first of this step comes in fp32
            return
        source, target = self.tier(gradient.resting.tier), self.tier(gradient.wide.tier)
        if source is self.host:
            self.device.synchronize()  # it may still be on its way there
        copy(gradient.wide.flat, gradient.shard, target, source, self.traffic)
        if source is not target:
            self.device.synchronize()

    def take_home(self, gradient: ChunkGradient) -> None:
        """A home of its own, for good, for a gradient that has none. Raises BudgetError."""
        gradient.home = self._take(gradient, gradient.chunk.gradient_dtype)
        gradient.own_shard = gradient.home.flat

    def _take(self, gradient: ChunkGradient, dtype: torch.dtype) -> Home:
        """(optim_numel,) where the gradient rests, or on the host where that is full."""
        num_bytes = dtype.itemsize * gradient.chunk.optim_numel
        tier = gradient.resting.tier
        try:
            buffer = self.tier(tier).take(num_bytes, Kind.GRAD)
        except BudgetError:
            tier = Tier.HOST
            buffer = self.host.take(num_bytes, Kind.GRAD)
        return Home(tier, buffer, buffer.view(dtype))

    def forget(self, gradient: ChunkGradient) -> None:
        """The step consumed the gradient, or it was discarded."""
        if gradient.is_open or gradient.reducing:
            self.close(gradient)
        gradient.got[:] = gradient.agreed[:] = bytes(len(gradient.got))
        gradient.merged = gradient.use_wide = gradient.has_unsynced = gradient.is_behind = False

    def tier(self, tier: Tier) -> MemoryTier:
        return self.device if tier is Tier.DEVICE else self.host


def _trained(chunk: Chunk) -> bytes:
    return bytes(managed.requires_grad for managed in chunk.parameters)


def _gaps(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """The parts of a payload that belong to no parameter."""
    gaps, end = [], 0
    for managed in sorted(chunk.parameters, key=lambda m: m.offset):
        if managed.offset > end:
            gaps.append((end, managed.offset))
        end = max(end, managed.offset + managed.numel)
    if end < chunk.numel:
        gaps.append((end, chunk.numel))
    return tuple(gaps)
