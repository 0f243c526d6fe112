"""Where gradients are: `GradMemory` has the slots that a backward fills, `GradHomes` where the reduced sums rest."""

from __future__ import annotations

from collections.abc import Callable

import torch

from gemini.errors import BudgetError
from gemini.log import warn_at_script
from gemini.memory.host_sums import HostSums
from gemini.memory.memory import RankMemory
from gemini.memory.modes import untracked
from gemini.memory.slot import SharedStorage, Slot
from gemini.memory.transfer import Region, ready, wait_on_host, wait_on_stream, wait_on_tier
from gemini.observe import Observer, OpenMove
from gemini.placement.demand import Kind, Tier, update_tier
from gemini.placement.gradient_rules import LendingHistory, first_to_spill, lies_beside_gradient
from gemini.runtime.chunk import Chunk, ParamState
from gemini.runtime.gradient import ChunkGradient, Content, GradState, ReducedState, UnsyncedState
from gemini.runtime.params import ParamStore
from optim import round_master_

# -- Observes how many micro-batches a step has.


_STEADY_STEPS = 2
"""Steps with an unchanged micro-batch count before replanning; doubles after each replan.

The last step of an epoch may have fewer micro-batches, and a training whose count alternates would only move states.
"""


class MicroBatches:
    """The micro-batches of one model's steps. Ranks agree on each number that is noted."""

    def __init__(self, number: int) -> None:
        """number: the count that the plan in force is for."""
        self._followed = self._last = number
        self._num_alike = 0
        self._needed = _STEADY_STEPS

    def note_step(self, number: int) -> None:
        """A step has added up `number` backwards. Local."""
        self._num_alike = self._num_alike + 1 if number == self._last else 1
        self._last = number

    @property
    def have_changed(self) -> bool:
        """Whether steps keep to another count than the plan's."""
        # A step without a backward (count 0) is no reason for a plan.
        return self._last != self._followed and self._num_alike >= self._needed and self._last > 0

    def follow(self) -> int:
        """The count that the plan is to follow now. Local."""
        self._followed, self._needed = self._last, 2 * self._needed
        return self._followed


# -- The memory of gradients: open payloads in gradient slots, reduced shards at home, unreduced sums on the host.
#
# A chunk's gradient is *open* from its first to its last local gradient. Then it is reduced and merged into its home.
# An open payload that must make room is spilled to the host unreduced, by this rank alone, and comes back when it is
# needed. Where this rank holds the whole gradient on the device anyway, gradients are written to the home directly. A
# gradient without a home of its own rests in its chunk's parameter home, see [Note: Lent homes].


class GradMemory:
    """The gradient slots, and the memory behind every `ChunkGradient`."""

    def __init__(self, memory: RankMemory, observer: Observer, keeps_whole: bool) -> None:
        """keeps_whole: this rank keeps whole gradients, and GRAD homes have room for whole payloads."""
        self.memory = memory
        self.observer = observer
        self.gradients: dict[int, ChunkGradient] = {}  # by chunk index
        self.pools = memory.gradient_slots
        self._keeps_whole = keeps_whole
        self.peak_open = 0
        self._num_open = 0  # in a slot or spilled, and not being reduced
        self._num_by_size = [0, 0]  # trainable chunks with regular slots, and with larger ones

    def add(self, chunk: Chunk) -> None:
        """Give a trainable chunk a gradient, without memory so far."""
        self.gradients[chunk.index] = ChunkGradient(chunk, self._keeps_whole)
        self._num_by_size[chunk.oversize] += 1

    def give_back(self) -> None:
        """Between steps: give back slots and the memory beside the homes. No chunk has a gradient any more."""
        self.pools.close()
        for gradient in self.gradients.values():
            # A home that a gradient took when its parameter home could not be lent. `Migration` gives planned homes
            # back.
            late = None if Kind.GRAD in gradient.chunk.homes else gradient.home
            wide = None if gradient.wide_is_planned else gradient.wide
            spares = (wide, Kind.GRAD), (late, Kind.GRAD), (gradient.unsynced, "unsynced gradients")
            for spare, kind in spares:
                if spare is not None:
                    self.memory.free(spare, kind)
            gradient.wide = gradient.unsynced = None
        self.gradients.clear()
        self._num_by_size = [0, 0]

    def lacks_slot(self, gradient: ChunkGradient) -> bool:
        """Whether the gradient can only be opened in a slot, and none is free."""
        if gradient.state is GradState.CLOSED and gradient.may_write_home:
            return False
        return self.pools[gradient.chunk.oversize].first_free() is None

    def is_in_nobodys_way(self, gradient: ChunkGradient) -> bool:
        """Whether the gradient may stay open for any time: no other gradient lacks a slot because of it."""
        if gradient.state is GradState.AT_HOME:
            return True
        if gradient.state is GradState.CLOSED and gradient.may_write_home:
            return True
        # With as many slots as chunks of this size each gradient can be open at once.
        oversize = gradient.chunk.oversize
        return self.pools[oversize].count >= self._num_by_size[oversize]

    def open(self, gradient: ChunkGradient, backward: int, zero: bool = False) -> None:
        """Make the payload writable: the home if it may be written, else a slot, filled from a spill if there is one.

        backward: the number of the backward that opens it. zero: fill it with zeros, unless gradients stay in the home.
        """
        if gradient.payload is not None:
            return
        if gradient.state is GradState.SPILLED:
            self._unspill(gradient)
            return
        slot, payload, content = None, gradient.whole, Content.UNDEFINED
        if payload is None or not gradient.may_write_home:
            slot = self._slot_for(gradient)
            payload = gradient.chunk.payload_in(slot)
            # One rank continues the sum so far, in autograd's order of additions.
            if gradient.resumes(backward):
                self.memory.transfer.copy(payload, gradient.shard)
                content = Content.SUM
        # One rank, second micro-batch: autograd's gradients are added to the sum that is in the home.
        elif gradient.in_place and gradient.is_reduced:
            content = Content.SUM
        # The end of the last step has filled an attached home with negative zeros.
        elif gradient.attached is not None:
            content = Content.ZERO
        # The slot's last content may still be on its way to the host, or this one's on its way to the slot.
        wait_on_stream(payload)
        if zero and content is Content.UNDEFINED and not gradient.in_place:
            payload.flat.zero_()
            content = Content.ZERO
        if slot is None:
            gradient.become(GradState.AT_HOME, content=content)
            return
        gradient.become(GradState.IN_SLOT, slot, content)
        self._num_open += 1
        self.peak_open = max(self.peak_open, self._num_open)

    def complete(self, gradient: ChunkGradient) -> None:
        """Zero what no gradient was written to, paddings and unused parameters, before the payload is read whole."""
        if gradient.content is not Content.UNDEFINED or gradient.payload is None:
            return
        for start, end in gradient.gaps:
            gradient.payload.flat[start:end].zero_()
        if gradient.num_fired < len(gradient.fired):
            _zero_unwritten(gradient)

    def begin_reduction(self, gradient: ChunkGradient) -> None:
        """The payload goes to the other ranks and is not open any more."""
        self._num_open -= gradient.slot is not None
        gradient.become(GradState.REDUCING)

    def rest_in_place(self, gradient: ChunkGradient, backward: int) -> None:
        """Close a gradient that was written to its home. Elements that got no gradient become zero."""
        # In a later backward of the step, elements without a gradient keep the sum so far. Paddings have held zeros, of
        # either sign, since the home was made.
        if gradient.reduced_state is ReducedState.NONE:
            gradient.become_reduced(ReducedState.IN_SHARD, backward)
            if gradient.num_fired < len(gradient.fired):
                _zero_unwritten(gradient, are_left=gradient.content is Content.ZERO)
        self.close(gradient)

    def close(self, gradient: ChunkGradient) -> None:
        """Free the payload's slot, or its spilled memory: the content is not needed any more."""
        # A gradient that is being reduced was subtracted when its reduction began.
        self._num_open -= gradient.state in (GradState.IN_SLOT, GradState.SPILLED)
        if gradient.slot is not None:
            self.pools[gradient.chunk.oversize].vacate(gradient.slot)
        spilled = gradient.spilled
        # Closed before the memory is given: an interrupted `close` must not give it back twice.
        gradient.become(GradState.CLOSED)
        if spilled is not None:
            self.memory.free(spilled, "spilled gradients")

    def _slot_for(self, gradient: ChunkGradient) -> Slot:
        """Take a slot for the gradient; spill another gradient if none is free."""
        pool = self.pools[gradient.chunk.oversize]
        slot = pool.first_free()
        if slot is None:
            # None of these is being reduced, and could not be spilled then: `make_way` has finished a reduction that
            # held the last slot.
            inside = [self.gradients[slot.chunk] for slot in pool.slots if slot.chunk is not None]
            victim = first_to_spill((each.num_fired == each.expected, each.chunk.index) for each in inside)
            slot = self._spill(self.gradients[victim], gradient)
        slot.occupy(gradient.chunk.index)
        return slot

    def _spill(self, victim: ChunkGradient, wanted: ChunkGradient) -> Slot:
        """Move an open payload to the host, unreduced: `wanted` needs its slot. Local: other ranks may not spill."""
        assert victim.slot is not None and victim.payload is not None
        try:
            # This is staging memory, which is never registered with the driver: in a backward registering could wait
            # for a collective that waits for this rank.
            spilled = self.memory.allocate(Tier.HOST, victim.chunk.numel, victim.chunk.dtype, "spilled gradients")
        except BudgetError as error:
            raise error.reworded(
                f"no gradient slot is free and the host cannot take an open gradient of chunk {victim.chunk.index} "
                f"({victim.chunk.names()}): {error}"
            ) from None
        # The victim keeps its flags: it is still open, and is merged or reduced after it has come back.
        index, ends = victim.chunk.index, ("gradient slot", Tier.HOST)
        why = f"room for the gradient of chunk {wanted.chunk.index}"
        with self.observer.moving("spill", index, *ends, spilled.nbytes, why):
            self.memory.transfer.copy(spilled, victim.payload)
        slot = victim.slot
        victim.become(GradState.SPILLED, spilled)
        self.pools[victim.chunk.oversize].vacate(slot)
        return slot

    def _unspill(self, gradient: ChunkGradient) -> None:
        """Bring a spilled payload back into a slot."""
        slot, spilled = self._slot_for(gradient), gradient.spilled
        assert spilled is not None
        payload = gradient.chunk.payload_in(slot)
        index, ends = gradient.chunk.index, (Tier.HOST, "gradient slot")
        with self.observer.moving("unspill", index, *ends, spilled.nbytes, "gradients of it, or its reduction"):
            self.memory.transfer.copy(payload, spilled)
        gradient.become(GradState.IN_SLOT, slot)
        # Freeing makes the host wait for the copy. The memory could otherwise be given to another spill that overwrites
        # it.
        self.memory.free(spilled, "spilled gradients")
        wait_on_stream(payload)

    def discard(self, gradient: ChunkGradient) -> None:
        """Drop a gradient that the step consumed, or that was discarded. The caller writes its flags."""
        if gradient.state is not GradState.CLOSED:
            self.close(gradient)
        if gradient.is_reduced or gradient.is_used:
            gradient.become_reduced(ReducedState.NONE)
        if gradient.is_behind:
            gradient.become_unsynced(UnsyncedState.NONE)

    def moving(self, gradient: ChunkGradient, where: Callable[[], str], blocks: int) -> OpenMove:
        """Observe the reduction of the gradient, which takes `blocks` blocks of code."""
        chunk, home = gradient.chunk, gradient.resting.tier
        ends = home if gradient.slot is None else "gradient slot", home
        return self.observer.moving("reduce", chunk.index, *ends, chunk.payload_bytes, where, blocks)


def _zero_unwritten(gradient: ChunkGradient, are_left: bool = False) -> None:
    """Zero the views of the open payload to which no gradient was written.

    are_left: only those of parameters that zero_grad(set_to_none=False) has left zeros; the others stay blank.
    """
    for fired, got, view in zip(gradient.fired, gradient.got, gradient.views, strict=True):
        if not fired and (got or not are_left):
            view.zero_()


# -- Reduced gradients at rest: takes memory for them, and adds what later backwards of the step reduce.
#
# A reduced gradient rests in a home of its own, in its chunk's parameter home (`reuse_fp16_shard`), or in fp32 beside
# its home once several micro-batches were added to a 16-bit gradient.
#
# [Note: Lent homes] Once a 16-bit chunk's gradient is reduced, its parameters are not needed before the step, which
# makes them again from the fp32 master. Until then the home is *lent* to the gradient. If the parameters are needed
# earlier, the home is taken back: the gradient moves to memory of its own, which it keeps for later steps, and the
# parameters are rounded from the master again, to the same bits. Only the part of the home that this rank updates is
# lent, so lending is local: no collective.
#
# [Note: Lent payloads] A home that is a payload is lent only while the chunk is released and no view of it is alive. A
# resident chunk is released for that by this rank alone, as its fetches launch nothing. Releasing a kept slot decides
# whether the next fetch is a collective, so all ranks must decide alike. They do so at the start of the reduction,
# which all ranks share, and from shared history only: was the chunk gathered again after its reduction in an earlier
# step? Where this rank's gradient rests must not matter.


class GradHomes:
    """The reduced gradients of all trainable chunks of one model. All of it is local."""

    def __init__(self, gradients: dict[int, ChunkGradient], params: ParamStore, pins: bool) -> None:
        """gradients: by chunk index. The dict has other chunks once others are trained. pins: see `HostSums`."""
        self._gradients = gradients
        self._params = params
        self._memory = params.memory
        self.transfer = params.memory.transfer
        self.sums = HostSums(self.transfer, pins)
        self._lendable: list[Chunk] = []
        self._resident: dict[int, SharedStorage] = {}  # by chunk index
        self._lending = LendingHistory()
        self._has_warned = False
        self.reset_lending()

    def reset_lending(self) -> None:
        """Other chunks are trained from now on, or homes have moved. No home is lent at this moment."""
        self._lendable = [each.chunk for each in self._gradients.values() if each.chunk.lends_home]
        resident = {chunk.index: chunk for chunk in self._lendable if chunk.payload is not None}
        self._resident = {index: was for index, was in self._resident.items() if index in resident}
        for index, chunk in resident.items():
            payload = chunk.payload
            assert payload is not None
            if index not in self._resident or not self._resident[index].is_of(payload):
                # Views that parameters show are not counted as ours, so they must be gone when `SharedStorage` counts.
                self._params.binding.unbind(chunk)
                self._resident[index] = SharedStorage(payload)

    # -- coming to rest

    def merge(self, gradient: ChunkGradient, reduced: Region, backward: int) -> bool:
        """Write `reduced` to the shard, or add it if the step has a gradient that the payload did not start with.

        Returns whether it lies on the host now, or is on its way there, and nothing was added.
        """
        is_first = self.begin(gradient, backward)
        target, replaces = gradient.reduced(), is_first or gradient.content is Content.SUM
        self.put(target, reduced, replaces)
        return replaces and target.tier is Tier.HOST

    def begin(self, gradient: ChunkGradient, backward: int, is_sum: bool = False) -> bool:
        """Make memory ready for what backward number `backward` reduces. True if it is the first of the step.

        is_sum: it is a sum of several backwards already, and rests in fp32 from the start.
        """
        is_first = not gradient.is_reduced
        # Pieces of one backward are added in the gradient's own dtype, as by autograd. Those of another backward are
        # added in fp32, if the chunk widens.
        if is_sum or not (is_first or gradient.first_backward == backward):
            self.widen(gradient, backward)
        # The sum has left the home: a home that was lent to the first micro-batch gets its parameters back.
        if gradient.reduced_state is ReducedState.WIDE:
            self.restore(gradient.chunk)
        elif is_first:
            # For any other reduction this was done when it was launched.
            if is_sum:
                self.before_reduction(gradient.chunk)
            self._make_room(gradient, backward)
        return is_first

    def put(self, target: Region, reduced: Region, replaces: bool) -> None:
        """Set a part of the reduced gradient if `replaces`, else add to it."""
        if replaces:
            # The collective may have written to the home directly.
            if target.flat.data_ptr() != reduced.flat.data_ptr():
                self.transfer.copy(target, reduced)
        elif target.tier is Tier.DEVICE:
            ready(target).add_(reduced.flat)
        else:
            self.sums.put(target, reduced, replaces=False)

    def fill(self, gradient: ChunkGradient, backward: int) -> None:
        """Give the chunk a gradient of zeros, as if backward number `backward` had made it, unless it has one.

        Every rank calls it at the same point.
        """
        if gradient.is_reduced or gradient.is_used:
            return
        with untracked():
            self.before_reduction(gradient.chunk)
            self._make_room(gradient, backward)
            # To zeros of the user's a gradient is added as in plain PyTorch, and not as to blank memory.
            gradient.detach_home()
            ready(gradient.reduced()).zero_()

    def widen(self, gradient: ChunkGradient, backward: int) -> None:
        """Continue a 16-bit gradient in fp32, from the second micro-batch on. The memory is kept for later steps.

        backward: the number of the backward that is added, or that is the first of this step and comes in fp32.
        """
        if gradient.reduced_state is ReducedState.WIDE or not gradient.chunk.widens:
            return
        if gradient.wide is None:
            gradient.wide = self._allocate(gradient, torch.float32)
        is_first, shard = not gradient.is_reduced, gradient.shard
        gradient.become_reduced(ReducedState.WIDE, backward)
        if not is_first:
            # The sum so far moves to fp32; `shard` is undefined from here on.
            self.transfer.copy(gradient.reduced(), shard)

    def bring_back(self, gradient: ChunkGradient, content: Region) -> None:
        """Give a chunk whose memory is new the gradient that earlier backwards have left. Raises BudgetError.

        content: (optim_numel,) on the host, in the dtype in which it rested before.
        """
        if content.dtype is not gradient.chunk.gradient_dtype:
            # No backward has the number 0. So whatever comes next counts as another micro-batch, and not as a piece of
            # this one.
            self.widen(gradient, 0)
        else:
            # A parameter home is not lent to it: a forward may come next.
            if gradient.home is None:
                self._take_home(gradient)
            gradient.become_reduced(ReducedState.IN_SHARD)
        self.transfer.copy(gradient.reduced(), content)
        wait_on_host(content)  # which is temporary

    def _make_room(self, gradient: ChunkGradient, backward: int) -> None:
        """Before a step's first reduced gradient is written: lend it the parameter home, or take one for it."""
        chunk = gradient.chunk
        if gradient.home is None and not chunk.holds_grad:
            # Parameters that are in a slot of the pool may be used there beside the gradient; without a slot only the
            # master is left.
            if chunk.lends_home and self._can_lend_now(chunk):
                chunk.become(ParamState.HOLDS_GRAD if chunk.slot is None else ParamState.GATHERED_BESIDE_GRAD)
            else:
                self._take_home(gradient)
        gradient.become_reduced(ReducedState.IN_SHARD, backward)

    def _take_home(self, gradient: ChunkGradient) -> None:
        """Take a home for a gradient that has none, for good. Raises BudgetError."""
        gradient.home = gradient.own_shard = self._allocate(gradient, gradient.chunk.gradient_dtype)

    def _allocate(self, gradient: ChunkGradient, dtype: torch.dtype) -> Region:
        """(optim_numel,) on the tier where the gradient rests, or on the host if that tier is full.

        Gradients are never on the disk: beside parameters that rest there they take the host.
        """
        numel = gradient.chunk.optim_numel
        try:
            return self._memory.allocate(update_tier(gradient.resting.tier), numel, dtype, Kind.GRAD)
        except BudgetError as refused:
            # Uncounted, this shortage would make model data give up a part of the device at the next step, as after a
            # step that failed.
            self._memory.note_evaded(refused)
            return self._memory.allocate(Tier.HOST, numel, dtype, Kind.GRAD)

    # -- lending, see [Note: Lent homes]

    def before_reduction(self, chunk: Chunk) -> None:
        """Leave a kept slot that may be lent. See [Note: Lent payloads]. Every rank calls it at the same point."""
        if not chunk.lends_home or chunk.own_slot is None:
            return
        rules = self._params.rules
        is_gathered = chunk.state is ParamState.GATHERED
        is_in_use, num_gathers = rules.is_in_use(chunk.index), rules.num_gathers[chunk.index]
        if self._lending.releases(chunk.index, num_gathers, is_in_use=is_in_use, is_gathered=is_gathered):
            self._params.release(chunk)

    def _can_lend_now(self, chunk: Chunk) -> bool:
        # The prefetch in flight sends this home to the other ranks.
        if self._params.is_coming(chunk):
            return False
        if chunk.state is ParamState.RESIDENT:
            return self._release_resident(chunk)
        is_gathered = chunk.state is not ParamState.RELEASED
        return lies_beside_gradient(has_own_slot=chunk.own_slot is not None, is_gathered=is_gathered)

    def _release_resident(self, chunk: Chunk) -> bool:
        """Release a resident chunk. False if something uses it or holds a view of it."""
        if self._params.rules.pins[chunk.index]:
            return False
        binding = self._params.binding
        binding.write_back(chunk)
        binding.unbind(chunk)
        # Bound parameters would count as holders: they are unbound before.
        if not self._params.slots.nobody_holds(self._resident[chunk.index]):
            return False
        # As at any release: see [Note: Version bump].
        chunk.bump_versions()
        return True

    def move_out(self, chunk: Chunk) -> None:
        """The parameters are needed before the step: move the gradient out of their home and restore them there."""
        if self._params.in_step and torch.is_grad_enabled() and not self._has_warned:
            self._has_warned = True
            warn_at_script(
                "reuse_fp16_shard=True: parameters are used again between backward and step, as when micro-batches "
                "are added up. From now on their gradients have memory of their own, 2 bytes a parameter",
            )
        # The new home is taken first: without memory for it the home stays lent.
        gradient = self._gradients[chunk.index]
        with untracked():
            # `shard` is the lent part here, and the new home after `_take_home`.
            lent = gradient.shard
            self._take_home(gradient)
            self.transfer.copy(gradient.shard, lent)
            self.restore(chunk)

    def restore(self, chunk: Chunk) -> None:
        """Make the parameters again from the master in a home that no longer holds the gradient."""
        if not chunk.holds_grad:
            return
        home, master, part = chunk.homes[Kind.PARAM], chunk.homes[Kind.MASTER], chunk.lendable()
        with untracked():
            # Round where both lie, else on the host: then only the rounded weights travel to the device.
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
        """Mark the home as the parameters' again. Their values are in it, or about to be written."""
        if not chunk.holds_grad:
            return
        # The payload in the slot still has the weights: an update would have released it before.
        if chunk.slot is not None:
            chunk.become(ParamState.GATHERED)
        else:
            chunk.become(ParamState.RESIDENT if chunk.index in self._resident else ParamState.RELEASED)

    def end_step(self) -> None:
        """A step ends: what is reduced from now on belongs to the next one."""
        for chunk in self._lendable:
            self._lending.note(chunk.index, self._params.rules.num_gathers[chunk.index])
        self._lending.end_step()

    def reset(self) -> None:
        """Forget the history of lent slots after a failed step, of which ranks may have seen more or less."""
        # Ranks that failed at different points would release different kept slots, and gather other chunks from then
        # on.
        self._lending.reset_history()
