"""Where gradients are: in the slots that a backward fills, spilled to the host, and where the reduced sums rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from gemini.errors import BudgetError
from gemini.log import warn_at_script
from gemini.memory.host_sums import HostSums
from gemini.memory.modes import untracked
from gemini.memory.slot import SharedStorage, Slot
from gemini.memory.transfer import Region, ready, wait_on_host, wait_on_stream, wait_on_tier
from gemini.observe import OpenMove
from gemini.placement.demand import Kind, Tier, update_tier
from gemini.placement.gradient import Content, GradState, ReducedState, UnsyncedState
from gemini.placement.gradient_rules import PlaceRules
from gemini.placement.next_use import PassKind
from gemini.runtime.chunk import Chunk, ParamState
from gemini.runtime.gradient import ChunkGradient
from gemini.runtime.params import ParamStore
from optim import round_master_
from sharding import Piece, ShardLayout, Unit


class GradPlaces(PlaceRules):
    """Carries `PlaceRules` out for one model: the memory behind every `ChunkGradient`, and what moves in it.

    Whoever has a gradient opened, reduced or merged does so inside of `untracked`.
    """

    def __init__(self, params: ParamStore, keeps_whole: bool, pins: bool) -> None:
        """Chunks that are trainable now get a gradient, without memory so far.

        keeps_whole: this rank keeps whole gradients, and GRAD homes have room for whole payloads. pins: see `HostSums`.
        """
        self.gradients: dict[int, ChunkGradient] = {}  # by chunk index
        super().__init__(self.gradients, params.memory.gradient_slots, params.rules)
        self.memory = params.memory
        self.transfer = params.memory.transfer
        self.pools = params.memory.gradient_slots
        self.sums = HostSums(self.transfer, pins)
        self._params = params
        self._chunks = params.chunks
        self._observer = params.observer
        self._keeps_whole = keeps_whole
        self.peak_open = 0
        self._num_open = 0  # in a slot or spilled, and not being reduced
        # Of the reduction in flight: what waits for the mean, if anything does; the mean, (optim_numel,) on the device,
        # which is valid until the next one begins; one more block, in which the mean leaves. It holds buffers, so
        # nothing of it stays after a step.
        self.flight: tuple[Callable[[], None] | None, Region, OpenMove] | None = None
        # Host memory in which spilled gradients take turns, by numel and dtype. While nobody uses it, it is in no
        # ledger, like all pages that staging memory keeps.
        self._spares: dict[tuple[int, torch.dtype], list[Region]] = {}
        self._num_by_size = [0, 0]  # trainable chunks with regular slots, and with larger ones
        self._resident: dict[int, SharedStorage] = {}  # by chunk index
        self._has_warned = False
        for chunk in self._chunks:
            if chunk.trainable:
                self.add(chunk)
        self.reset_lending()

    def add(self, chunk: Chunk) -> None:
        """Give a trainable chunk a gradient, without memory so far."""
        self.gradients[chunk.index] = ChunkGradient(chunk, self._keeps_whole)
        self._num_by_size[chunk.oversize] += 1

    def give_back(self) -> None:
        """Between steps: give back slots and the memory beside the homes. No chunk has a gradient any more."""
        self.pools.close()
        self.drop_spares()
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

    def is_in_nobodys_way(self, gradient: ChunkGradient) -> bool:
        """Whether the gradient may stay open for any time: no other gradient lacks a slot because of it."""
        if gradient.state is GradState.AT_HOME:
            return True
        if gradient.state is GradState.CLOSED and gradient.may_write_home:
            return True
        # With as many slots as chunks of this size each gradient can be open at once.
        oversize = gradient.chunk.oversize
        return self.pools[oversize].count >= self._num_by_size[oversize]

    def _open_at_home(self, chunk: int, zero: bool) -> None:
        gradient, content = self.gradients[chunk], Content.UNDEFINED
        assert gradient.whole is not None
        # One rank, second micro-batch: autograd's gradients are added to the sum that is in the home.
        if gradient.is_reduced and gradient.in_place:
            content = Content.SUM
        # The end of the last step has filled an attached home with negative zeros.
        elif gradient.attached is not None:
            content = Content.ZERO
        # The home's last content may still be on its way to the host.
        wait_on_stream(gradient.whole)
        if zero and content is Content.UNDEFINED and not gradient.in_place:
            gradient.whole.flat.zero_()
            content = Content.ZERO
        gradient.become(GradState.AT_HOME, content)

    def _open_in_slot(self, chunk: int, slot: object, resumes: bool, zero: bool) -> None:
        assert isinstance(slot, Slot)
        gradient, content = self.gradients[chunk], Content.UNDEFINED
        slot.occupy(chunk)
        payload = slot.views[chunk][0] if chunk in slot.views else gradient.chunk.payload_in(slot)
        if resumes:
            self.memory.transfer.copy(payload, gradient.shard)
            content = Content.SUM
        # The slot's last content may still be on its way to the host, or this one's on its way to the slot.
        if payload.tickets.pending:
            wait_on_stream(payload)
        if zero and not resumes and not gradient.in_place:
            payload.flat.zero_()
            content = Content.ZERO
        gradient.become(GradState.IN_SLOT, content, slot=slot)
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

    def _zero_rest_of_home(self, chunk: int) -> None:
        gradient = self.gradients[chunk]
        if gradient.num_fired < len(gradient.fired):
            _zero_unwritten(gradient, are_left=gradient.content is Content.ZERO)

    def close(self, chunk: int) -> None:
        """See `PlaceRules`."""
        gradient = self.gradients[chunk]
        # A gradient that is being reduced was subtracted when its reduction began.
        self._num_open -= gradient.state in (GradState.IN_SLOT, GradState.SPILLED)
        if gradient.slot is not None:
            self.pools[gradient.chunk.oversize].vacate(gradient.slot)
        spilled = gradient.spilled
        # Closed before the memory is given: an interrupted `close` must not give it back twice.
        gradient.become(GradState.CLOSED)
        if spilled is not None:
            self._free_spilled(spilled)

    def _inside(self, oversize: bool) -> Iterable[int]:
        return [slot.chunk for slot in self.pools[oversize].slots if slot.chunk is not None]

    def _spill(self, victim: int, wanted: int) -> Slot:
        spilling = self.gradients[victim]
        assert spilling.slot is not None and spilling.payload is not None
        payload, spares = spilling.payload, self._spares.get((spilling.payload.numel, spilling.payload.dtype))
        try:
            if spares:
                self.memory.host.count_again(payload.nbytes, "spilled gradients")
                spilled = spares.pop()
            # This is staging memory, which is never registered with the driver: in a backward registering could wait
            # for a collective that waits for this rank.
            else:
                spilled = self.memory.allocate(Tier.HOST, payload.numel, payload.dtype, "spilled gradients")
        except BudgetError as error:
            raise error.reworded(
                f"no gradient slot is free and the host cannot take an open gradient of chunk {victim} "
                f"({spilling.chunk.names()}): {error}"
            ) from None
        # It keeps its flags: it is still open, and is merged or reduced after it has come back.
        ends = "gradient slot", Tier.HOST
        why = f"room for the gradient of chunk {wanted}"
        with self._observer.moving("spill", victim, *ends, spilled.nbytes, why):
            self.memory.transfer.copy(spilled, payload)
        slot = spilling.slot
        spilling.become(GradState.SPILLED, spilled=spilled)
        self.pools[spilling.chunk.oversize].vacate(slot)
        return slot

    def _unspill(self, chunk: int, slot: object) -> None:
        assert isinstance(slot, Slot)
        gradient = self.gradients[chunk]
        spilled = gradient.spilled
        assert spilled is not None
        slot.occupy(chunk)
        payload = gradient.chunk.payload_in(slot)
        ends = Tier.HOST, "gradient slot"
        with self._observer.moving("unspill", chunk, *ends, spilled.nbytes, "gradients of it, or its reduction"):
            self.memory.transfer.copy(payload, spilled)
        gradient.become(GradState.IN_SLOT, slot=slot)
        # Freeing makes the host wait for the copy. The memory could otherwise be given to another spill that overwrites
        # it.
        self._free_spilled(spilled)
        wait_on_stream(payload)

    def _free_spilled(self, spilled: Region) -> None:
        wait_on_host(spilled)
        self.memory.host.free(spilled.flat, "spilled gradients")
        self._spares.setdefault((spilled.numel, spilled.dtype), []).append(spilled)

    def drop_spares(self) -> None:
        """Keep no memory for spilled gradients that none is in. Local."""
        self._spares.clear()

    def discard(self, gradient: ChunkGradient) -> None:
        """Drop a gradient that the step consumed, or that was discarded. The caller writes its flags."""
        if gradient.state is not GradState.CLOSED:
            self.close(gradient.index)
        if gradient.reduced_state is not ReducedState.NONE:
            gradient.become_reduced(ReducedState.NONE)
        if gradient.unsynced_state is not UnsyncedState.NONE:
            gradient.become_unsynced(UnsyncedState.NONE)

    def moving(self, gradient: ChunkGradient, where: Callable[[], str], blocks: int) -> OpenMove:
        """Observe the reduction of the gradient, which takes `blocks` blocks of code."""
        chunk, home = gradient.chunk, (gradient.resting if gradient.home is None else gradient.home).tier
        ends = home if gradient.slot is None else "gradient slot", home
        return self._observer.moving("reduce", chunk.index, *ends, chunk.payload_bytes, where, blocks)

    # -- reduced gradients at rest: [Note: Lent homes] in placement/gradient_rules.py

    def reset_lending(self) -> None:
        """Other chunks are trained from now on, or homes have moved. No home is lent at this moment."""
        self.note_lendable()
        lendable = (self._chunks[index] for index in self.lendable)
        resident = {chunk.index: chunk for chunk in lendable if chunk.payload is not None}
        self._resident = {index: was for index, was in self._resident.items() if index in resident}
        for index, chunk in resident.items():
            payload = chunk.payload
            assert payload is not None
            if index not in self._resident or not self._resident[index].is_of(payload):
                # Views that parameters show are not counted as ours, so they must be gone when `SharedStorage` counts.
                self._params.binding.unbind(chunk)
                self._resident[index] = SharedStorage(payload)

    # -- coming to rest

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
            self.before_reduction(gradient.index)
            self.make_room(gradient.index, backward)
            # To zeros of the user's a gradient is added as in plain PyTorch, and not as to blank memory.
            gradient.detach_home()
            ready(gradient.reduced()).zero_()

    def bring_back(self, gradient: ChunkGradient, content: Region) -> None:
        """Give a chunk whose memory is new the gradient that earlier backwards have left. Raises BudgetError.

        content: (optim_numel,) on the host, in the dtype in which it rested before.
        """
        if content.dtype is not gradient.chunk.gradient_dtype:
            # No backward has the number 0. So whatever comes next counts as another micro-batch, and not as a piece of
            # this one.
            self.widen(gradient.index, 0)
        else:
            # A parameter home is not lent to it: a forward may come next.
            if gradient.home is None:
                self._take_memory(gradient.index, wide=False)
            gradient.become_reduced(ReducedState.IN_SHARD)
        self.transfer.copy(gradient.reduced(), content)
        wait_on_host(content)  # which is temporary

    def begin_group_sum(self, chunk: int) -> None:
        """Have the chunk's group of ranks add to a gradient of which each rank has its own part by now. Local.

        The sum of the group gets this rank's part as many times as there are groups, and zeros for the other parts: so
        the mean over the groups has it once.
        """
        gradient = self.gradients[chunk]
        its, own = gradient.chunk, ready(gradient.reduced()).clone()
        whole = ready(gradient.sum_of_group()).zero_()
        for piece in part_in_group(its):
            whole[piece.in_payload].copy_(own[piece.in_shard])
        whole.mul_(its.num_groups)

    def move_out(self, chunk: int) -> None:
        """See `PlaceRules`."""
        if self._params.in_step and self._params.next_use.kind is PassKind.TRAINING and not self._has_warned:
            self._has_warned = True
            warn_at_script(
                "reuse_fp16_shard=True: parameters are used again between backward and step, as when micro-batches "
                "are added up. From now on their gradients have memory of their own, 2 bytes a parameter",
            )
        with untracked():
            super().move_out(chunk)

    # -- memory

    def _take_memory(self, chunk: int, *, wide: bool) -> None:
        gradient = self.gradients[chunk]
        if wide:
            gradient.wide = self._allocate(gradient, torch.float32)
        else:
            gradient.take_home(self._allocate(gradient, gradient.chunk.gradient_dtype))

    def _allocate(self, gradient: ChunkGradient, dtype: torch.dtype) -> Region:
        """(rest_numel,) on the tier where the gradient rests, or on the host if that tier is full.

        Gradients are never on the disk: beside parameters that rest there they take the host.
        """
        numel = gradient.chunk.rest_numel
        try:
            return self.memory.allocate(update_tier(gradient.resting.tier), numel, dtype, Kind.GRAD)
        except BudgetError as refused:
            # Uncounted, this shortage would make model data give up a part of the device at the next step, as after a
            # step that failed.
            self.memory.note_evaded(refused)
            return self.memory.allocate(Tier.HOST, numel, dtype, Kind.GRAD)

    def _move_to_wide(self, chunk: int) -> None:
        gradient = self.gradients[chunk]
        # `shard` is undefined from here on.
        reduced = gradient.reduced()
        self.transfer.copy(reduced, gradient.shard[: reduced.numel])

    def _copy_out(self, chunk: int) -> None:
        gradient = self.gradients[chunk]
        self.transfer.copy(gradient.shard, gradient.chunk.lendable())

    # -- lending, see [Note: Lent homes]

    def is_lent(self, chunk: int) -> bool:
        """See `PlaceRules`."""
        there = self._chunks[chunk]
        return there.may_lend_home and there.holds_grad

    def _lends_home(self, chunk: int) -> bool:
        there = self._chunks[chunk]
        return there.may_lend_home and there.lends_home

    def _release_slot(self, chunk: int) -> None:
        self._params.release(self._chunks[chunk])

    def _release_resident(self, chunk: int) -> bool:
        resident, binding = self._chunks[chunk], self._params.binding
        binding.write_back(resident)
        binding.unbind(resident)
        # Bound parameters would count as holders: they are unbound before.
        if not self._params.slots.nobody_holds(self._resident[chunk]):
            return False
        # As at any release: see [Note: Version bump].
        resident.bump_versions()
        return True

    def _lend(self, chunk: int) -> None:
        lender = self._chunks[chunk]
        # Parameters that are in a slot of the pool may be used there beside the gradient; without a slot only the
        # master is left.
        lender.become(ParamState.HOLDS_GRAD if lender.slot is None else ParamState.GATHERED_BESIDE_GRAD)

    def _remake(self, chunk: int) -> None:
        borrowed = self._chunks[chunk]
        home, master, part = borrowed.homes[Kind.PARAM], borrowed.homes[Kind.MASTER], borrowed.lendable()
        with untracked():
            # Round where both lie, else on the host: then only the rounded weights travel to the device.
            if home.tier is master.tier:
                round_master_(ready(part), ready(master))
            elif home.tier is Tier.HOST:
                whole = Region(Tier.HOST, torch.empty(part.numel, dtype=torch.float32, device="cpu"))
                self.transfer.copy(whole, master)
                round_master_(ready(part), ready(whole))
            else:
                rounded = Region(Tier.HOST, torch.empty(part.numel, dtype=borrowed.dtype, device="cpu"))
                round_master_(rounded.flat, ready(master))
                self.transfer.copy(part, rounded)
                wait_on_host(rounded)  # which is temporary
            wait_on_tier(part)

    def consumed(self, chunk: int) -> None:
        """See `PlaceRules`."""
        lender = self._chunks[chunk]
        if not lender.holds_grad:
            return
        # The payload in the slot still has the weights: an update would have released it before.
        if lender.slot is not None:
            lender.become(ParamState.GATHERED)
        else:
            lender.become(ParamState.RESIDENT if chunk in self._resident else ParamState.RELEASED)


def part_in_group(chunk: Chunk, group: int | None = None) -> tuple[Piece, ...]:
    """What the rank of this place in a group uses of what the group shares: `payload_start` counts in the latter.

    group: None: this rank's own.
    """
    count = chunk.num_groups
    units = tuple(
        Unit(unit.start * count // chunk.layout.world_size, unit.numel * count // chunk.layout.world_size)
        for unit in chunk.layout.units
    )
    return ShardLayout(units, count).slices(chunk.rank % count if group is None else group)


def _zero_unwritten(gradient: ChunkGradient, are_left: bool = False) -> None:
    """Zero the views of the open payload to which no gradient was written.

    are_left: only those of parameters that zero_grad(set_to_none=False) has left zeros; the others stay blank.
    """
    for fired, got, view in zip(gradient.fired, gradient.got, gradient.views, strict=True):
        if not fired and (got or not are_left):
            view.zero_()
