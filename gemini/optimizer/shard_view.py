"""The weights that this rank updates, on the tier where the update runs.

They are in the parameter home (fp32 weights are their own master), in a whole fp32 master beside it, or in both (a
split master). Memory on the update's tier is used in place. Other memory is copied to a staging buffer on that tier,
and `close` copies it back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.manager.params import ParamStore
from gemini.memory.region import Region
from gemini.memory.transfer import wait_on_stream, wait_on_tier
from gemini.optimizer.staging import Staging
from gemini.placement.demand import Kind, Tier
from optim import AdamPiece, Spans, join_master_, round_master_, split_master_


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

    def __init__(self, chunk: Chunk, params: ParamStore, staging: Staging, tier: Tier) -> None:
        self._chunk = chunk
        self._transfer = params.memory.transfer
        self._staging = staging
        self._tier = tier
        self._home = chunk.homes[Kind.PARAM]
        self._master = chunk.homes.get(Kind.MASTER)
        self._splits = self._master is not None and chunk.splits_master
        self._staged: list[tuple[Region, Region]] = []  # (home or a part of it, its staged copy on the tier)
        self._segments: list[Segment] | None = None
        self._whole_master: Tensor | None = None  # on the tier, once there are segments; None if the master is split
        self._flat: Tensor | None = None
        self.is_staged = False  # some of its memory is a staging buffer

    def segments(self) -> list[Segment]:
        """The weights on the tier, with their remainders or 16-bit copies, in the order of elements."""
        if self._segments is None:
            # A whole master replaces the parameters, so their old values need no copy to the tier. If the update passes
            # over some elements, `close` rounds those from the master, too.
            master = self._master
            on_tier = [] if master is None else self._on_tier("master", [(0, master)])
            slices = self._chunk.home_slices()
            parts = [(piece.shard_start, self._home[piece.in_payload]) for piece in slices]
            homes = self._on_tier("home", parts, reads=master is None or self._splits)
            wait_on_tier(*(region for _, region in (*on_tier, *homes)))
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

    def close(self, complete: bool) -> None:
        """Bring updated weights back to the homes. complete: all elements were updated."""
        # After a complete update by our kernels the 16-bit copy is up to date. Otherwise round it here.
        # In a lent home the copy of elements that the update passed over still holds their gradient.
        if self._flat is not None or not complete:
            for segment in self.segments():
                segment.write_back(self._flat)
        # These copies come after `write_back`, which writes to staged memory where there is some.
        for home, staged in self._staged:
            self._transfer.copy(home, staged)
        # The host does not wait here: a reader of a home on the host waits for the home's tickets. Kernels and
        # collectives that use device memory next are ordered behind the copies.
        regions = (self._home, self._master, *(staged for _, staged in self._staged))
        wait_on_stream(*(region for region in regions if region is not None and region.tier is Tier.DEVICE))

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
            self._staged.append((home, region))
            if reads:
                self._transfer.copy(region, home)
        return on_tier

    def _stage(self, name: str, dtype: torch.dtype) -> Region:
        self.is_staged = True
        return self._staging.buffer(self._tier, name, self._chunk.optim_numel, dtype)


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
    return chunk.splits_master or (Kind.MASTER not in chunk.homes and len(chunk.home_slices()) > 1)


def _whole_dtype(chunk: Chunk) -> torch.dtype:
    return torch.float64 if chunk.dtype is torch.float64 else torch.float32
