"""Migration: moves all states of a model's chunks to the homes of another placement.

It runs between steps, when no gradient waits for the next step, after it was decided what each chunk needs and where.
States that are no longer needed are dropped first, with gradients and slots. Then states leave for the disk, then for
the host, and last come the states that move in or are new. So the device never holds more than it does before or after.
A host that is full sends states to the device in between. No value changes on the way. What the optimizer keeps is its
own business; it is told through a `StateStore`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from gemini.errors import BudgetError
from gemini.memory.slot import KeptSlot
from gemini.memory.transfer import Region, ready
from gemini.observe import OpenMove
from gemini.placement.budget import Budget
from gemini.placement.demand import Demand, Kind, Placement, StateHome, Tier
from gemini.runtime.binding import master_from_weights
from gemini.runtime.chunk import Chunk, ManagedParameter, ParamState
from gemini.runtime.gradient import ChunkGradient
from gemini.runtime.step import Step
from gemini.runtime.training import LeftGradients
from optim import StateLayout


class StateStore(Protocol):
    """The optimizer's state of each chunk, as far as moves need it."""

    @property
    def have_changed(self) -> bool:
        """The plan may count other numbers of states than there are by now. Equal on all ranks."""

    def has(self, chunk: Chunk) -> bool:
        """Whether the chunk's state has memory."""

    def tier_of(self, chunk: Chunk) -> Tier:
        """Where the chunk's state rests, which has memory."""

    def has_stepped(self, chunk: Chunk) -> bool:
        """Whether a step has written the chunk's state. Equal on all ranks."""

    def add(self, chunk: Chunk, home: StateHome) -> None:
        """Take memory for fresh state of the chunk. Raises BudgetError."""

    def discard(self, managed: ManagedParameter) -> None:
        """Reset one parameter's state to that before its first step. Its memory stays."""

    def migrate(self, chunk: Chunk, home: StateHome) -> None:
        """Move the chunk's state to `home`."""

    def drop(self, chunk: Chunk) -> None:
        """Give up the chunk's state and its memory."""

    def host_bytes(self, chunk: Chunk, home: StateHome) -> int:
        """Host bytes of the chunk's state if it is planned at `home`."""

    def layout_of(self, chunk: Chunk, name: str) -> StateLayout | None:
        """How a flat state of the chunk is stored; None: as numbers of its dtype."""

    def state_counts(self, chunks: Iterable[Chunk]) -> list[float]:
        """How many states per element each chunk has or needs. Equal on all ranks."""

    def note_followed(self) -> None:
        """The plan counts these numbers of states, or cannot."""

    def names_of(self, managed: ManagedParameter) -> tuple[str, ...]:
        """The names of a parameter's states; empty if they have no memory."""

    def scalars_of(self, managed: ManagedParameter) -> Mapping[str, Any] | None:
        """What is kept of a parameter beside these, in other shapes than its own; None before its first step."""

    def note_write(self, managed: ManagedParameter, name: str) -> None:
        """A user has set a state of a parameter: copies that were read before are stale."""

    def region_of(self, chunk: Chunk, name: str) -> Region:
        """(optim_numel,) the state where it rests; zeros if this rank has no memory for it yet."""


class _Move(NamedTuple):
    """One state that moves to another home."""

    source: Tier
    target: Tier
    num_bytes: int  # that it takes of `target`
    carry_out: Callable[[], None]

    @property
    def turn(self) -> int:
        """Moves come in this order, as far as there is room: what leaves the device makes room for what moves in."""
        if self.target is Tier.DEVICE:
            return 2
        return 0 if self.target is Tier.DISK else 3 if self.source is Tier.DISK else 1


class Migration:
    """The move from one (demand, placement) to another."""

    def __init__(
        self,
        step: Step,
        before: tuple[Demand, Placement],
        after: tuple[Demand, Placement],
        left: LeftGradients,
        trains: bool = True,
    ) -> None:
        """left: keeps gradients while states move, also from a move that found no memory to the one back.

        trains: gradients and masters have their memory. Otherwise they take it later, see training.py.
        """
        self._step = step
        self._left = left
        self._trains = trains
        self._params, self._grads, self._memory = step.params, step.grads, step.params.memory
        self._before = before
        self._demand, self._placement = after
        self._placed = list(zip(step.chunks, self._placement.homes, strict=True))

    @property
    def changes(self) -> bool:
        """Whether any home, slot or buffer changes."""
        return self._before != (self._demand, self._placement)

    def check_room(self, states: StateStore | None, budget: Budget) -> None:
        """Raises BudgetError if `budget` has no room for the other placement; nothing has changed then."""
        device, host = self._memory.tiers
        # After this, slots that foreign views hold are known, and counted below.
        self._params.release_all()
        self._grads.places.drop_spares()
        on_device = self._placement.device_bytes(self._demand) + self._params.slots.held_bytes()
        growth, moves_in = self._host_growth(states)
        # The device is compared with the whole placement, because what is there beside it is given back in the move.
        device.check_total(on_device, budget.device)
        host.check_total(host.ledger.total_bytes + growth - moves_in, budget.host)
        # Host memory is mapped now: a lack of it must not be found once some states have moved.
        words = "states that move there or are new"
        try:
            host.reserve(growth, words)
        except BudgetError:
            # On a host that is nearly full the memory of states that leave it is used again.
            host.reserve(max(0, growth - moves_in), words)

    def _host_growth(self, states: StateStore | None) -> tuple[int, int]:
        """(bytes that come to the host, less those that are given up before; bytes that leave the host after that)."""
        host, moves_in = self._memory.host, 0
        # Optimizer state that stays on the host is subtracted here and added again below, like all that comes.
        growth = -host.ledger.bytes_by_kind[Kind.OPTIM]
        for chunk, homes in self._placed:
            if states is not None and Kind.OPTIM in homes:
                growth += states.host_bytes(chunk, self._optim_home(chunk))
        old_demand, old_placement = self._before
        if self._trains:
            gradients = self._grads.places.gradients
            growth -= sum(map(self._beside_plan, gradients.values()))
        pairs = zip(old_demand.chunks, old_placement.homes, self._demand.chunks, self._placement.homes, strict=True)
        for chunk, (before, old_homes, after, homes) in zip(self._step.chunks, pairs, strict=True):
            # All gradient memory is given up before any is taken.
            if self._trains:
                growth += after.home_bytes.get(Kind.GRAD, 0) if homes.get(Kind.GRAD) is Tier.HOST else 0
                growth -= before.home_bytes.get(Kind.GRAD, 0) if old_homes.get(Kind.GRAD) is Tier.HOST else 0
            for kind in (Kind.PARAM, Kind.MASTER):
                home = chunk.homes.get(kind)
                held = home.nbytes if home is not None and home.tier is Tier.HOST else None
                # Planned on the host, and held or about to be taken.
                is_there = homes.get(kind) is Tier.HOST and (self._trains or home is not None)
                if is_there and held is None:
                    growth += after.home_bytes[kind]
                elif held is not None and kind not in homes:
                    growth -= held
                elif held is not None and not is_there:
                    moves_in += held
        return growth, moves_in

    @staticmethod
    def _beside_plan(gradient: ChunkGradient) -> int:
        """Bytes that an earlier step has taken on the host beside its plan, and that come back only if a step needs."""
        if gradient.is_reduced or gradient.is_behind:
            return 0  # a gradient that stays is brought back
        spares = (
            None if gradient.wide_is_planned else gradient.wide,
            None if Kind.GRAD in gradient.chunk.homes else gradient.home,
        )
        return sum(spare.nbytes for spare in spares if spare is not None and spare.tier is Tier.HOST)

    def carry_out(self, states: StateStore | None) -> None:
        """Make all moves. `Chunk.trainable` says which chunks get a gradient; the placement names the other states.

        Local: launches nothing.
        """
        step, memory = self._step, self._memory
        # Edits go home first: payloads are about to be dropped.
        step.binding.write_back_all()
        before = dict(self._grads.places.gradients)
        self._left.set_aside()
        self._grads.give_back(self._demand.scratch_bytes)
        for index in before:
            step.chunks[index].free_home(Kind.GRAD, memory)
            # Without this the old gradient would keep the memory until this function ends.
            before[index].adopt_home()
        for chunk, homes in self._placed:
            if Kind.MASTER not in homes:
                chunk.free_home(Kind.MASTER, memory)
            if states is not None and Kind.OPTIM not in homes and states.has(chunk):
                states.drop(chunk)
        # The slots are empty since `check_room`, which has released all payloads. Surplus ones make room for what moves
        # in.
        memory.slots.resize(self._placement.num_slots)
        self._move_all(states)
        memory.gradient_slots.open(self._demand.gradient_slot_bytes, self._placement.num_gradient_slots)
        for chunk, homes in self._placed:
            self._take_missing(chunk, homes, states)
            # What is known of gradients outlives their memory: zeros that wait, and gradients that come in pieces.
            if chunk.trainable and chunk.index in before:
                self._grads.of(chunk).replace(before[chunk.index])
        # Gradients that stay may rest beside the plan, in memory that slots and buffers leave: these come first.
        if self._left.are_any:
            memory.slots.fill()
            self._grads.take_memory()
        self._left.bring_back()
        # Extents of host memory that no state uses any more go back to the system.
        memory.host.trim()
        # What was derived from the old homes is derived from the new ones.
        self._grads.places.reset_lending()
        self._grads.reset_order()
        self._params.rules.follow(self._placement, self._demand)
        step.payloads.note_placement()
        step.payloads.miss_room()
        # Which touches are recorded depends on what is at home on the device, so old traces would predict other passes.
        self._params.next_use.reset_trace()

    def _move_all(self, states: StateStore | None) -> None:
        """Move all states that are not at their homes."""
        turns: list[deque[_Move]] = [deque() for _ in range(4)]
        for move in self._moves(states):
            turns[move.turn].append(move)
        # The first turn with room for its next move goes on.
        while waiting := [moves for moves in turns if moves]:
            moves = next((moves for moves in waiting if self._has_room_for(moves[0])), None)
            if moves is not None:
                moves.popleft().carry_out()
                continue
            # Host and device are full of states that change places. One of them passes the host's budget for a moment.
            move = (turns[1] or waiting[0]).popleft()
            tier = self._memory.tier(move.target)
            capacity = tier.capacity_bytes
            if move.target is Tier.HOST:
                tier.allow(None)
            try:
                move.carry_out()
            finally:
                tier.allow(capacity)

    def _has_room_for(self, move: _Move) -> bool:
        tier = self._memory.tier(move.target)
        return tier.capacity_bytes is None or tier.ledger.total_bytes + move.num_bytes <= tier.capacity_bytes

    def _moves(self, states: StateStore | None) -> Iterator[_Move]:
        """What has to move, in the order of chunks."""
        for chunk, homes in self._placed:
            sizes = self._demand.chunks[chunk.index].home_bytes
            target, keeps = homes[Kind.PARAM], chunk.index in self._placement.kept
            had_slot = chunk.own_slot is not None
            before = chunk.homes[Kind.PARAM].tier
            if before is not target or keeps != had_slot:
                move = partial(self._move_weights, chunk, target, keeps)
                # What leaves a kept slot for a home on the device makes room there: it goes with what leaves.
                leaves_slot = had_slot and target is Tier.DEVICE
                to, num_bytes = (Tier.HOST, 0) if leaves_slot else (target, sizes[Kind.PARAM])
                yield _Move(before, to, num_bytes, move)
            master = chunk.homes.get(Kind.MASTER)
            target = homes.get(Kind.MASTER, target)
            if master is not None and master.tier is not target:
                move = partial(self._move_master, chunk, master, target)
                yield _Move(master.tier, target, sizes[Kind.MASTER], move)
            if states is not None and states.has(chunk):
                target, before = homes[Kind.OPTIM], states.tier_of(chunk)
                num_bytes = 0 if before is target else sizes[Kind.OPTIM]
                yield _Move(before, target, num_bytes, partial(states.migrate, chunk, self._optim_home(chunk)))

    def _move_master(self, chunk: Chunk, master: Region, target: Tier) -> None:
        with self._migrating(chunk, Kind.MASTER, target):
            self._allocate(chunk, Kind.MASTER, target)
            self._memory.transfer.copy(chunk.homes[Kind.MASTER], master)
            self._memory.free(master, Kind.MASTER)

    def _migrating(self, chunk: Chunk, kind: Kind, target: Tier) -> OpenMove:
        before = chunk.homes[kind]
        why = f"another placement of its {kind.value}"
        return self._params.observer.moving("migrate", chunk.index, before.tier, target, before.nbytes, why)

    def _move_weights(self, chunk: Chunk, target: Tier, keeps: bool) -> None:
        with self._migrating(chunk, Kind.PARAM, target):
            self._move_parameters(chunk, target, keeps)

    def _move_parameters(self, chunk: Chunk, target: Tier, keeps: bool) -> None:
        # The home is the payload, and is about to be given up.
        if chunk.state is ParamState.RESIDENT:
            self._params.binding.unbind(chunk)
            # See [Note: Version bump].
            chunk.bump_versions()
            chunk.end_residence()
        before, slot = chunk.hand_out_home()
        content = None
        # From or to a kept slot, on a device that may not have room for both: the content waits on the host.
        if before.tier is target:
            content = ready(before).to("cpu", copy=True)
            self._give_up(before, slot)
            del before, slot  # the last references to the old memory
        try:
            if keeps:
                chunk.keep_slot(self._memory.device)
            else:
                self._allocate(chunk, Kind.PARAM, target)
        # Other processes have taken the memory. The weights stay where they are, or rest on the host for now: the
        # caller moves all states back.
        except BudgetError:
            if content is None:
                chunk.take_home_back(before, slot)
            else:
                self._allocate(chunk, Kind.PARAM, Tier.HOST)
                chunk.homes[Kind.PARAM].flat.copy_(content)
            chunk.reside_at_home()
            raise
        home = chunk.homes[Kind.PARAM]
        if content is None:
            self._memory.transfer.copy(home, before)
            self._give_up(before, slot)
        else:
            # `content` is a blocking copy on the host: it has no tickets.
            home.flat.copy_(content)
        chunk.reside_at_home()

    def _give_up(self, home: Region, slot: KeptSlot | None) -> None:
        """Give up a parameter home, or the kept slot that it is a part of."""
        if slot is None:
            self._memory.free(home, Kind.PARAM)
        else:
            slot.close()

    def _take_missing(self, chunk: Chunk, homes: dict[Kind, Tier], states: StateStore | None) -> None:
        """Take memory for the chunk's planned states that it does not have yet."""
        if chunk.trainable:
            home_bytes = self._demand.chunks[chunk.index].home_bytes.get(Kind.GRAD, 0)
            # A gradient without home bytes rests in the parameter home, see grad_places.py.
            if self._trains and home_bytes:
                self._allocate(chunk, Kind.GRAD, homes[Kind.GRAD])
            # A new `ChunkGradient` adopts the home when it is made, so the home is there before it.
            self._grads.places.add(chunk)
        if self._trains and Kind.MASTER in homes and Kind.MASTER not in chunk.homes:
            self._allocate(chunk, Kind.MASTER, homes[Kind.MASTER])
            master_from_weights(chunk)
        if states is not None and Kind.OPTIM in homes and not states.has(chunk):
            states.add(chunk, self._optim_home(chunk))

    def _optim_home(self, chunk: Chunk) -> StateHome:
        return self._placement.optim_home(self._demand, chunk.index)

    def _allocate(self, chunk: Chunk, kind: Kind, tier: Tier) -> None:
        num_bytes = self._demand.chunks[chunk.index].home_bytes[kind]
        chunk.allocate_home(kind, tier, self._memory, num_bytes)
