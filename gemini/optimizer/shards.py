"""A rank's part of a chunk's states: as views, as runs of parameters, staged on another tier."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemini.memory.direct import aligned_bytes
from gemini.memory.memory import RankMemory
from gemini.memory.transfer import Region, Transfer, ready, wait_on_host, wait_on_stream, wait_on_tier
from gemini.placement.demand import Kind, Tier
from gemini.placement.needs import round_to_alignment
from gemini.placement.policy import RING
from gemini.runtime.chunk import Chunk
from gemini.runtime.grads import GradStore
from optim import (
    AdamPiece,
    AdamScalars,
    Spans,
    StateLayout,
    average_,
    exchange_,
    join_master_,
    round_master_,
    split_master_,
)
from sharding import ALIGNMENT, Piece

# -- Memory that an update needs beside the homes: what rests on one tier is staged on the other, where the update runs.
#
# Pieces are used again from chunk to chunk. Those on the host are kept from step to step. On the device they lie in
# memory that the plan has counted and that is idle in a step: buffers of reductions, gradient slots, and on one rank
# slots of payloads. So a step allocates only what does not fit there, and that is given back when the step is over.
#
# [Note: Room for an update] An update that finds no memory after the first chunk was updated would leave the model half
# updated, on one rank or on all. So `reserve` finds all pieces before ranks agree on the step, for the chunk that needs
# the most of each: a rank without memory fails while nobody has changed anything, and the others fail with it. What a
# torch optimizer takes and gives back by itself (see [Note: Tiles of an update] in elementwise.py) is only tried:
# torch's allocator keeps the memory for it.


Needs = Mapping[tuple[Tier, str], int]
"""Bytes of a piece, by tier and name."""


class Staging:
    """The staging buffers of one optimizer. All of it is local."""

    def __init__(self, memory: RankMemory, grads: GradStore, is_alone: bool) -> None:
        """is_alone: there is one rank."""
        self._memory = memory
        self._grads = grads
        self._is_alone = is_alone
        self._device = memory.device
        self._pieces: dict[tuple[Tier, str], Region] = {}  # (bytes,) uint8
        self._idle: list[Region] = []  # parts of the plan's memory on the device that no piece lies in
        self._lent: list[Region] = []  # parts that pieces lie in

    @contextmanager
    def reserved(self, needs: Needs, temporaries: int = 0) -> Iterator[None]:
        """Inside, `buffer` finds pieces of at most these sizes without taking memory. See [Note: Room for an update].

        temporaries: bytes on the device that are free beside the pieces when this begins.
        Raises torch.OutOfMemoryError, and holds nothing on the device then.
        """
        if any(tier is Tier.DEVICE for tier, _ in needs):
            self._idle = list(self._idle_in_step())
        try:
            # The largest piece first: a small one might take the only idle memory that is large enough for it.
            for (tier, name), num_bytes in sorted(needs.items(), key=lambda need: -need[1]):
                self._piece(tier, name, num_bytes)
            if temporaries:
                # The tensor is dropped at once: torch's allocator keeps its memory cached, and the update finds it
                # there.
                torch.empty(temporaries, dtype=torch.uint8, device=self._device.device)
            yield
        finally:
            self._give_back()

    def _give_back(self) -> None:
        for region in self._lent:
            # On the emulated device a read of the piece after its step yields NaN.
            self._device.poison(ready(region))
        self._idle, self._lent = [], []  # no view is left: it would pass for a user's that holds the slot
        # The device's pieces lie in slots and buffers that the next forward and backward use.
        # A thread may add pieces on the host meanwhile, so this is no loop over the dict.
        for key in [each for each in list(self._pieces) if each[0] is Tier.DEVICE]:
            del self._pieces[key]

    def buffer(self, tier: Tier, name: str, numel: int, dtype: torch.dtype) -> Region:
        """Return (numel,) of `dtype` with undefined content, valid until the next `buffer` of this name on this tier.

        Copies of what was there before may still be under way: wait before the host writes to it.
        """
        num_bytes = numel * dtype.itemsize
        return self._piece(tier, name, num_bytes)[:num_bytes].view(dtype)

    def _piece(self, tier: Tier, name: str, num_bytes: int) -> Region:
        piece = self._pieces.get((tier, name))
        if piece is None or piece.numel < num_bytes:
            if piece is not None and tier is Tier.HOST:
                # Copies from and to the old piece may be under way, and its memory is about to be freed.
                wait_on_host(piece)
            piece = self._borrowed(num_bytes) if tier is Tier.DEVICE else None
            if piece is None:
                device = self._device.device if tier is Tier.DEVICE else "cpu"
                # A copy to or from memory that is not pinned makes the host wait for it. No collective is under way
                # between a step's reductions and its update, so pinning waits for none of another rank's.
                pins = tier is Tier.HOST and self._device.device.type != "cpu"
                # Aligned on the host, in case a disk reads from or writes to it.
                memory = (
                    aligned_bytes(num_bytes, pins)
                    if tier is Tier.HOST
                    else torch.empty(num_bytes, dtype=torch.uint8, device=device)
                )
                piece = Region(tier, memory)
            self._pieces[tier, name] = piece
        return piece

    def _borrowed(self, num_bytes: int) -> Region | None:
        """A part of the smallest idle memory that has so many bytes."""
        fitting = [region for region in self._idle if region.nbytes >= num_bytes]
        if not fitting:
            return None
        region = min(fitting, key=lambda each: each.nbytes)
        self._idle.remove(region)
        # What is left begins at an aligned byte, because a tensor of any dtype may lie there next.
        self._idle.append(region[round_to_alignment(num_bytes) :])
        self._lent.append(region[:num_bytes])
        return self._lent[-1]

    def _idle_in_step(self) -> Iterator[Region]:
        """The memory on the device that reductions, gradients and payloads do not use in a step.

        On several ranks weights that were updated in parts are gathered into slots of payloads during the update, so
        those are not idle.
        """
        memory = self._memory
        scratch = self._grads.scratch.idle()
        if scratch is not None:
            yield scratch
        yield from memory.gradient_slots.idle()
        # Scratch and gradient slots are idle on any number of ranks: all gradients have been reduced before a step's
        # update.
        if self._is_alone:
            yield from memory.slots.idle()


# -- The weights that this rank updates, on the tier where the update runs.
#
# They are in the parameter home (fp32 weights are their own master), in a whole fp32 master beside it, or in both (a
# split master). Memory on the update's tier is used in place. Other memory is copied to a staging buffer on that tier,
# and `close` copies it back.


TURNS: dict[Tier, tuple[str, ...]] = {
    Tier.DEVICE: ("",),
    Tier.HOST: ("", " ahead"),
    Tier.DISK: tuple(f" {turn}" for turn in range(RING)),
}
"""What the names of staging buffers end with, by the tier on which optimizer state rests: chunks use them in turns.

Of the disk one chunk is read and one written while a third one is updated."""


class Segment(NamedTuple):
    """A contiguous part of the weights, elements [start, start + numel). An `AdamPiece` without moments."""

    start: int
    weight: Tensor
    half: Tensor | None
    remainder: Tensor | None

    def join(self, flat: Tensor) -> None:
        """Copy the weights to their elements of `flat`, (optim_numel,), in full precision."""
        part = flat[self.start : self.start + self.weight.numel()]
        if self.remainder is None:
            part.copy_(self.weight)
        else:
            join_master_(part, self.weight, self.remainder)

    def write_back(self, flat: Tensor | None) -> None:
        """Copy the elements of `flat`, (optim_numel,), to the weights, if given, and round the 16-bit copy."""
        part = self.weight if flat is None else flat[self.start : self.start + self.weight.numel()]
        if flat is not None and self.remainder is not None:
            split_master_(self.weight, self.remainder, part)
        # `ShardView.load` hands out the weights themselves where it can. Then they were updated in place.
        elif self.weight.data_ptr() != part.data_ptr():
            self.weight.copy_(part)
        if self.half is not None:
            round_master_(self.half, part)

    def average(self, average: Tensor, flat: Tensor | None, share: float, start: int, end: int) -> None:
        """Average elements [start, end). average: (optim_numel,). flat: the weights, if they are there and not here."""
        first, last = max(start, self.start), min(end, self.start + self.weight.numel())
        if first >= last:
            return
        own = slice(first - self.start, last - self.start)
        if flat is not None:
            average_(average[first:last], flat[first:last], None, share)
        else:
            remainder = None if self.remainder is None else self.remainder[own]
            average_(average[first:last], self.weight[own], remainder, share)

    def exchange(self, average: Tensor) -> None:
        """Exchange the weights and their elements of `average`, (optim_numel,)."""
        exchange_(average[self.start : self.start + self.weight.numel()], self.weight, self.remainder)
        if self.half is not None:
            round_master_(self.half, self.weight)

    def piece(
        self, start: int, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, spans: Spans | None
    ) -> AdamPiece | None:
        """The intersection of this segment with a run from `start` on, whose gradient and moments are given.

        spans: the elements of the run that are updated. Returns None if they have no element in common.
        """
        first = max(self.start, start)
        end = min(self.start + self.weight.numel(), start + grad.numel())
        if first >= end:
            return None
        # The usual case needs no slices, which cost more than the kernel of a small chunk.
        if end - first == self.weight.numel() == grad.numel():
            return AdamPiece(self.weight, grad, exp_avg, exp_avg_sq, self.half, self.remainder, spans)
        own_part, piece_part = slice(first - self.start, end - self.start), slice(first - start, end - start)
        half = None if self.half is None else self.half[own_part]
        remainder = None if self.remainder is None else self.remainder[own_part]
        spans = None if spans is None else spans.within(piece_part.start, piece_part.stop)
        return AdamPiece(
            self.weight[own_part], grad[piece_part], exp_avg[piece_part], exp_avg_sq[piece_part], half, remainder, spans
        )


class ShardView:
    """One chunk's weights on the tier of its update: as segments (our Adam), or as one flat tensor (`load`)."""

    def __init__(
        self,
        chunk: Chunk,
        homes: Mapping[Kind, Region],
        states: Mapping[str, Region],
        transfer: Transfer,
        staging: Staging,
        tier: Tier,
        turn: str,
        writes: bool = True,
    ) -> None:
        """homes: of weights and master. states: the flat states that rest on another tier than `tier`, by name.

        turn: which of the buffers of each name it stages to, see `TURNS`. writes: the weights change.
        """
        self._writes = writes
        self._chunk = chunk
        self._turn = turn
        self._transfer = transfer
        self._staging = staging
        self._tier = tier
        self._home = homes[Kind.PARAM]
        self._master = homes.get(Kind.MASTER)
        self._splits = self._master is not None and chunk.splits_master
        self._staged: list[tuple[Region, Region]] = []  # (home or a part of it, its staged copy on the tier)
        self._on_its_tier: tuple[list[tuple[int, Region]], list[tuple[int, Region]]] | None = None  # master, home
        self._segments: list[Segment] | None = None
        self._whole_master: Tensor | None = None  # on the tier, once there are segments; None if the master is split
        self._flat: Tensor | None = None
        self.is_staged = False  # some of its memory is a staging buffer
        self._states: list[tuple[Region, Region]] = []  # (flat state at rest, its staged copy on the tier)
        self.staged_states: dict[str, Tensor] = {}
        """The staged states by name, as they are stored, valid once there are segments."""
        for name, region in states.items():
            staged = self._stage(name, region.dtype, region.numel)
            self._states.append((region, staged))
            self.staged_states[name] = staged.flat

    def stage(self) -> tuple[list[tuple[int, Region]], list[tuple[int, Region]]]:
        """Start the copies of what rests on the other tier. Return (first element, region) of master and home."""
        if self._on_its_tier is None:
            # A whole master replaces the parameters, so their old values need no copy to the tier. If the update passes
            # over some elements, `close` rounds those from the master, too.
            master = self._master
            on_tier = [] if master is None else self._on_tier("master", [(0, master)])
            slices = self._chunk.home_slices
            parts = [(piece.shard_start, self._home[piece.in_payload]) for piece in slices]
            homes = self._on_tier("home", parts, reads=master is None or self._splits)
            self._on_its_tier = on_tier, homes
            if self._states:
                self._transfer.copy_together([(staged, region) for region, staged in self._states])
        return self._on_its_tier

    def segments(self, gradient: Region | None = None) -> list[Segment]:
        """The weights on the tier, with their remainders or 16-bit copies, in the order of elements.

        gradient: what the first call waits for, too.
        """
        if self._segments is None:
            on_tier, homes = self._on_its_tier or self.stage()
            its = [region for _, region in (*on_tier, *homes, *self._states)]
            wait_on_tier(*its if gradient is None else (gradient, *its))
            whole = on_tier[0][1].flat if on_tier else None
            self._whole_master = None if self._splits else whole
            self._segments = [self._segment(start, home.flat, whole) for start, home in homes]
        return self._segments

    def _segment(self, start: int, home: Tensor, master: Tensor | None) -> Segment:
        # There are three layouts: weights that are their own master, a split master, and a whole one with a 16-bit
        # copy.
        if master is None:
            return Segment(start, home, None, None)
        part = master[start : start + home.numel()]
        return Segment(start, home, None, part) if self._splits else Segment(start, part, home, None)

    def load(self) -> Tensor:
        """The weights in fp32 or fp64, (optim_numel,): in place, or a copy that `close` writes back."""
        if self._flat is None:
            # In place if the weights are one tensor in full precision: a whole master, or one unsplit segment.
            segments = self.segments()
            if self._whole_master is not None:
                self._flat = self._whole_master
            elif not _are_joined(self._chunk):
                self._flat = segments[0].weight
            else:
                # A torch optimizer takes one tensor: join what lies in several, or in the two halves of a split master.
                weights = self._stage("weights", _whole_dtype(self._chunk))
                wait_on_tier(weights)
                self._flat = weights.flat
                for segment in segments:
                    segment.join(self._flat)
        return self._flat

    def average(self, average: Tensor, share: float, parts: Sequence[tuple[int, int]] | None = None) -> None:
        """Move `average`, (optim_numel,) on the tier, by `share` of the way to the weights.

        parts: (first element, number) of those that are moved. None: all.
        """
        for start, numel in [(0, self._chunk.optim_numel)] if parts is None else parts:
            for segment in self.segments():
                segment.average(average, self._flat, share, start, start + numel)

    def exchange(self, average: Tensor) -> None:
        """Exchange weights and averages, (optim_numel,) on the tier."""
        for segment in self.segments():
            segment.exchange(average)

    def close(self, complete: bool) -> None:
        """Bring updated weights back to the homes. complete: all elements were updated."""
        # After a complete update by our kernels the 16-bit copy is up to date. Otherwise round it here.
        # In a lent home the copy of elements that the update passed over still holds their gradient.
        if self._writes and (self._flat is not None or not complete):
            for segment in self.segments():
                segment.write_back(self._flat)
        # These copies come after `write_back`, which writes to staged memory where there is some.
        for home, staged in self._staged:
            self._transfer.copy(home, staged)
        if self._states:
            self._transfer.copy_together(self._states)
        # The host does not wait here: a reader of a home on the host waits for the home's tickets. Kernels and
        # collectives that use device memory next are ordered behind the copies.
        regions = [self._home, self._master, *[staged for _, staged in self._staged]]
        wait_on_stream(*[region for region in regions if region is not None and region.tier is Tier.DEVICE])

    def _on_tier(self, name: str, parts: list[tuple[int, Region]], reads: bool = True) -> list[tuple[int, Region]]:
        """Return (first element, region on the update's tier) of each part of a home. reads: old values are needed."""
        (_, first), *_ = parts
        # All parts are of one home, so they rest on one tier.
        if first.tier is self._tier:
            return parts
        staged = self._stage(name, first.dtype)
        # Staged parts lie at their offsets in the optimizer's flat tensors, which differ from those in a whole home.
        on_tier = [(start, staged[start : start + part.numel]) for start, part in parts]
        for (_, home), (_, region) in zip(parts, on_tier, strict=True):
            if self._writes:
                self._staged.append((home, region))
            if reads:
                self._transfer.copy(region, home)
        return on_tier

    def _stage(self, name: str, dtype: torch.dtype, numel: int | None = None) -> Region:
        self.is_staged = True
        numel = self._chunk.optim_numel if numel is None else numel
        return self._staging.buffer(self._tier, name + self._turn, numel, dtype)


def staged_bytes(chunk: Chunk, tier: Tier, loads: bool) -> dict[str, int]:
    """Bytes that a `ShardView` on `tier` stages, by name. loads: `load` will be called."""
    home, master, numel = chunk.homes[Kind.PARAM], chunk.homes.get(Kind.MASTER), chunk.optim_numel
    found = {}
    if master is not None and master.tier is not tier:
        found["master"] = numel * master.dtype.itemsize
    if home.tier is not tier:
        found["home"] = numel * home.dtype.itemsize
    if loads and _are_joined(chunk):
        found["weights"] = numel * _whole_dtype(chunk).itemsize
    return found


def _are_joined(chunk: Chunk) -> bool:
    """Whether the weights that this rank updates lie in no single tensor of fp32 or fp64."""
    # Weights that every rank holds whole, and updates a part of, have a slice of each unit of the chunk's layout.
    return chunk.splits_master or (Kind.MASTER not in chunk.homes and len(chunk.home_slices) > 1)


def _whole_dtype(chunk: Chunk) -> torch.dtype:
    return torch.float64 if chunk.dtype is torch.float64 else torch.float32


# -- Runs: the elements of a chunk that one update works on, what the update gets for them, and what it tells of them.


@dataclass(frozen=True)
class Run:
    """Elements [start, start + numel) of the optimizer's flat tensors, and the positions of their parameters.

    A run without elements stands for parameters that are entirely in other ranks' shards. Every rank counts their steps
    too, so that all ranks have the same scalars.
    """

    start: int
    numel: int
    positions: tuple[int, ...]
    group: int
    spans: Spans | None = None  # the elements of the run that are updated; None: all


class Made(NamedTuple):
    """What an optimizer of whole tensors has made of one parameter: this rank's parts, see whole_tensor.py."""

    pieces: Sequence[Piece]  # the parameter's, in the optimizer's flat tensors
    weight: Tensor  # 1-D, of all pieces
    flats: dict[str, Tensor]  # likewise, by name; without elements on a rank that has none
    scalars: dict[str, Any]  # all other states


class StoredStates(NamedTuple):
    """The states of a chunk whose tensors have several formats, on the tier of the update."""

    layouts: Mapping[str, StateLayout]  # by name
    flats: Mapping[str, Tensor]  # (num_bytes,) each, as in `ChunkOptimizerState.flats`

    def pieces(self, segment: Segment, run: Run, grad: Tensor, step: int) -> Iterator[AdamPiece]:
        """The intersection of a segment with the run, of which `grad` is the gradient: a piece for each format.

        step: the number of the update.
        """
        # Both moments of a tensor have one format. The memory of the first may also hold states of other optimizers.
        for second in self.layouts["exp_avg_sq"].stored(self.flats["exp_avg_sq"], run.start, run.numel):
            its = second.start, second.elements.numel()
            first = self.layouts["exp_avg"].part_of(self.flats["exp_avg"], *its)
            assert first is not None
            part = slice(first.start - run.start, first.start - run.start + first.elements.numel())
            spans = None if run.spans is None else run.spans.within(part.start, part.stop)
            piece = segment.piece(first.start, grad[part], first.elements, second.elements, spans)
            if piece is None:
                continue
            before = max(segment.start, first.start) - first.start
            if first.scales is not None and second.scales is not None:
                # Segments begin and end between blocks, as shards do.
                begin = before // ALIGNMENT
                blocks = slice(begin, begin + -(-piece.weight.numel() // ALIGNMENT))
                piece = piece._replace(exp_avg_scale=first.scales[blocks], exp_avg_sq_scale=second.scales[blocks])
            if first.format.seed is not None:
                piece = piece._replace(draws=first.format.draws(step, first.place + before))
            yield piece


@dataclass
class RunUpdate:
    """The inputs and results of one run's update."""

    run: Run
    weights: ShardView | None  # those of the whole chunk; None for a run without elements
    grad: Tensor  # (numel,), once it is on the tier; before that without elements
    flat: dict[str, Tensor]  # (numel,) each: views into the chunk's state
    scalars: dict[str, Any]  # shared by all elements; the update replaces them
    is_new: bool  # these elements have not been updated before
    constants: AdamScalars | None = None  # of our Adam's update, once it has begun
    room: dict[str, Tensor] = field(default_factory=dict)  # (numel,) each: of states that the update may create
    made: dict[str, Tensor] = field(default_factory=dict)  # (numel,) each: states that the update created
    whole: Made | None = None  # of a parameter that was updated whole: what the update writes
    stored: StoredStates | None = None  # in place of `flat`, of states whose elements have several formats

    def count_step(self) -> int:
        """Count this update among the elements' steps. Returns their number."""
        step = self.scalars["step"] = int(self.scalars.get("step", 0)) + 1
        return step

    def note_scalars(self, scalars: dict[str, Any]) -> None:
        """The update is done, and has left these scalars."""
        self.scalars.update(scalars)

    def create(self, name: str, state: Tensor) -> Tensor:
        """Have a state that the update creates, (numel,). Returns that which the first tile of the run created."""
        return self.made.setdefault(name, state)


class GradientFactors(NamedTuple):
    """The factors that every gradient is multiplied by before the update, in this order."""

    inv_scale: float = 1.0
    clip: float = 1.0

    def applied(self, grad: Tensor) -> Tensor:
        """`grad`, in the dtype of the update, times the factors."""
        for factor in self:
            if factor != 1.0:
                # Multiplied as a number: a tensor of it on a GPU takes a copy for which the host waits. It is rounded
                # before, so that the product has the bits of a product of two tensors.
                grad = grad * torch.tensor(factor, dtype=grad.dtype, device="cpu").item()
        return grad


class EntryNames(NamedTuple):
    """The keys of a parameter's entry in an optimizer state dict."""

    needed: tuple[str, ...]  # without one of these an update would fail, or continue from zeros
    flat: tuple[str, ...]  # per-element states: tensors of the parameter's shape
    known: tuple[str, ...] | None  # any other key is of another optimizer; None: this optimizer's keys are not known
    has_other_shapes: bool = False  # states that are not per element may be tensors of any shape

    def with_flat(self, name: str) -> EntryNames:
        """These, with one more per-element state, which an entry may lack."""
        return self._replace(flat=(*self.flat, name), known=None if self.known is None else (*self.known, name))


def spans_of(chunk: Chunk, positions: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (first element, number of elements, positions) of contiguous runs in the optimizer shard, in order.

    Parameters that follow each other in the chunk are one run, with the padding between them.
    """
    found: list[tuple[int, int, tuple[int, ...]]] = []
    last = -2
    for position in positions:
        for piece in chunk.parameters[position].pieces:
            start, end = piece.shard_start, piece.shard_start + piece.numel
            # Only neighbours are joined: between others lie elements of parameters that this update must not change.
            if found and last in (position - 1, position) and start >= found[-1][0] + found[-1][1]:
                first, _, its = found[-1]
                found[-1] = first, end - first, (*its, position) if position not in its[-1:] else its
            else:
                found.append((start, piece.numel, (position,)))
            last = position
    return sorted(found)


def runs_of(chunk: Chunk, positions: Sequence[int], group: int, in_one: bool) -> list[Run]:
    """The runs of the parameters at `positions`. in_one: one run with spans, else one for each contiguous piece."""
    spans = spans_of(chunk, positions)
    # Without spans all of these parameters are in other ranks' shards. The run without elements below counts their
    # steps.
    if in_one and spans:
        first, last = spans[0], spans[-1]
        start, end = first[0], last[0] + last[1]
        # Spans are counted from the start of the run, because the update gets tensors that begin there.
        inside = None if len(spans) == 1 else Spans((each - start, numel) for each, numel, _ in spans)
        return [Run(start, end - start, tuple(positions), group, inside)]
    # Parameters without elements in this rank's shard share one run without elements.
    here = {position for *_, its in spans for position in its}  # membership only
    elsewhere = tuple(position for position in positions if position not in here)
    runs = [Run(start, numel, its, group) for start, numel, its in spans]
    return [*runs, Run(0, 0, elsewhere, group)] if elsewhere else runs
