"""One step's norm, and the update of one chunk after the other."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemini.errors import GeminiError
from gemini.memory.memory import WorkThread, WorkTicket
from gemini.memory.transfer import Region, Ticket, ready, wait_on_stream, wait_on_tier
from gemini.monitor.live import LiveMemory
from gemini.optimizer.chunk_states import ChunkOptimizerState
from gemini.optimizer.elementwise import AdamUpdate, ElementwiseUpdate, settings_in_words
from gemini.optimizer.shards import (
    TURNS,
    GradientFactors,
    Run,
    RunUpdate,
    ShardView,
    Staging,
    spans_of,
    staged_bytes,
)
from gemini.placement.demand import Kind, Tier
from gemini.ranks.communicator import Communicator
from gemini.ranks.exit_report import words_of
from gemini.runtime.chunk import Chunk
from gemini.runtime.gradient import ChunkGradient
from gemini.runtime.step import Step
from optim import NAN_LIMB, accumulate_sum_of_squares_, max_abs, norm_from_limbs, zero_norm_limbs
from sharding import Piece

# -- The step's one all-reduce: gradient norm, non-finite gradients, and which parameters have a gradient at all.
#
# All of it is integers, so the sum does not depend on its order: the norm's limbs (`optim.norm`), and per parameter one
# word, whose low half counts the ranks with a gradient of it, and whose high half those with a non-finite element.


# This is the count of one rank in the high half of a word. The low half has room for more ranks than there can be.
_NON_FINITE = 1 << 32


@dataclass(frozen=True)
class GradientSummary:
    """The gradients of one step, summarised. Equal on all ranks."""

    norm: float  # inf or NaN if a gradient is not finite
    has_gradient: bytes  # by parameter index: 1 or 0
    non_finite: int | None  # index of the first parameter with a non-finite gradient
    num_backwards: int  # backwards in this step: the mean over ranks, rounded up

    def of(self, chunk: Chunk) -> bytes:
        """`has_gradient` by position in the chunk, whose parameters have consecutive indices."""
        first = chunk.parameters[0].index if chunk.parameters else 0
        return self.has_gradient[first : first + len(chunk.parameters)]


def summarize(
    step: Step,
    trainable: Sequence[Chunk],
    ungrouped: Mapping[int, Sequence[bool]],
    num_parameters: int,
    norm_type: float,
    settings: str,
    live: LiveMemory | None,
    ahead: SumsAhead | None,
) -> GradientSummary:
    """Look at all gradients once, which are reduced. Collective.

    ungrouped: flags of parameters in no param group, by chunk index, then by position. Their values do not count.
    live: readings of the device, which ranks agree on here. None: the user has fixed the budget.
    settings: the optimizer's settings, in words. ahead: sums that were made while the backward ran.

    Raises DivergenceError on all ranks if their settings differ. Another learning rate on one rank would give its
    shards another update, without any error.
    """
    # These are this rank's words, by parameter index.
    words = [0] * num_parameters
    sums: dict[torch.device, _Sums] = {}
    several = step.grads.num_backwards > 1
    gradients = [step.grads.of(chunk) for chunk in trainable]
    wait_on_tier(*(gradient.reduced() for gradient in gradients if gradient.is_reduced))  # one wait
    for chunk, gradient in zip(trainable, gradients, strict=True):
        if chunk.parameters:
            first = chunk.parameters[0].index
            words[first : first + len(gradient.got)] = gradient.got
        if not gradient.is_reduced:
            continue
        flat = gradient.reduced().flat
        device_sums = sums.setdefault(flat.device, _Sums(flat.device))
        pieces = _counted(chunk, gradient, ungrouped.get(chunk.index))
        made = None if ahead is None or several or norm_type != 2.0 else ahead.find(gradient, pieces)
        if made is not None:
            device_sums.add_made(chunk, made)
            continue
        for piece in pieces:
            part = flat[piece.in_shard]
            # Sums of several micro-batches are in fp32. A gradient that came only once is still in 16 bits: widen it,
            # so that both are counted by the same rule.
            if several and chunk.widens:
                part = part.float()
            device_sums.add(chunk, piece, part, norm_type)
    if ahead is not None:
        ahead.note_step(several)
    device, communicator = step.params.device.device, step.communicator
    # Read the device's free memory before the host waits for the sums: the driver answers slowly, and the device would
    # be idle meanwhile.
    readings = [] if live is None else live.words(communicator.rank, communicator.world_size)
    for device_sums in sums.values():
        for index in device_sums.non_finite():
            words[index] += _NON_FINITE
    # One all-reduce of everything that ranks must know.
    # Gradients on the host and on the device have limbs of their own, which are added up on the host.
    limbs = sum((device_sums.limbs.cpu() for device_sums in sums.values()), start=zero_norm_limbs())
    bits = _bits_of(settings)
    numbers = torch.tensor([step.grads.num_backwards, *words, *bits, *readings], dtype=torch.int64, device="cpu")
    both = torch.cat([limbs, numbers])
    both = both.to(device) if communicator.world_size > 1 else both  # one rank needs no copy to the device
    communicator.all_reduce_sum_(both, "gradient summary")
    both = both.cpu()
    limbs, (num_backwards, *counts) = both[: limbs.numel()], both[limbs.numel() :].tolist()
    counts, bits, readings = counts[: len(words)], counts[len(words) :][: len(bits)], counts[len(words) + len(bits) :]
    if live is not None:
        live.agree(readings)
    _refuse_other_settings(communicator, settings, bits)
    if norm_type == 2.0:
        norm = norm_from_limbs(limbs)
    else:
        # All ranks take this second all-reduce or none does: the settings name the norm type, and ranks that differ in
        # them were refused above.
        largest = [float(device_sums.largest) for device_sums in sums.values()]
        most = torch.tensor(
            max([0.0, *(each for each in largest if not math.isnan(each))]), dtype=torch.float64, device="cpu"
        )
        most = most.to(device)
        # Backends differ in the maximum of NaN, so NaNs are left out here and come from the limbs.
        communicator.all_reduce_max_(most, "largest gradient")
        norm = math.nan if limbs[NAN_LIMB] else float(most)
    # These figures, too, come from sums over ranks, so that ranks cannot decide differently.
    bad = [index for index, word in enumerate(counts) if word >= _NON_FINITE]
    has_gradient = bytes([word & (_NON_FINITE - 1) > 0 for word in counts])
    return GradientSummary(norm, has_gradient, bad[0] if bad else None, -(-num_backwards // communicator.world_size))


def settings_of_step(clip: object, loss_scale: float, param_groups: Sequence[dict[str, Any]]) -> str:
    """Everything that a step depends on besides the model's state, as a text that ranks can compare."""
    groups = "; ".join(map(settings_in_words, param_groups))
    return f"clip_grad_norm={clip} loss_scale={loss_scale} {groups}"


def compare_settings(step: Step, settings: str) -> None:
    """Compare the settings of a step whose gradients were summarised earlier. Collective.

    Raises DivergenceError, as `summarize` does.
    """
    bits = torch.tensor(_bits_of(settings), dtype=torch.int64, device=step.params.device.device)
    step.communicator.all_reduce_sum_(bits, "the optimizer's settings")
    _refuse_other_settings(step.communicator, settings, bits.tolist())


def _refuse_other_settings(communicator: Communicator, settings: str, bits: list[int]) -> None:
    """Raises DivergenceError if settings differ. bits: sums over ranks, so that all ranks decide alike."""
    if any(count not in (0, communicator.world_size) for count in bits):
        remedy = "All ranks must set the optimizer alike before a step"
        communicator.agree(settings.encode(), "the optimizer's settings", remedy=remedy)


def _bits_of(settings: str) -> list[int]:
    """32 bits of a fingerprint. If all ranks have the same settings, each bit's sum is 0 or the number of ranks."""
    # The fingerprint does not travel as one number: a rank whose number is the mean of all ranks' would find the sum
    # right, and go on alone.
    fingerprint = zlib.crc32(settings.encode())
    return [fingerprint >> place & 1 for place in range(32)]


class _Sums:
    """Sums over the gradients on one device. The host waits for them once, at the end, and not for each chunk."""

    def __init__(self, device: torch.device) -> None:
        self.limbs = zero_norm_limbs(device)
        self.largest = torch.zeros((), dtype=torch.float64, device=device)
        self._seen: list[tuple[Chunk, Piece]] = []
        self._first_bad: list[Tensor] = []  # for each piece: its first non-finite element, or -1

    def add(self, chunk: Chunk, piece: Piece, part: Tensor, norm_type: float) -> None:
        """Add a piece. part: its elements of the reduced gradient."""
        self._seen.append((chunk, piece))
        self._first_bad.append(accumulate_sum_of_squares_(self.limbs, part))
        if norm_type != 2.0:
            # `torch.maximum` stays on the device. A comparison on the host would wait for each piece.
            self.largest = torch.maximum(self.largest, max_abs(part).double())

    def add_made(self, chunk: Chunk, made: _MadeSum) -> None:
        """Add the pieces of a chunk that were summed before."""
        self._seen.extend((chunk, piece) for piece in made.pieces)
        self._first_bad.extend(made.first_bad)
        self.limbs.add_(made.limbs)

    def non_finite(self) -> list[int]:
        """Indices of the parameters that have the first non-finite element of a piece. Waits for the device."""
        found = torch.stack(self._first_bad).tolist() if self._first_bad else []
        pairs = zip(self._seen, found, strict=True)
        return [chunk.parameter_at(piece.payload_start + first).index for (chunk, piece), first in pairs if first >= 0]


def _counted(chunk: Chunk, gradient: ChunkGradient, ungrouped: Sequence[bool] | None) -> list[Piece]:
    """The pieces of the reduced gradient that this rank adds to the norm. `shard_start` refers to `reduced()`."""
    several = chunk.layout.world_size > 1
    # On several ranks a parameter without a gradient has zeros, which add nothing: take whole shards.
    if ungrouped is None and several:
        pieces = list(chunk.layout.slices(chunk.rank))
    elif ungrouped is None and all(gradient.got):
        pieces = [Piece(0, 0, chunk.optim_numel)]
    elif ungrouped is None:
        # On one rank elements without a gradient have values of an earlier step: leave them out.
        got = [position for position, has in enumerate(gradient.got) if has]
        pieces = [Piece(start, start, numel) for start, numel, _ in spans_of(chunk, got)]
    else:
        pieces = [
            piece
            for position, managed in enumerate(chunk.parameters)
            if not (ungrouped is not None and ungrouped[position]) and (several or gradient.got[position])
            for piece in chunk.layout.pieces(chunk.rank, managed.offset, managed.numel)
        ]
    # The gradient is whole on every rank, and each rank counts its share of it.
    if several and chunk.optim_layout.world_size == 1:
        return [Piece(piece.payload_start, piece.payload_start, piece.numel) for piece in pieces]
    return pieces


# -- Sums of gradients that rest on the host, made by a thread while the backward goes on.
#
# A norm's limbs are integers, so chunks may be summed in any order: each one is, as soon as its gradient has come to
# rest. A step takes the sum if nothing has written to the gradient since, and else makes another. Steps of several
# micro-batches sum up at the end: only then is the gradient whole.


@dataclass
class _MadeSum:
    """The sum of one chunk's gradient, and of which elements it is."""

    ticket: WorkTicket
    source: Tensor
    version: int  # of `source`, which every write raises
    pieces: list[Piece]
    limbs: Tensor  # see `zero_norm_limbs`
    first_bad: list[Tensor]  # see `_Sums`


class SumsAhead:
    """The sums of one model's gradients that a thread makes for the next step."""

    def __init__(self, work: WorkThread) -> None:
        self._work = work
        self._made: dict[int, _MadeSum] = {}  # by chunk index
        self._is_of_use = True

    def begin(self, gradient: ChunkGradient, backward: int) -> None:
        """Sum up a gradient that has come to rest on the host, or is on its way there. Local."""
        if backward > 1 or not self._is_of_use:
            return
        chunk, region = gradient.chunk, gradient.reduced()
        pieces, ticket, arriving = _counted(chunk, gradient, None), WorkTicket(self._work), region.tickets.write
        made = _MadeSum(ticket, region.flat, region.flat._version, pieces, zero_norm_limbs(), [])
        ticket.read(region)
        try:
            self._work.begin(partial(_sum_up, made, arriving))
        except BaseException as error:
            ticket.end(GeminiError(f"the sum of a gradient did not begin: {words_of(error)}"))
            raise
        self._made[chunk.index] = made

    def find(self, gradient: ChunkGradient, pieces: list[Piece]) -> _MadeSum | None:
        """The sum of these pieces of the gradient as it is now, or None. Waits until it is made."""
        made, flat = self._made.get(gradient.chunk.index), gradient.reduced().flat
        if made is None or made.pieces != pieces or flat.data_ptr() != made.source.data_ptr():
            return None
        made.ticket.wait()
        return made if flat._version == made.version and flat.dtype is made.source.dtype else None

    def note_step(self, had_several: bool) -> None:
        """The sums were taken. had_several: the step had several micro-batches, as the next one will."""
        self._made.clear()
        self._is_of_use = not had_several


def _sum_up(made: _MadeSum, arriving: Ticket | None) -> None:
    try:
        if arriving is not None:
            arriving.wait()
        with torch.no_grad():
            for piece in made.pieces:
                made.first_bad.append(accumulate_sum_of_squares_(made.limbs, made.source[piece.in_shard]))
    except BaseException as error:
        made.ticket.end(error)
        raise
    made.ticket.end()


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


@dataclass(frozen=True)
class _ChunkUpdate:
    """The update of one chunk."""

    state: ChunkOptimizerState
    weights: ShardView | None  # None: this rank has nothing to update
    gradient: Region | None  # where it rests; None like `weights`
    moments: Region | None  # as the thread may use them: all of them share its tickets
    runs: list[RunUpdate]
    turn: str = ""  # which of the staging buffers its gradient is copied to
    ticket: WorkTicket | None = None  # where a thread carries it out

    def end(self, error: BaseException | None = None) -> None:
        """The thread has updated the chunk, or has failed to."""
        if self.ticket is not None:
            self.ticket.end(error)


@dataclass(frozen=True)
class _Begun:
    """A chunk whose copies to the tier of its update were started."""

    update: _ChunkUpdate
    gradient: Region | None  # on the tier


class ChunkUpdates:
    """Updates the chunks of one model."""

    def __init__(
        self,
        step: Step,
        states: Mapping[int, ChunkOptimizerState],
        update: ElementwiseUpdate,
        param_groups: list[dict[str, Any]],
        defers: bool,
    ) -> None:
        """defers: a thread updates chunks whose states are on the host, beside what follows the step."""
        self._step = step
        self._states = states
        self._update = update
        self._param_groups = param_groups
        self._staging = Staging(step)
        self._memory = memory = step.params.memory
        self._transfer, self._work = memory.transfer, memory.work
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

    def room(self, chunks: Iterable[Chunk]) -> AbstractContextManager[None]:
        """Inside, `update` finds all that it needs beside the homes. See [Note: Room for an update] in shards.py.

        Local. Raises torch.OutOfMemoryError or BudgetError, and nothing has changed then.
        """
        needs: dict[tuple[Tier, str], int] = {}
        temporaries = 0  # on the device; the host has no bound that an allocation would find
        gathers_in_slot = False
        for chunk in chunks:
            gradient = self._step.grads.of(chunk)
            if not gradient.is_reduced:
                continue
            state = self._states[chunk.index]
            reduced, tier = gradient.reduced(), state.update_tier
            staged = staged_bytes(chunk, tier, loads=not self._update.is_fused)
            if state.tier is not tier:
                staged |= dict.fromkeys(state.flats, state.num_flat_bytes)
            if reduced.tier is not tier:
                staged["gradient"] = reduced.nbytes
            for name, num_bytes in staged.items():
                # Chunks are staged one after the other in the same pieces, so the largest need counts and not the sum.
                for turn in TURNS[state.tier]:
                    needs[tier, name + turn] = max(num_bytes, needs.get((tier, name + turn), 0))
            if tier is Tier.DEVICE:
                its = self._update.temporary_bytes(chunk.optim_numel, state.dtype, self._memory.device.device)
                temporaries = max(temporaries, its)
            gathers_in_slot |= _is_updated_in_parts(chunk) and chunk.homes[Kind.PARAM].tier is Tier.HOST
        # Whole weights on the host are gathered in a slot of payloads, which may have no memory yet.
        if gathers_in_slot:
            self._step.payloads.take_room()
        return self._staging.reserved(needs, temporaries)

    def update(self, chunks: Mapping[Chunk, bytes], factors: GradientFactors) -> None:
        """Update chunks on the tiers of their states. Local until new weights are gathered.

        chunks: the chunks to update, with their `steps`.
        """
        later = self._deferred(chunks)
        if later:
            self._defer(later, factors)
        now = (chunk for chunk in chunks if chunk not in later)
        for batch in self._batches(self._plan(chunk, chunks[chunk], number) for number, chunk in enumerate(now)):
            self._finish(batch, factors)

    def finish(self) -> None:
        """Wait for the updates of the last step. Raises why one of them has failed."""
        self._work.finish()

    def _deferred(self, chunks: Mapping[Chunk, bytes]) -> dict[Chunk, bytes]:
        """Those of the chunks that a thread updates while training goes on, in their order."""
        # Gathers of weights that ranks update in parts are collectives, which all ranks launch in one order.
        if not self._defers or any(map(_is_updated_in_parts, chunks)):
            return {}
        return {chunk: steps for chunk, steps in chunks.items() if self._states[chunk.index].update_tier is Tier.HOST}

    def _defer(self, chunks: Mapping[Chunk, bytes], factors: GradientFactors) -> None:
        """Have a thread update chunks, and write down that it is done. Who needs a region waits for it."""
        update = self._update
        assert isinstance(update, AdamUpdate)
        tickets = [WorkTicket(self._work) for _ in chunks]
        try:
            updates = [
                self._plan(chunk, steps, number, ticket)
                for number, ((chunk, steps), ticket) in enumerate(zip(chunks.items(), tickets, strict=True))
            ]
            for each in updates:
                update.begin(each.runs, self._param_groups, factors)
            self._work.begin(partial(self._carry_out, update, updates, self._transfer.aside()))
        except BaseException as error:
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
            with self._step.failures.tearing(), torch.no_grad(), beside:
                try:
                    for batch in self._batches(updates, DEFERRED_NUMEL):
                        at = batch[0].state.chunk
                        update.launch([run for each in batch for run in each.runs])
                        for each in batch:
                            at = each.state.chunk
                            _close(each)
                            each.end()
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

    def _plan(self, chunk: Chunk, steps: bytes, number: int, ticket: WorkTicket | None = None) -> _ChunkUpdate:
        """What to update of a chunk, and where it is. number: of the chunk, for its turn. Nothing moves yet."""
        state = self._states[chunk.index]
        runs = state.runs(steps)
        # All updated parameters are in other ranks' shards. Count their steps here too.
        if not any(run.numel for run in runs):
            return _ChunkUpdate(state, None, None, None, [state.start(run) for run in runs])
        grads, moments, homes = self._step.grads, None, chunk.homes
        gradient = grads.of(chunk).reduced()
        if ticket is not None:
            gradient, moments = ticket.hand_over(gradient), ticket.hand_over(state.all_flats())
            homes = {kind: ticket.hand_over(homes[kind]) for kind in (Kind.PARAM, Kind.MASTER) if kind in homes}
        turns = TURNS[state.tier]
        turn = turns[number % len(turns)]
        elsewhere: dict[str, Region] = {}
        if state.tier is not state.update_tier:
            tickets = (moments or state.all_flats()).tickets
            elsewhere = {name: Region(state.tier, flat, tickets) for name, flat in state.flats.items()}
        view = ShardView(chunk, homes, elsewhere, self._transfer, self._staging, state.update_tier, turn)
        updates = [state.start(run, view) if run.numel else state.start(run) for run in runs]
        return _ChunkUpdate(state, view, gradient, moments, updates, turn, ticket)

    def _batches(self, updates: Iterable[_ChunkUpdate], most: int = BATCH_NUMEL) -> Iterator[list[_ChunkUpdate]]:
        """Bring chunks to the tiers of their updates, and yield those that are launched together.

        most: elements with which a batch ends.
        """
        batch: list[_ChunkUpdate] = []
        numel = 0
        for begun in self._begin_all(updates):
            must_end, update = self._prepare(begun), begun.update
            batch.append(update)
            numel += update.state.chunk.optim_numel
            if must_end or numel >= most:
                yield batch
                batch, numel = [], 0
        if batch:
            yield batch

    def _begin_all(self, updates: Iterable[_ChunkUpdate]) -> Iterator[_Begun]:
        """Begin the chunks, and yield them in their order. One chunk more than was yielded may have begun."""
        ahead: list[_Begun] = []
        for update in updates:
            # On the device both chunks would be in one buffer: the one ahead is launched first.
            if len(TURNS[update.state.tier]) == 1:
                yield from ahead
                ahead = []
            begun = self._begin(update)
            yield from ahead
            ahead = [begun]
        yield from ahead

    def _begin(self, update: _ChunkUpdate) -> _Begun:
        """Start the copies of what rests on another tier."""
        state, view, reduced = update.state, update.weights, update.gradient
        if view is None or reduced is None:
            return _Begun(update, None)
        # The states are about to be written: whoever reads them in the background has to be done.
        if update.moments is not None or state.tickets.reads:
            wait_on_tier(update.moments or state.all_flats())
        view.stage()
        tier = state.update_tier
        if reduced.tier is tier:
            return _Begun(update, reduced)
        staged = self._staging.buffer(tier, "gradient" + update.turn, reduced.numel, reduced.dtype)
        # An earlier chunk's copy may still read the buffer: `copy` starts behind the tickets of both regions.
        self._transfer.copy(staged, reduced)
        return _Begun(update, staged)

    def _prepare(self, begun: _Begun) -> bool:
        """Have everything on the tier. Returns whether the chunk's batch must end with it."""
        update, gradient = begun.update, begun.gradient
        view = update.weights
        if view is None or gradient is None:
            return False
        grad = ready(gradient)
        view.segments()
        for each in update.runs:
            run = each.run
            if run.numel:
                each.grad = grad[run.start : run.start + run.numel]
        # A torch optimizer updates one chunk at a time: its call of `ShardView.load` may stage weights, which is not
        # known yet here.
        return gradient is not update.gradient or view.is_staged or not self._update.is_fused

    def _finish(self, batch: Sequence[_ChunkUpdate], factors: GradientFactors) -> None:
        """Launch the batch, and bring the new weights home.

        Collective if each rank has updated a part of weights that all ranks hold whole.
        """
        self._update.update([run for each in batch for run in each.runs], self._param_groups, factors)
        for each in batch:
            # A torch optimizer's new states get memory in here.
            self._note_updated(each)
            _close(each)
            # Ranks may end their batches at different chunks, as staging depends on what each updates. All of them keep
            # the order of chunks, in which the gathers must come.
            chunk = each.state.chunk
            if _is_updated_in_parts(chunk):
                _all_gather_weights(self._step, chunk)

    def _note_updated(self, update: _ChunkUpdate) -> None:
        """The chunk has new weights, or whoever asks for them waits for them."""
        step, state = self._step, update.state
        state.store_updates(update.runs, step.params)
        if update.weights is not None:
            # The gradient is used up: a home that was lent to it takes the new weights in `close`.
            step.grads.homes.consumed(state.chunk)
        # If this rank had nothing to update, the chunk's home may still hold the gradient.
        step.grads.homes.restore(state.chunk)
        step.after_chunk_update(state.chunk)


def _close(update: _ChunkUpdate) -> None:
    """Bring a chunk's new weights home."""
    if update.weights is not None:
        update.weights.close(update.state.are_all([each.run for each in update.runs]))


def _is_updated_in_parts(chunk: Chunk) -> bool:
    """Whether every rank keeps the weights whole and updates a part of them."""
    return chunk.home_layout.world_size < chunk.optim_layout.world_size


def _all_gather_weights(step: Step, chunk: Chunk) -> None:
    """Make weights that were updated in parts, as at stages 1 and 2, whole again on every rank. Collective."""
    params, home = step.params, chunk.homes[Kind.PARAM]
    with torch.no_grad():
        if home.tier is Tier.DEVICE:
            # `close` may have started a copy of this rank's part to the home. The gather must send the new values.
            wait_on_stream(home)
            params.communicator.all_gather(home.flat, None, chunk.layout, chunk.index)
            return
        payload = step.payloads.open_own_part(chunk)
        params.communicator.all_gather(payload.flat, None, chunk.layout, chunk.index)
        # This rank's own part is at home already, so only the other ranks' parts cross to the host.
        for others in chunk.layout.others(chunk.rank):
            params.memory.transfer.copy(home[others], payload[others])
        # What is launched into the slot next must not overtake the copies that read the payload.
        wait_on_stream(payload)
