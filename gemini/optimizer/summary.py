"""What all ranks must know of the gradients before a step: their norm, which are not finite, and whose they are."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemini.memory.transfer import Region, Ticket, wait_on_tier
from gemini.memory.work import WorkThread, WorkTicket
from gemini.monitor.live import LiveMemory
from gemini.optimizer.elementwise import settings_in_words
from gemini.optimizer.shards import spans_of
from gemini.ranks.communicator import Communicator
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
    is_bad_elsewhere: bool = False  # a part of the model that other ranks have has a non-finite gradient

    @property
    def is_finite(self) -> bool:
        """Whether all gradients are, on all ranks."""
        return self.non_finite is None and not self.is_bad_elsewhere

    def of(self, chunk: Chunk) -> bytes:
        """`has_gradient` by position in the chunk, whose parameters have consecutive indices."""
        first = chunk.parameters[0].index if chunk.parameters else 0
        return self.has_gradient[first : first + len(chunk.parameters)]


def summarize(
    step: Step,
    resting: Mapping[Chunk, Region | None],
    ungrouped: Mapping[int, Sequence[bool]],
    num_parameters: int,
    norm_type: float,
    settings: str,
    live: LiveMemory | None,
    ahead: SumsAhead | None,
    used: UsedSums | None,
) -> GradientSummary:
    """Look at all gradients once, which are reduced. Collective.

    resting: the reduced gradient of each chunk that is trained; None where none has come.
    ungrouped: flags of parameters in no param group, by chunk index, then by position. Their values do not count.
    live: readings of the device, which ranks agree on here. None: the user has fixed the budget.
    settings: the optimizer's settings, in words. ahead: sums that were made while the backward ran. used: those of
    gradients that are not there any more.

    Raises DivergenceError on all ranks if their settings differ. Another learning rate on one rank would give its
    shards another update, without any error.
    """
    # These are this rank's words, by parameter index.
    words = [0] * num_parameters
    sums: dict[torch.device, _Sums] = {}
    several = step.grads.num_backwards > 1
    wait_on_tier(*[region for region in resting.values() if region is not None])  # one wait
    for chunk, region in resting.items():
        gradient = step.grads.of(chunk)
        if chunk.parameters:
            first = chunk.parameters[0].index
            words[first : first + len(gradient.got)] = gradient.got
        if region is None:
            continue
        flat = region.flat
        if flat.device not in sums:
            sums[flat.device] = _Sums(flat.device)
        device_sums = sums[flat.device]
        pieces = _counted(chunk, gradient.got, ungrouped.get(chunk.index))
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
    all_sums = [*sums.values(), *(() if used is None else used.by_device.values())]
    # Read the device's free memory before the host waits for the sums: the driver answers slowly, and the device would
    # be idle meanwhile.
    readings = [] if live is None else live.words(communicator.rank, communicator.world_size)
    for device_sums in all_sums:
        for index in device_sums.non_finite():
            words[index] += _NON_FINITE
    # One all-reduce of everything that ranks must know.
    # Gradients on the host and on the device have limbs of their own, which are added up on the host.
    limbs = sum([device_sums.limbs.cpu() for device_sums in all_sums], start=zero_norm_limbs())
    bits = _bits_of(settings)
    numbers = torch.tensor([step.grads.num_backwards, *words, *bits, *readings], dtype=torch.int64, device="cpu")
    both = torch.cat([limbs, numbers])
    # One rank needs no copy to the device.
    there = both.to(device) if communicator.world_size > 1 or communicator.is_divided else both
    communicator.all_reduce_sum_(there, "gradient summary")
    both = there.cpu()
    num_limbs = limbs.numel()
    num_backwards, *counts = both[num_limbs:].tolist()
    counts, bits, readings = counts[: len(words)], counts[len(words) :][: len(bits)], counts[len(words) + len(bits) :]
    if live is not None:
        live.agree(readings)
    _refuse_other_settings(communicator, settings, bits)
    # These figures, too, come from sums over ranks, so that ranks cannot decide differently.
    bad = [index for index, word in enumerate(counts) if word >= _NON_FINITE]
    limbs, num_bad = both[:num_limbs], len(bad)
    # Ranks that have other parts of the model are in no group with these: one norm, and one decision, is for all.
    if communicator.is_divided:
        # In memory that is there: a rank that found none now would fail alone, where its group has agreed.
        of_model = there[: num_limbs + 1]
        of_model[num_limbs] = num_bad
        communicator.sum_over_parts_(of_model)
        limbs, num_bad = of_model[:num_limbs].cpu(), int(of_model[num_limbs])
    if norm_type == 2.0:
        norm = norm_from_limbs(limbs)
    else:
        # All ranks take this second all-reduce or none does: the settings name the norm type, and ranks that differ in
        # them were refused above.
        largest = [float(device_sums.largest) for device_sums in all_sums]
        most = torch.tensor(
            max([0.0, *(each for each in largest if not math.isnan(each))]), dtype=torch.float64, device="cpu"
        )
        most = most.to(device)
        # Backends differ in the maximum of NaN, so NaNs are left out here and come from the limbs.
        communicator.all_reduce_max_(most, "largest gradient")
        communicator.max_over_parts_(most)
        norm = math.nan if limbs[NAN_LIMB] else float(most)
    has_gradient = bytes([word & (_NON_FINITE - 1) > 0 for word in counts])
    return GradientSummary(
        norm,
        has_gradient,
        bad[0] if bad else None,
        -(-num_backwards // communicator.world_size),
        is_bad_elsewhere=num_bad > len(bad),
    )


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
    if not {0, communicator.world_size}.issuperset(bits):
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


def _counted(chunk: Chunk, has_gradient: bytearray, ungrouped: Sequence[bool] | None) -> list[Piece]:
    """The pieces of the reduced gradient that this rank adds to the norm. `shard_start` refers to `reduced()`.

    has_gradient: on this rank, by position.
    """
    # Replicas have equal gradients, of which each element counts once.
    if chunk.replica:
        return []
    several = chunk.layout.world_size > 1
    # As if they were in no param group: ranks with other parts of the model have copies, of which one counts.
    if chunk.has_copies:
        left_out = ungrouped or [False] * len(chunk.parameters)
        ungrouped = [each or not managed.counts for each, managed in zip(left_out, chunk.parameters, strict=True)]
    # On several ranks a parameter without a gradient has zeros, which add nothing: take whole shards.
    if ungrouped is None and several:
        pieces = list(chunk.layout.slices(chunk.rank))
    elif ungrouped is None and all(has_gradient):
        pieces = [Piece(0, 0, chunk.optim_numel)]
    elif ungrouped is None:
        # On one rank elements without a gradient have values of an earlier step: leave them out.
        got = [position for position, has in enumerate(has_gradient) if has]
        pieces = [Piece(start, start, numel) for start, numel, _ in spans_of(chunk, got)]
    else:
        pieces = [
            piece
            for position, managed in enumerate(chunk.parameters)
            if not (ungrouped is not None and ungrouped[position]) and (several or has_gradient[position])
            for piece in chunk.layout.pieces(chunk.rank, managed.offset, managed.numel)
        ]
    # The gradient is whole on every rank, and each rank counts its share of it.
    if several and chunk.optim_layout.world_size == 1:
        return [Piece(piece.payload_start, piece.payload_start, piece.numel) for piece in pieces]
    return pieces


# -- Sums of gradients that the backward has used up (`update_in_backward`), made just before their update.


class UsedSums:
    """The sums of one model's gradients that the last backward has used for updates."""

    def __init__(self) -> None:
        self.by_device: dict[torch.device, _Sums] = {}

    def add(self, gradient: ChunkGradient, flat: Tensor) -> None:
        """Add what the open payload brought. flat: (optim_numel,), reduced. Does not wait for the device."""
        if flat.device not in self.by_device:
            self.by_device[flat.device] = _Sums(flat.device)
        sums = self.by_device[flat.device]
        for piece in _counted(gradient.chunk, gradient.fired, None):
            sums.add(gradient.chunk, piece, flat[piece.in_shard], 2.0)

    def discard_sums(self) -> None:
        """A step has counted them, or the gradients are discarded."""
        self.by_device.clear()


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
        pieces, ticket, arriving = _counted(chunk, gradient.got, None), WorkTicket(self._work), region.tickets.write
        made = _MadeSum(ticket, region.flat, region.flat._version, pieces, zero_norm_limbs(), [])
        try:
            ticket.read(region)
            self._work.begin(partial(_sum_up, made, arriving))
        except BaseException:
            # An interrupt may come right behind the beginning. Without a sum nothing is wrong: the step makes another.
            self._work.join()
            ticket.end()
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
