"""The weights that this rank steps, on the tier where its update runs.

They lie in the parameter home (fp32 weights are their own master), in a whole fp32 master beside it, or in both (a
split master). What is on the update's tier is used where it is; the rest is staged there, and `close` brings it
back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.executor.fetcher import Fetcher
from gemini.memory.tier import copy
from gemini.placement.demand import Kind, Tier
from optim import AdamPiece, Spans, join_master_, round_master_, split_master_


class Staging:
    """Host buffers that are reused from chunk to chunk and step to step."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of `dtype` on the host, content irrelevant, valid until the next `take` of this name."""
        num_bytes = numel * dtype.itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[name] = torch.empty(num_bytes, dtype=torch.uint8)
        return buffer[:num_bytes].view(dtype)


class Segment(NamedTuple):
    """A part of the weights, elements [start, start + numel), that lies in one run; an `AdamPiece` without moments."""

    start: int
    weight: Tensor
    half: Tensor | None
    remainder: Tensor | None

    def join(self, flat: Tensor) -> None:
        """Its elements of `flat` (optim_numel,) <- the weights."""
        part = flat[self.start : self.start + self.weight.numel()]
        if self.remainder is None:
            part.copy_(self.weight)
        else:
            join_master_(part, self.weight, self.remainder)

    def settle(self, flat: Tensor | None) -> None:
        """The weights <- their elements of `flat` (optim_numel,), if given; the half-precision copy follows them."""
        part = self.weight if flat is None else flat[self.start : self.start + self.weight.numel()]
        if flat is not None and self.remainder is not None:
            split_master_(self.weight, self.remainder, part)
        elif self.weight.data_ptr() != part.data_ptr():
            self.weight.copy_(part)
        if self.half is not None:
            round_master_(self.half, part)

    def piece(
        self, start: int, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, spans: Spans | None
    ) -> AdamPiece | None:
        """What it has in common with a run of elements from `start` on, whose gradient and moments are given.

        spans: of the run, the elements that are updated.
        """
        first = max(self.start, start)
        end = min(self.start + self.weight.numel(), start + grad.numel())
        if first >= end:
            return None
        mine, its = slice(first - self.start, end - self.start), slice(first - start, end - start)
        half = None if self.half is None else self.half[mine]
        remainder = None if self.remainder is None else self.remainder[mine]
        spans = None if spans is None else spans.within(its.start, its.stop)
        return AdamPiece(self.weight[mine], grad[its], exp_avg[its], exp_avg_sq[its], half, remainder, spans)


class ShardView:
    """One chunk's steppable weights on the tier where its update runs: in segments, or as one flat tensor."""

    def __init__(self, chunk: Chunk, fetcher: Fetcher, staging: Staging, tier: Tier) -> None:
        self._chunk = chunk
        self._fetcher = fetcher
        self._staging = staging
        self._tier = tier
        self._home = chunk.homes[Kind.PARAM]
        self._master = chunk.homes.get(Kind.MASTER)
        self._splits = self._master is not None and chunk.splits_master
        self._staged_home: Tensor | None = None
        self._staged_master: Tensor | None = None
        self._segments: list[Segment] | None = None
        self._flat: Tensor | None = None
        self.is_staged = False  # it has memory that is not the homes'
        self._crosses = False  # something is copied to the update's tier, or back from there

    def segments(self) -> list[Segment]:
        """The weights where they lie, with what belongs to them, in the order of their elements."""
        if self._segments is None:
            master = None if self._master is None else self._master_on_tier()
            homes = self._homes_on_tier(reads=master is None or self._splits)
            if self.is_staged and self._tier is Tier.HOST:  # copies fill buffers, or read them still
                self._fetcher.device.synchronize()
            self._segments = [self._segment(start, home, master) for start, home in homes]
        return self._segments

    def _segment(self, start: int, home: Tensor, master: Tensor | None) -> Segment:
        if master is None:
            return Segment(start, home, None, None)
        part = master[start : start + home.numel()]
        return Segment(start, home, None, part) if self._splits else Segment(start, part, home, None)

    def load(self) -> Tensor:
        """(optim_numel,) the weights in fp32 or fp64: where they lie, or a copy that `close` brings back."""
        if self._flat is None:
            segments = self.segments()
            if self._master is not None and not self._splits:
                self._flat = self._master_on_tier()
            elif len(segments) == 1 and not self._splits:
                self._flat = segments[0].weight
            else:
                dtype = torch.float64 if self._chunk.dtype is torch.float64 else torch.float32
                self._flat = self._stage("weights", dtype)
                for segment in segments:
                    segment.join(self._flat)
        return self._flat

    def close(self, complete: bool) -> None:
        """Bring stepped weights back to the homes. complete: all elements were updated."""
        if self._flat is not None or not complete:
            for segment in self.segments():
                segment.settle(self._flat)
        if self._staged_home is not None:
            for start, target in self._home_parts():
                self._copy(target, self._staged_home[start : start + target.numel()], self._home.tier)
        if self._staged_master is not None and self._master is not None:
            self._copy(self._master.flat, self._staged_master, self._master.tier)
        if self._crosses and self._tier is Tier.DEVICE:
            self._fetcher.device.synchronize()  # what is at home on the host is read there next

    def _home_parts(self) -> list[tuple[int, Tensor]]:
        """(first element, its part of the parameter home)."""
        flat = self._home.flat
        slices = self._chunk.home_slices()
        return [(p.shard_start, flat[p.in_payload]) for p in slices]

    def _homes_on_tier(self, reads: bool) -> list[tuple[int, Tensor]]:
        """`_home_parts` on the update's tier. reads: the old values are needed."""
        parts = self._home_parts()
        if self._home.tier is self._tier:
            return parts
        staged = self._staged_home = self._stage("home", self._chunk.dtype)
        on_tier = [(start, staged[start : start + part.numel()]) for start, part in parts]
        if reads:
            for (_, target), (_, source) in zip(on_tier, parts, strict=True):
                self._copy(target, source, self._tier, self._home.tier)
        return on_tier

    def _master_on_tier(self) -> Tensor:
        master = self._master
        assert master is not None
        if master.tier is self._tier:
            return master.flat
        if self._staged_master is None:
            self._staged_master = self._stage("master", master.flat.dtype)
            self._copy(self._staged_master, master.flat, self._tier, master.tier)
        return self._staged_master

    def _stage(self, name: str, dtype: torch.dtype) -> Tensor:
        numel, self.is_staged = self._chunk.optim_numel, True
        if self._tier is Tier.DEVICE:
            return torch.empty(numel, dtype=dtype, device=self._fetcher.device.device)
        return self._staging.take(name, numel, dtype)

    def _copy(self, target: Tensor, source: Tensor, to: Tier, of: Tier | None = None) -> None:
        self._crosses = True
        fetcher = self._fetcher
        copy(target, source, fetcher.tier(to), fetcher.tier(of or self._tier), fetcher.traffic)
