"""Reduced gradients at rest: room is made for them, and what comes later in the step is added.

A reduced gradient rests in a home of its own, in its chunk's parameter home (`reuse_fp16_shard`), or in fp32 beside its
home once several micro-batches were added to 16 bits.

[Note: Lent homes] Once a 16-bit chunk's gradient is reduced, nobody needs its parameters before the step, which makes
them anew of the fp32 master. Until then the home is *lent* to the gradient. Who needs the parameters earlier takes the
home back: the gradient moves to memory of its own, which it keeps, and the parameters are rounded from the master
again, the same bits. Only the part of the home that this rank steps is lent, so all of it is this rank's own business:
no collective.

[Note: Lent payloads] A home that is a payload is lent only while the chunk is released and no view of it is alive. A
resident chunk is released for that, by this rank alone, as its fetches launch nothing. A kept slot is left at the start
of the reduction, which all ranks share, since whether it is fetched again decides whether ranks gather. So it may not
depend on where this rank's gradient rests, but on what all ranks know: whether the chunk was gathered after its
reduction in an earlier step.
"""

from __future__ import annotations

import warnings

import torch

from gemini.chunks.chunk import Chunk
from gemini.chunks.gradient import ChunkGradient, Content, ReducedState
from gemini.chunks.param_state import ParamState
from gemini.errors import BudgetError
from gemini.manager.params import ParamStore
from gemini.memory.modes import untracked
from gemini.memory.region import Region
from gemini.memory.slot import SharedStorage
from gemini.memory.transfer import ready, wait_on_host, wait_on_tier
from gemini.placement.demand import Kind, Tier
from optim import round_master_


class GradHomes:
    """Of all trainable chunks of one model. All of it is local."""

    def __init__(self, gradients: dict[int, ChunkGradient], params: ParamStore) -> None:
        """gradients: by chunk index; of other chunks when others are trained."""
        self._gradients = gradients
        self._params = params
        self._memory = params.memory
        self.transfer = params.memory.transfer
        self._lendable: list[Chunk] = []
        self._resident: dict[int, SharedStorage] = {}  # by chunk index
        self._gathers: dict[int, int] = {}  # of chunks with kept slots, at their last reduction since the step
        self._used_after: set[int] = set()  # of them, those gathered after their reduction, in any step
        self._has_warned = False
        self.renew()

    def renew(self) -> None:
        """Other chunks are trained from now on, or homes have moved. None is lent now."""
        self._lendable = [each.chunk for each in self._gradients.values() if each.chunk.lends_home]
        resident = {chunk.index: chunk for chunk in self._lendable if chunk.payload is not None}
        self._resident = {index: was for index, was in self._resident.items() if index in resident}
        for index, chunk in resident.items():
            payload = chunk.payload
            assert payload is not None
            if index not in self._resident or not self._resident[index].is_of(payload):
                self._params.binding.unbind(chunk)  # what parameters show does not count as ours
                self._resident[index] = SharedStorage(payload)

    # -- coming to rest

    def merge(self, gradient: ChunkGradient, reduced: Region, backward: int) -> None:
        """shard <- reduced, or += where this step has a gradient already that the payload did not begin with."""
        is_first = self.begin(gradient, backward)
        self.put(gradient.reduced(), reduced, replaces=is_first or gradient.content is Content.SUM)

    def begin(self, gradient: ChunkGradient, backward: int, is_sum: bool = False) -> bool:
        """Make room for what is reduced of backward number `backward`; whether it is the step's first.

        is_sum: it is of several backwards already, and rests in fp32 from the first on.
        """
        is_first = not gradient.is_reduced
        if is_sum or not (is_first or gradient.first_backward == backward):
            self.widen(gradient, backward)
        if gradient.reduced_state is ReducedState.WIDE:
            self.restore(gradient.chunk)
        elif is_first:
            if is_sum:
                self.before_reduction(gradient.chunk)
            self._make_room(gradient, backward)
        return is_first

    def put(self, target: Region, reduced: Region, replaces: bool) -> None:
        """A part of the reduced gradient: set if `replaces`, else added to."""
        if replaces:
            if target.flat.data_ptr() != reduced.flat.data_ptr():
                self.transfer.copy(target, reduced)
        elif target.tier is Tier.DEVICE:
            ready(target).add_(reduced.flat)
        else:
            staging = Region(Tier.HOST, torch.empty(target.numel, dtype=reduced.dtype, device="cpu"))
            self.transfer.copy(staging, reduced)
            wait_on_host(staging, target)
            target.flat.add_(staging.flat)

    def fill(self, gradient: ChunkGradient, backward: int) -> None:
        """The chunk has a gradient of zeros, as if backward number `backward` had made it, unless it has another.

        Every rank calls it at the same point.
        """
        if gradient.is_reduced:
            return
        with untracked():
            self.before_reduction(gradient.chunk)
            self._make_room(gradient, backward)
            ready(gradient.reduced()).zero_()

    def widen(self, gradient: ChunkGradient, backward: int) -> None:
        """From the second micro-batch on a 16-bit shard is added up in fp32; its room is kept for later steps.

        backward: the number of the one that is added, or that is the first of this step and comes in fp32.
        """
        if gradient.reduced_state is ReducedState.WIDE or not gradient.chunk.widens:
            return
        if gradient.wide is None:
            gradient.wide = self._take(gradient, torch.float32)
        is_first, shard = not gradient.is_reduced, gradient.shard
        gradient.become_reduced(ReducedState.WIDE, backward)
        if not is_first:
            self.transfer.copy(gradient.wide, shard)

    def _make_room(self, gradient: ChunkGradient, backward: int) -> None:
        """Before the first write of a step's reduced gradient: lend it the home, or give it one of its own."""
        chunk = gradient.chunk
        if gradient.home is None and not chunk.holds_grad:
            if chunk.lends_home and self._may_lend(chunk):
                chunk.become(ParamState.HOLDS_GRAD if chunk.slot is None else ParamState.GATHERED_BESIDE_GRAD)
            else:
                self._take_home(gradient)
        gradient.become_reduced(ReducedState.IN_SHARD, backward)

    def _take_home(self, gradient: ChunkGradient) -> None:
        """A home of its own, for good, for a gradient that has none. Raises BudgetError."""
        gradient.home = gradient.own_shard = self._take(gradient, gradient.chunk.gradient_dtype)

    def _take(self, gradient: ChunkGradient, dtype: torch.dtype) -> Region:
        """(optim_numel,) where the gradient rests, or on the host where that is full."""
        numel = gradient.chunk.optim_numel
        try:
            return self._memory.take(gradient.resting.tier, numel, dtype, Kind.GRAD)
        except BudgetError as refused:
            self._memory.note_evaded(refused)
            return self._memory.take(Tier.HOST, numel, dtype, Kind.GRAD)

    # -- lending, see [Note: Lent homes]

    def before_reduction(self, chunk: Chunk) -> None:
        """See [Note: Lent payloads]. Every rank calls it at the same point."""
        if not chunk.lends_home or chunk.own_slot is None:
            return
        self._note_gather(chunk)
        self._gathers[chunk.index] = chunk.num_gathers
        if chunk.pins or self._params.is_coming(chunk):
            self._used_after.add(chunk.index)
        elif chunk.state is ParamState.GATHERED and chunk.index not in self._used_after:
            self._params.release(chunk)

    def _note_gather(self, chunk: Chunk) -> None:
        if self._gathers.get(chunk.index, chunk.num_gathers) < chunk.num_gathers:
            self._used_after.add(chunk.index)

    def _may_lend(self, chunk: Chunk) -> bool:
        if self._params.is_coming(chunk):  # other ranks are being sent the home
            return False
        if chunk.state is ParamState.RESIDENT:
            return self._leave(chunk)
        return chunk.state is ParamState.RELEASED or chunk.own_slot is None

    def _leave(self, chunk: Chunk) -> bool:
        """Release a resident chunk, if nobody uses it or holds a view of it."""
        if chunk.pins:
            return False
        binding = self._params.binding
        binding.write_back(chunk)
        binding.unbind(chunk)
        if not self._params.nobody_holds(self._resident[chunk.index]):
            return False
        chunk.bump_versions()
        return True

    def move_out(self, chunk: Chunk) -> None:
        """The parameters are needed before the step: the gradient leaves their home, and they move in again."""
        if self._params.in_step and torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                "reuse_fp16_shard=True: parameters are used again between backward and step, as when micro-batches "
                "are added up. From now on their gradients have memory of their own, 2 bytes a parameter",
                stacklevel=2,
            )
        gradient = self._gradients[chunk.index]
        with untracked():
            lent = gradient.shard
            self._take_home(gradient)
            self.transfer.copy(gradient.shard, lent)
            self.restore(chunk)

    def restore(self, chunk: Chunk) -> None:
        """The gradient is not in the home any more: the parameters are made of the master again."""
        if not chunk.holds_grad:
            return
        home, master, part = chunk.homes[Kind.PARAM], chunk.homes[Kind.MASTER], chunk.lendable()
        with untracked():
            if home.tier is master.tier:
                round_master_(ready(part), ready(master))
            elif home.tier is Tier.HOST:
                whole = Region(Tier.HOST, torch.empty(part.numel, dtype=torch.float32, device="cpu"))
                self.transfer.copy(whole, master)
                round_master_(ready(part), ready(whole))
            else:
                rounded = Region(Tier.HOST, torch.empty(part.numel, dtype=chunk.dtype, device="cpu"))
                round_master_(rounded.flat, ready(master))
                self.transfer.copy(part, rounded)
                wait_on_host(rounded)  # which is temporary
            wait_on_tier(part)
        self.consumed(chunk)

    def consumed(self, chunk: Chunk) -> None:
        """The home is the parameters' again, whose values are there or about to be written."""
        if not chunk.holds_grad:
            return
        if chunk.slot is not None:
            chunk.become(ParamState.GATHERED)
        else:
            chunk.become(ParamState.RESIDENT if chunk.index in self._resident else ParamState.RELEASED)

    def end_step(self) -> None:
        """What is reduced from now on is of another step."""
        for chunk in self._lendable:
            self._note_gather(chunk)
        self._gathers.clear()

    def reset(self) -> None:
        """After a failed step, of which ranks may have seen more or less."""
        self._used_after.clear()
