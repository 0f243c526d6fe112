"""The updates of an optimizer, one chunk after the other, in a step or inside the backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from gemini.errors import BudgetError, GeminiError, UnsupportedError, UpdatedInBackwardError
from gemini.memory.memory import RankMemory
from gemini.memory.transfer import Region, wait_on_stream, wait_on_tier
from gemini.memory.work import WorkTicket
from gemini.observe import Span
from gemini.optimizer.averages import AVERAGE, Averages
from gemini.optimizer.chunk_states import ChunkOptimizerState
from gemini.optimizer.elementwise import AdamUpdate
from gemini.optimizer.given import GroupEdits
from gemini.optimizer.several import UpdateRule
from gemini.optimizer.shards import (
    TURNS,
    GradientFactors,
    Run,
    RunUpdate,
    ShardView,
    Staging,
    staged_bytes,
)
from gemini.optimizer.summary import GradientSummary, UsedSums, settings_of_step
from gemini.placement.demand import Kind, Tier
from gemini.ranks.exit_report import words_of
from gemini.runtime.chunk import Chunk
from gemini.runtime.gradient import ChunkGradient
from gemini.runtime.grads import GradStore
from gemini.runtime.params import ParamStore
from gemini.runtime.recovery import Failures
from gemini.runtime.reduce import USES_UP
from gemini.runtime.step import Payloads, Step

# -- Updates of chunks, each on the tier of its state.
#
# A launch and the Python around it cost as much as the update of a small chunk. So chunks whose update touches only one
# tier are launched together, in batches. A chunk that needs a staging buffer is the last of its batch: a later chunk
# would overwrite the buffer before the launch.
#
# The copies of a chunk that is updated on the host begin before the update of the chunk ahead of it, in the other of
# two buffers: the link brings the next gradient while the processor works. On the device, where a second buffer would
# take memory that the plan does not have, copy and update take turns.


BATCH_NUMEL = 2**25
"""Elements that are updated together: 0.2 ms at 4 TB/s. More would only delay the work that follows an update."""
DEFERRED_NUMEL = 2**20
"""The same of updates that a thread carries out on the host: 1 ms at 30 GB/s. Whoever waits for a chunk waits for all
that are updated together with it."""


_WAITING = "gradients on their way to an update"
_SHARE_OF_ROOM = 4
"""They take a fourth of what is free on the host: the rest is for what no plan knows of, such as spilled gradients."""


Due = Mapping[Chunk, tuple[bytes, Region | None]]
"""Chunks to update, with `ChunkUpdates.steps`, and their gradient where it rests; None where none has come."""


@dataclass(frozen=True)
class _Averaging:
    """What happens to the averages of a chunk's weights beside its update."""

    begins: list[tuple[int, int]]  # (first element, number): before the update these averages become the weights
    share: float | None  # of the new weights, after the update; None: they are not averaged
    exchanges: bool = False  # weights and averages change places

    def before(self, average: Tensor, weights: ShardView) -> None:
        """Called before the weights change. average: (optim_numel,) on the tier of the update."""
        if self.begins:
            weights.average(average, 1.0, self.begins)

    def after(self, average: Tensor, weights: ShardView) -> None:
        """Called when the weights have changed."""
        if self.share is not None:
            weights.average(average, self.share)
        if self.exchanges:
            weights.exchange(average)


@dataclass(eq=False)
class _ChunkUpdate:
    """The update of one chunk."""

    state: ChunkOptimizerState
    weights: ShardView | None  # None: this rank has nothing to update
    gradient: Region | None  # where it rests; None like `weights`
    moments: Region | None  # as the thread may use them: all of them share its tickets
    runs: list[RunUpdate]
    turn: str = ""  # which of the staging buffers its gradient is copied to
    ticket: WorkTicket | None = None  # where a thread carries it out
    has_begun: bool = False  # the copies to the tier of the update were started
    on_tier: Region | None = None  # the gradient there, once it has begun
    averaging: _Averaging | None = None

    def end(self, error: BaseException | None = None) -> None:
        """The thread has updated the chunk, or has failed to."""
        if self.ticket is not None:
            self.ticket.end(error)

    def average(self, do: Callable[[_Averaging, Tensor, ShardView], None]) -> None:
        """Do this to the averages, where there are some."""
        if self.averaging is not None and self.weights is not None:
            do(self.averaging, self.weights.staged_states.get(AVERAGE, self.state.flats[AVERAGE]), self.weights)


class _GradientsOnHost:
    """Host memory in which gradients wait for the thread that updates the weights, where they have no homes.

    The thread takes them in their order, so the buffer that was filled first is the first to be free.
    """

    def __init__(self, memory: RankMemory) -> None:
        self._memory = memory
        self._kept: list[Region] = []  # (bytes,) uint8
        self._is_for: list[int] = []
        self._next = 0

    def fit(self, sizes: list[int]) -> None:
        """Have buffers for the gradients of these bytes, as many as there is room for."""
        if sizes == self._is_for:
            return
        for buffer in self._kept:
            self._memory.free(buffer, _WAITING)
        self._kept, self._is_for, self._next = [], [], 0
        host = self._memory.host
        most = sum(sizes)
        if host.capacity_bytes is not None:
            most = min(most, (host.capacity_bytes - host.ledger.total_bytes) // _SHARE_OF_ROOM)
        # With fewer the backward waits for the thread more often.
        with suppress(BudgetError):
            for _ in range(min(len(sizes), max(2, most // max(sizes, default=1)))):
                self._kept.append(self._memory.allocate(Tier.HOST, max(sizes), torch.uint8, _WAITING))
        self._is_for = sizes

    def copy(self, gradient: Region) -> Region:
        """A copy of the gradient, on its way. Waits until the thread is done with what was there before.

        Without buffers it is the gradient itself: its slot is free again once the thread has taken it.
        """
        if not self._kept or self._kept[0].nbytes < gradient.nbytes:
            return gradient
        buffer = self._kept[self._next % len(self._kept)]
        self._next += 1
        copied = buffer[: gradient.nbytes].view(gradient.dtype)
        self._memory.transfer.copy(copied, gradient)
        return copied


class ChunkUpdates:
    """Updates the chunks of one model."""

    def __init__(
        self,
        params: ParamStore,
        grads: GradStore,
        failures: Failures,
        states: Mapping[int, ChunkOptimizerState],
        update: UpdateRule,
        param_groups: list[dict[str, Any]],
        defers: bool,
        averages: Averages | None = None,
    ) -> None:
        """defers: a thread updates chunks whose states are on the host, beside what follows the step."""
        self._averages = averages
        self._params = params
        self._grads = grads
        self._failures = failures
        self._states = states
        self._update = update
        self._param_groups = param_groups
        self._memory = memory = params.memory
        self._staging = Staging(memory, grads, is_alone=params.communicator.world_size == 1)
        self._num_alone = 0  # updates outside of steps
        self._transfer, self._work = memory.transfer, memory.work
        self._on_host = _GradientsOnHost(memory)
        # A torch optimizer's update is code of the user's, and allocates.
        self._defers = defers and isinstance(update, AdamUpdate)

    def refuse_bad_hyperparameters(self) -> None:
        """Raise for bad hyperparameters before the step, by an update of no elements. Nothing has changed then."""
        # One parameter per group and dtype is enough. The dtype counts, because HybridAdam refuses fp64 weights, which
        # may come after fp32 ones in a model.
        checked: set[tuple[int, torch.dtype]] = set()  # membership only
        for state in self._states.values():
            groups = {group for group in set(state.groups) if group is not None}
            for group in sorted(groups):
                if (group, state.dtype) not in checked:
                    checked.add((group, state.dtype))
                    nothing = state.start(Run(0, 0, (state.groups.index(group),), group))
                    self._update.update([nothing], self._param_groups, GradientFactors())

    def room(self, resting: Mapping[Chunk, Region | None], payloads: Payloads) -> AbstractContextManager[None]:
        """Inside, `update` finds all that it needs beside the homes. See [Note: Room for an update] in shards.py.

        resting: the reduced gradient of each chunk that is trained; None where none has come.
        Local. Raises torch.OutOfMemoryError or BudgetError, and nothing has changed then.
        """
        needs: dict[tuple[Tier, str], int] = {}
        temporaries = 0  # on the device; the host has no bound that an allocation would find
        gathers_in_slot = False
        with_average = {} if self._averages is None else {state.chunk: None for state in self._states.values()}
        for chunk, reduced in {**with_average, **resting}.items():
            if reduced is None and self._averages is None:
                continue
            state = self._states[chunk.index]
            tier = state.update_tier
            staged = staged_bytes(chunk, tier, loads=not self._update.is_fused)
            if state.tier is not tier:
                staged |= {name: state.bytes_of(name) for name in state.held}
            if reduced is not None and reduced.tier is not tier:
                staged["gradient"] = reduced.nbytes
            for name, num_bytes in staged.items():
                # Chunks are staged one after the other in the same pieces, so the largest need counts and not the sum.
                for turn in TURNS[state.tier]:
                    needs[tier, name + turn] = max(num_bytes, needs.get((tier, name + turn), 0))
            if tier is Tier.DEVICE:
                its = self._update.temporary_bytes(chunk.optim_numel, state.dtype, self._memory.device.device)
                temporaries = max(temporaries, its)
            gathers_in_slot |= chunk.is_updated_in_parts and chunk.homes[Kind.PARAM].tier is Tier.HOST
        # Whole weights on the host are gathered in a slot of payloads, which may have no memory yet.
        if gathers_in_slot:
            payloads.take_room()
        return self._staging.reserved(needs, temporaries)

    def update(self, chunks: Due, factors: GradientFactors, payloads: Payloads) -> None:
        """Update chunks on the tiers of their states. Local until new weights are gathered in slots of `payloads`."""
        later = self._deferred(chunks)
        if later:
            self._defer(later, factors)
        now = [chunk for chunk in chunks if chunk not in later]
        for batch in self._batches([self._plan(chunk, *chunks[chunk], number) for number, chunk in enumerate(now)]):
            self._finish(batch, factors)
            # Ranks may end their batches at different chunks, as staging depends on what each updates. All of them keep
            # the order of chunks, in which the gathers must come.
            for each in batch:
                if each.state.chunk.is_updated_in_parts:
                    _all_gather_weights(payloads, each.state.chunk)

    def average_idle(self, updated: Collection[Chunk]) -> None:
        """Average the weights of the chunks that a step did not update: all but `updated`. Local."""
        if self._averages is None or self._averages.share_to_come() is None:
            return
        idle = [state.chunk for state in self._states.values() if state.chunk not in updated]
        for batch in self._batches([self._plan_idle(chunk, number) for number, chunk in enumerate(idle)]):
            for each in batch:
                each.average(_Averaging.after)
                _close(each)

    def exchange_averages(self, payloads: Payloads) -> None:
        """Have the averages of the weights where the weights are, and these in their place. Collective."""
        chunks = [state.chunk for state in self._states.values()]
        with self.room(dict.fromkeys(chunks), payloads), self._failures.tearing(), torch.no_grad():
            for chunk in chunks:
                self._params.make_stale(chunk)
                # The weights cannot change in a home that holds their gradient.
                if chunk.holds_grad:
                    payloads.restore_parameters(chunk)
            plans = [self._plan_idle(chunk, number, exchanges=True) for number, chunk in enumerate(chunks)]
            for batch in self._batches(plans):
                for each in batch:
                    each.average(_Averaging.after)
                    _close(each)
                    each.state.note_exchange()
                    self._params.after_update(each.state.chunk)
                    if each.state.chunk.is_updated_in_parts:
                        _all_gather_weights(payloads, each.state.chunk)
            # An interrupt behind this finds them exchanged, and one before it a model that is torn.
            if self._averages is not None:
                self._averages.note_exchange()

    def use(self, chunk: Chunk, steps: bytes, gradient: Region) -> None:
        """Update a chunk with a gradient that is (optim_numel,) on the device and is not needed any more. Local.

        steps: by position, the parameters that have a gradient.
        """
        number, self._num_alone = self._num_alone, self._num_alone + 1
        factors = GradientFactors()
        if self._deferred({chunk: (steps, gradient)}):
            # The thread may take its time: the slot is free again once the gradient has left it.
            self._defer({chunk: (steps, self._on_host.copy(gradient))}, factors, number)
            return
        for batch in self._batches([self._plan(chunk, steps, gradient, number)]):
            self._finish(batch, factors)

    def prepare(self) -> None:
        """A backward begins that updates weights: take the host memory in which gradients wait for the thread.

        Raises what a step would refuse, and why an update of the last step has failed.
        """
        if self._averages is not None:
            self._averages.refuse_exchanged("a backward with update_in_backward=True")
        self.finish()
        self.refuse_bad_hyperparameters()
        chunks: Due = {state.chunk: (b"", None) for state in self._states.values() if state.chunk.trainable}
        self._on_host.fit([chunk.optim_numel * _widest(chunk) for chunk in self._deferred(chunks)])

    def give_back(self) -> None:
        """Free the memory that `prepare` has taken."""
        self._on_host.fit([])

    def finish(self) -> None:
        """Wait for the updates of the last step. Raises why one of them has failed."""
        self._work.finish()

    def _deferred(self, chunks: Due) -> Due:
        """Those of the chunks that a thread updates while training goes on, in their order."""
        # Gathers of weights that ranks update in parts are collectives, which all ranks launch in one order.
        if not self._defers or any(map(attrgetter("is_updated_in_parts"), chunks)):
            return {}
        return {chunk: its for chunk, its in chunks.items() if self._states[chunk.index].update_tier is Tier.HOST}

    def _defer(self, chunks: Due, factors: GradientFactors, first_number: int = 0) -> None:
        """Have a thread update chunks, and write down that it is done. Who needs a region waits for it.

        first_number: of the chunks, for their turns.
        """
        update = self._update
        assert isinstance(update, AdamUpdate)
        tickets = [WorkTicket(self._work) for _ in chunks]
        try:
            numbered = enumerate(zip(chunks.items(), tickets, strict=True), first_number)
            updates = [self._plan(chunk, *its, number, ticket) for number, ((chunk, its), ticket) in numbered]
            for each in updates:
                update.begin(each.runs, self._param_groups, factors)
            self._work.begin(partial(self._carry_out, update, updates, self._transfer.aside()))
        except BaseException as error:
            # An interrupt may come right behind the beginning: the thread ends them itself then.
            self._work.join()
            # No thread will end them: whoever waited for one, such as `close`, would wait for ever.
            for ticket in tickets:
                ticket.end(GeminiError(f"an update on the host did not begin: {words_of(error)}"))
            raise
        for each in updates:
            self._note_updated(each)

    def _carry_out(
        self, update: AdamUpdate, updates: Sequence[_ChunkUpdate], beside: AbstractContextManager[object]
    ) -> None:
        """Carry out updates that were begun: what the thread does."""
        at = updates[0].state.chunk
        try:
            with self._failures.tearing(), torch.no_grad(), beside:
                try:
                    for batch in self._batches(updates, DEFERRED_NUMEL):
                        begin_s, at = perf_counter(), batch[0].state.chunk
                        update.launch([run for each in batch for run in each.runs])
                        for each in batch:
                            at = each.state.chunk
                            if each.averaging is not None:
                                each.average(_Averaging.after)
                            _close(each)
                            each.end()
                        self._tell(batch, begin_s)
                except Exception as error:
                    raise GeminiError(
                        f"the update of chunk {at.index} ({at.names()}) on the host, beside the next forward, failed: "
                        f"{words_of(error)}"
                    ) from error
        except BaseException as error:
            # Whoever waits for one of them is told, and changes nothing more.
            for each in updates:
                each.end(error)
            raise

    def steps(self, chunk: Chunk, summary: GradientSummary) -> bytes:
        """Whether each parameter, by position, has a gradient on some rank and is in a param group."""
        has_gradient = summary.of(chunk)
        groups = self._states[chunk.index].groups
        if None in groups:
            has_gradient = bytes(has and group is not None for has, group in zip(has_gradient, groups, strict=True))
        return has_gradient

    def _plan(
        self,
        chunk: Chunk,
        steps: bytes,
        gradient: Region | None,
        number: int,
        ticket: WorkTicket | None = None,
        *,
        exchanges: bool = False,
        reads: bool = False,
    ) -> _ChunkUpdate:
        """What to update of a chunk, and where it is. number: of the chunk, for its turn. Nothing moves yet.

        exchanges: weights and averages change places. reads: nothing changes.
        """
        state = self._states[chunk.index]
        runs = state.runs(steps)
        averaging = None
        if self._averages is not None and not reads:
            averaging = self._averaging_of(state, self._averages, exchanges)
        has_elements = bool(sum([run.numel for run in runs]))
        # All updated parameters are in other ranks' shards. Count their steps here too.
        if not has_elements and averaging is None:
            return _ChunkUpdate(state, None, None, None, [state.start(run) for run in runs])
        moments, homes = None, chunk.homes
        assert gradient is not None or not has_elements, "a parameter with a gradient has it at rest"
        # Without elements the gradient, if there is one, is of parameters that this update passes over.
        gradient = gradient if has_elements else None
        if ticket is not None:
            gradient = None if gradient is None else ticket.hand_over(gradient)
            moments = ticket.hand_over(state.all_flats())
            homes = {kind: ticket.hand_over(homes[kind]) for kind in (Kind.PARAM, Kind.MASTER) if kind in homes}
        turns = TURNS[state.tier]
        turn = turns[number % len(turns)]
        elsewhere: dict[str, Region] = {}
        if state.tier is not state.update_tier:
            # A thread would say only later that nothing of it can be read.
            if self._memory.disk is not None:
                self._memory.disk.refuse_if_ended()
            tickets = (moments or state.all_flats()).tickets
            elsewhere = {name: Region(state.tier, flat, tickets) for name, flat in state.held.items()}
        where = self._transfer, self._staging, state.update_tier, turn
        view = ShardView(chunk, homes, elsewhere, *where, writes=has_elements or exchanges)
        if elsewhere:
            state.name_staged(view.staged_states)
        updates = [state.start(run, view) if run.numel else state.start(run) for run in runs]
        return _ChunkUpdate(state, view, gradient, moments, updates, turn, ticket, averaging=averaging)

    def _plan_idle(self, chunk: Chunk, number: int, exchanges: bool = False) -> _ChunkUpdate:
        """As `_plan`, for a chunk none of whose parameters is updated."""
        return self._plan(chunk, bytes(len(chunk.parameters)), None, number, exchanges=exchanges)

    @staticmethod
    def _averaging_of(state: ChunkOptimizerState, averages: Averages, exchanges: bool) -> _Averaging:
        begins = state.without_average()
        state.note_average()
        return _Averaging(begins, None if exchanges else averages.share_to_come(), exchanges)

    def _batches(self, updates: Sequence[_ChunkUpdate], most: int = BATCH_NUMEL) -> Iterator[list[_ChunkUpdate]]:
        """Bring chunks to the tiers of their updates, and yield those that are launched together.

        most: elements with which a batch ends.
        """
        batch: list[_ChunkUpdate] = []
        numel = 0
        for number, update in enumerate(updates):
            for each in updates[number : number + 2]:
                # On the device both chunks would be in one buffer: the one ahead is launched first.
                if not each.has_begun and (each is update or len(TURNS[each.state.tier]) > 1):
                    self._begin(each)
            must_end = self._prepare(update)
            batch.append(update)
            numel += update.state.chunk.optim_numel
            if must_end or numel >= most:
                yield batch
                batch, numel = [], 0
        if batch:
            yield batch

    def _begin(self, update: _ChunkUpdate) -> None:
        """Start the copies of what rests on another tier."""
        update.has_begun, update.on_tier = True, update.gradient
        state, view, reduced = update.state, update.weights, update.gradient
        if view is None:
            return
        # The states are about to be written: whoever reads them in the background has to be done.
        if update.moments is not None or state.tickets.reads:
            wait_on_tier(update.moments or state.all_flats())
        view.stage()
        tier = state.update_tier
        if reduced is not None and reduced.tier is not tier:
            staged = self._staging.buffer(tier, "gradient" + update.turn, reduced.numel, reduced.dtype)
            # An earlier chunk's copy may still read the buffer: `copy` starts behind the tickets of both regions.
            self._transfer.copy(staged, reduced)
            update.on_tier = staged

    def _prepare(self, update: _ChunkUpdate) -> bool:
        """Have everything on the tier. Returns whether the chunk's batch must end with it."""
        view, gradient = update.weights, update.on_tier
        if view is None:
            return False
        view.segments(gradient)
        if update.averaging is not None:
            update.average(_Averaging.before)
        for each in update.runs:
            run = each.run
            if run.numel and gradient is not None:
                each.grad = gradient.flat[run.start : run.start + run.numel]
        # A torch optimizer updates one chunk at a time: its call of `ShardView.load` may stage weights, which is not
        # known yet here.
        return gradient is not update.gradient or view.is_staged or not self._update.is_fused

    def _finish(self, batch: Sequence[_ChunkUpdate], factors: GradientFactors) -> None:
        """Launch the batch, and bring the new weights home. Local."""
        begin_s = perf_counter()
        self._update.update([run for each in batch for run in each.runs], self._param_groups, factors)
        for each in batch:
            # A torch optimizer's new states get memory in here.
            self._note_updated(each)
            if each.averaging is not None:
                each.average(_Averaging.after)
            _close(each)
        self._tell(batch, begin_s)

    def _tell(self, batch: Sequence[_ChunkUpdate], begin_s: float) -> None:
        """Tell who listens of chunks that were launched together, each with its share of the time."""
        steps = self._params.observer.steps
        if steps:
            step_s = (perf_counter() - begin_s) / len(batch)
            for number, each in enumerate(batch):
                times = begin_s + number * step_s, begin_s + (number + 1) * step_s
                steps.tell(Span("update", *times, chunk=each.state.chunk.index))

    def _note_updated(self, update: _ChunkUpdate) -> None:
        """The chunk has new weights, or whoever asks for them waits for them."""
        state, places = update.state, self._grads.places
        state.store_updates(update.runs, self._params)
        if update.gradient is not None:
            # The gradient is used up: a home that was lent to it takes the new weights in `close`.
            places.consumed(state.chunk.index)
        # If this rank had nothing to update, the chunk's home may still hold the gradient.
        places.restore(state.chunk.index)
        self._params.after_update(state.chunk)


def _close(update: _ChunkUpdate) -> None:
    """Bring a chunk's new weights home."""
    if update.weights is not None:
        update.weights.close(update.state.are_all([each.run for each in update.runs]))


def _widest(chunk: Chunk) -> int:
    """Bytes of an element of a gradient that has not come to rest: one rank's have the dtype of the weights."""
    return max(chunk.dtype.itemsize, chunk.gradient_dtype.itemsize)


def _all_gather_weights(payloads: Payloads, chunk: Chunk) -> None:
    """Make weights that were updated in parts, as at stages 1 and 2, whole again on every rank. Collective."""
    params, home = payloads.params, chunk.homes[Kind.PARAM]
    with torch.no_grad():
        if home.tier is Tier.DEVICE:
            # `close` may have started a copy of this rank's part to the home. The gather must send the new values.
            wait_on_stream(home)
            params.communicator.all_gather(home.flat, None, chunk.layout, chunk.index)
            return
        payload = payloads.open_own_part(chunk)
        params.communicator.all_gather(payload.flat, None, chunk.layout, chunk.index)
        # This rank's own part is at home already, so only the other ranks' parts cross to the host.
        for others in chunk.layout.others(chunk.rank):
            params.memory.transfer.copy(home[others], payload[others])
        # What is launched into the slot next must not overtake the copies that read the payload.
        wait_on_stream(payload)


# -- Updates inside the backward (`update_in_backward`): the gradient of a chunk is used as soon as it is whole.
#
# Its weights are not needed any more then, by this backward. A later need of them is refused by `Payloads.fetch` or by
# autograd, which compares versions. Where a gradient cannot be used yet it rests as without the setting, in memory that
# no plan has counted, and the step uses it: only a part of the chunk's gradients has come, or something still uses the
# weights.


SCALES_LOSSES = (
    "update_in_backward=True updates while gradients come, and float16 weights need all of them first: a step with one "
    "that is not finite is skipped. Train in bfloat16, or wrap the model without it"
)


class BackwardUpdates:
    """The updates that the backwards of one model carry out (`UpdatesInBackward`)."""

    def __init__(
        self,
        updates: ChunkUpdates,
        states: Mapping[int, ChunkOptimizerState],
        param_groups: list[dict[str, Any]],
        edits: GroupEdits,
    ) -> None:
        """states: by chunk index. edits: of the param groups."""
        self._edits = edits
        self.sums = UsedSums()
        self._updates = updates
        self._states = states
        self._param_groups = param_groups
        self._settings_then = ""

    def begin(self, grads: GradStore) -> None:
        """See `UpdatesInBackward`. Raises GeminiError, and UnsupportedError for fp16 weights."""
        if any(state.chunk.trainable and state.dtype is torch.float16 for state in self._states.values()):
            raise UnsupportedError(SCALES_LOSSES)
        if not grads.books.synchronizes:
            raise GeminiError(f"a backward under no_sync() adds up gradients, {USES_UP}")
        if grads.are_used:
            raise GeminiError(f"a second backward before optimizer.step() adds up gradients, {USES_UP}")
        if self._edits.are_any():
            raise GeminiError(
                "param_groups were edited since the last step, and a backward with update_in_backward=True cannot "
                "follow, as states may move: call optimizer.follow_param_groups() after the edit, on every rank"
            )
        self.sums.discard_sums()  # of a backward whose gradients were discarded
        self._updates.prepare()
        self._settings_then = self._settings()

    def refuse_other_settings(self) -> None:
        """Raises UpdatedInBackwardError if hyperparameters are not those with which the backward has updated."""
        if self._edits.are_any():
            raise UpdatedInBackwardError(
                "param_groups were edited between backward() and step(), and update_in_backward=True has updated with "
                "those before: edit them after the step, and call optimizer.follow_param_groups()"
            )
        now = self._settings()
        if now != self._settings_then:
            raise UpdatedInBackwardError(
                f"hyperparameters were changed between backward() and step(), from {self._settings_then!r} to {now!r}: "
                "update_in_backward=True has updated with those before. Set them before the backward, or back now"
            )

    def refuse_edits(self, step: Step) -> None:
        """Raises GeminiError if a view has written to weights since the backward has updated them.

        Writes through the parameter itself are refused before they happen.
        """
        used = (chunk for chunk in step.chunks if step.grads.is_used(chunk))
        edited = [managed.name for chunk in used for managed in step.binding.edited_in(chunk)]
        if edited:
            raise GeminiError(
                f"{', '.join(edited)}: written to through a view between backward() and step(), and "
                "update_in_backward=True had updated them before. The written values are lost for the step: load a "
                "checkpoint, and write before the backward or after step()"
            )

    def takes(self, chunk: Chunk) -> bool:
        """See `UpdatesInBackward`. Gradients of parameters in no group stay after a step."""
        state = self._states.get(chunk.index)
        return state is not None and None not in state.groups and not chunk.is_updated_in_parts

    def use(self, gradient: ChunkGradient, reduced: Region) -> None:
        """See `UpdatesInBackward`."""
        self.sums.add(gradient, reduced.flat)
        self._updates.use(gradient.chunk, bytes(gradient.fired), reduced)

    def _settings(self) -> str:
        # Clipping and loss scales are refused.
        return settings_of_step(None, 1.0, self._param_groups)
