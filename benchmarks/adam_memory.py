"""The tensors of one Adam update in every layout, shared by all that is measured: the same pages for all.

Bytes a parameter that cross the memory bus, counted from the tensors: a tensor that is read and written counts twice,
one that is only written once (what the cache fetches before overwriting it is not counted).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.streams import GRANULE, Mode, Stream
from optim.piece import BLOCK, AdamPiece
from optim.reference import quantize_

LAYOUTS = ("split", "whole", "whole + half")
GRADS = {"bf16": torch.bfloat16, "fp32": torch.float32}
CACHES = 4
"""How many times the last-level caches the tensors of one case must be."""


class Work(NamedTuple):
    """What is updated: one layout with one dtype of gradients."""

    layout: str
    grad: str
    moments: str = "fp32"

    def __str__(self) -> str:
        its = "" if self.moments == "fp32" else f", moments of {self.moments}"
        return f"{self.layout}, {self.grad} gradient{its}"


SMALL_WORK = tuple(Work("split", "bf16", moments) for moments in ("bf16", "8bit"))
ALL_WORK = (*(Work(layout, grad) for layout in LAYOUTS for grad in GRADS), *SMALL_WORK)
LEAST_BYTES = 26
"""A parameter, of the leanest work with moments of fp32: decides how many parameters outgrow the caches."""
PART_NUMEL = 2**22


def numel_beyond_caches(cache_bytes: int) -> int:
    """Parameters whose leanest update touches CACHES times the caches; at least 20 M."""
    return _granular(max(20_000_000, CACHES * cache_bytes // LEAST_BYTES))


def _granular(numel: int) -> int:
    return -(-numel // GRANULE) * GRANULE


@dataclass
class Memory:
    """38 bytes a parameter, and one buffer for the norm; all pages are there."""

    numel: int
    weight: Tensor  # (numel,) fp32
    half: Tensor  # (numel,) bf16
    upper: Tensor  # (numel,) bf16, the weight of a split master
    remainder: Tensor  # (numel,) int16
    exp_avg: Tensor  # (numel,) fp32
    exp_avg_sq: Tensor  # (numel,) fp32
    small: dict[str, tuple[Tensor, ...]]  # moments of 16 and 8 bits, the latter with scales
    grads: dict[str, Tensor]  # (numel,) each
    temporaries: tuple[Tensor, Tensor]  # (numel,) fp32 each: what torch's ways cast weights and gradients to
    gradient_for_norm: Tensor  # bf16; its pairs are read as fp32 too

    @classmethod
    def allocate(cls, numel: int, norm_bytes: int) -> Memory:
        """Values as in training; written once, so that no page is the kernel's shared zero page."""
        numel = _granular(numel)
        generator = torch.Generator().manual_seed(0)

        def normal(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(count, dtype=dtype).normal_(generator=generator)

        grad = normal(numel)
        exp_avg, exp_avg_sq = grad * 0.1, grad.square() * 0.001
        codes = [torch.empty(numel, dtype=torch.uint8) for _ in range(2)]
        scales = [torch.empty(-(-numel // BLOCK)) for _ in range(2)]
        for values, its, theirs, is_signed in zip((exp_avg, exp_avg_sq), codes, scales, (True, False), strict=True):
            for start in range(0, numel, PART_NUMEL):
                part, blocks = slice(start, start + PART_NUMEL), slice(start // BLOCK, (start + PART_NUMEL) // BLOCK)
                quantize_(its[part], theirs[blocks], values[part], is_signed)
        return cls(
            numel=numel,
            weight=normal(numel),
            half=torch.empty(numel, dtype=torch.bfloat16).fill_(1.0),
            upper=normal(numel, torch.bfloat16),
            remainder=torch.empty(numel, dtype=torch.int16).fill_(1),
            exp_avg=exp_avg,
            exp_avg_sq=exp_avg_sq,
            small={"bf16": (exp_avg.bfloat16(), exp_avg_sq.bfloat16()), "8bit": (*codes, *scales)},
            grads={"fp32": grad, "bf16": grad.bfloat16()},
            temporaries=(normal(numel), normal(numel)),
            gradient_for_norm=normal(_granular(norm_bytes // 2), torch.bfloat16),
        )

    def piece(self, work: Work) -> AdamPiece:
        """One piece over everything."""
        first, second, *scales = self.small.get(work.moments, (self.exp_avg, self.exp_avg_sq))
        common = (self.grads[work.grad], first, second)
        if work.layout == "split":
            return AdamPiece(self.upper, *common, None, self.remainder, None, *scales)
        return AdamPiece(self.weight, *common, half=self.half if work.layout == "whole + half" else None)

    def streams(self, work: Work) -> list[Stream]:
        """The tensors of that piece and what an update does with each."""
        modes = {"grad": Mode.READ, "half": Mode.WRITE}
        piece = self.piece(work)
        return [
            Stream(tensor, modes.get(name, Mode.READ_WRITE))
            for name, tensor in piece.tensors.items()  # without scales, of which there is one for 256 elements
        ]

    def traffic_bytes(self, work: Work) -> int:
        return sum(stream.traffic_bytes for stream in self.streams(work))

    def norm_input(self, dtype: str) -> Tensor:
        """All of the buffer; a pair of bf16 numbers is an fp32 number of the upper one's size."""
        return self.gradient_for_norm.view(GRADS[dtype])
