"""The operands of one Adam update: the flat tensors of one run of elements, in one of two master layouts.

*Whole*: `weight` is the fp32 master, and `half`, if given, its bf16 or fp16 copy, written in the same pass.
*Split*: `weight` is bf16, the upper half of the master, and `remainder` is its lower half, int16 (see `optim.split`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from optim.spans import Spans

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HALF_DTYPES = (torch.bfloat16, torch.float16)


class AdamPiece(NamedTuple):
    """The tensors of one update: all (numel,), contiguous, on one device, without overlap.

    One exception: `half` and a 16-bit `grad` may share their memory. Each gradient is then overwritten by its weight.
    """

    weight: Tensor
    """fp32 master, or bf16 if there is a remainder; updated."""
    grad: Tensor
    """fp32, bf16 or fp16; only read."""
    exp_avg: Tensor
    """fp32; updated."""
    exp_avg_sq: Tensor
    """fp32; updated."""
    half: Tensor | None = None
    """bf16 or fp16 copy of an fp32 `weight`; written."""
    remainder: Tensor | None = None
    """int16, beside a bf16 `weight`; updated."""
    spans: Spans | None = None
    """The elements that are updated; None: all of them."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that are given, by name."""
        return {name: value for name, value in zip(self._fields, self, strict=True) if isinstance(value, Tensor)}

    def parts(self) -> list[AdamPiece]:
        """The piece itself, or one for each of its spans."""
        if self.spans is None:
            return [self]
        # Without its spans, which `narrow` would otherwise cut to each part.
        return [self._replace(spans=None).narrow(start, numel) for start, numel in self.spans]

    @property
    def is_split(self) -> bool:
        """Whether the master is `weight` and `remainder` together."""
        return self.remainder is not None

    @property
    def layout(self) -> str:
        """The layout of the master: "whole", "whole, bf16" or "whole, fp16" with a 16-bit copy, or "split"."""
        if self.half is None:
            return "split" if self.is_split else "whole"
        return "whole, bf16" if self.half.dtype == torch.bfloat16 else "whole, fp16"

    def narrow(self, start: int, length: int) -> AdamPiece:
        """Elements [start, start + length), as views."""
        parts = {name: tensor.detach().narrow(0, start, length) for name, tensor in self.tensors.items()}
        spans = None if self.spans is None else self.spans.within(start, start + length)
        return AdamPiece(**{**self._asdict(), **parts, "spans": spans})

    def check(self) -> None:
        """Raises ValueError for a wrong shape, layout, dtype or device, and for tensors that share memory."""
        if self.half is not None and self.remainder is not None:
            raise ValueError("half and remainder exclude each other: a split master's bf16 half is its weight")
        fp32 = (torch.float32,)
        weight = (torch.bfloat16,) if self.is_split else fp32
        allowed = {"weight": weight, "grad": GRAD_DTYPES, "half": HALF_DTYPES, "remainder": (torch.int16,)}
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor, self.weight, allowed.get(name, fp32))
        self._check_overlap()
        if self.spans is not None and self.spans.end > self.weight.numel():
            raise ValueError(f"spans end at {self.spans.end}, weight has {self.weight.numel()} elements")

    def _check_overlap(self) -> None:
        # Kernels read element i of the gradient before they write element i of the copy. So the same address and width
        # are safe, and a shifted overlap is not. `reuse_fp16_shard` lends a home to its gradient this way.
        shared = self.half is not None and self.grad.itemsize == 2 and self.half.data_ptr() == self.grad.data_ptr()
        named = [(n, t) for n, t in self.tensors.items() if not (shared and n == "half")]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in named if t.numel())
        # In the order of addresses it is enough to compare neighbours.
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(f"{name} and {other} share memory: an update would read what it has written")


def _check_tensor(name: str, tensor: Tensor, weight: Tensor, allowed: Sequence[torch.dtype]) -> None:
    if tensor.layout != torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, found {tensor.layout} of shape {tuple(tensor.shape)}")
    if tensor.numel() != weight.numel() or tensor.device != weight.device:
        raise ValueError(
            f"{name} must match weight ({weight.numel()} elements on {weight.device}), "
            f"found {tensor.numel()} elements on {tensor.device}"
        )
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, found {tensor.dtype}")
