"""The sum over ranks in the order of ranks: its bits depend neither on the layout nor on the backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Scratch = Callable[[int, torch.dtype], Tensor]
"""(numel, dtype) -> a flat tensor of that many elements, on the payload's device, with undefined content."""

SUM_TILE_NUMEL = 1 << 18
"""Elements that are added at a time. The buffer stays small; fewer are slower, more are not faster."""


def sum_rows(rows: Tensor, out: Tensor, divisor: int, scratch: Scratch) -> None:
    """Set out = (rows[0] + rows[1] + ...) / divisor, added in this order. Elementwise, so tiles change no bit."""
    half = rows.dtype in (torch.bfloat16, torch.float16)
    dtype = torch.float32 if half else rows.dtype
    numel = out.numel()
    tile_numel = min(numel, SUM_TILE_NUMEL)
    # If `out` has the sum's dtype it is the accumulator itself. A narrower one would round after each rank's addition.
    tile = None if out.dtype == dtype else scratch(tile_numel, dtype)
    # A tensor on the rows' device: CUDA would multiply by the reciprocal of a Python number, which rounds twice.
    number = torch.full((), divisor, dtype=dtype, device=rows.device)
    for start in range(0, numel, SUM_TILE_NUMEL):
        target = out[start : start + tile_numel]
        total = target if tile is None else tile[: target.numel()]
        first, *others = (row[start : start + tile_numel] for row in rows)
        # Add the first two rows in one pass where no cast is needed.
        # torch adds two 16-bit tensors in 16 bits even into an fp32 `out`. A widened first row makes every addition one
        # in fp32.
        if half or not others:
            total.copy_(first)
        else:
            torch.add(first, others.pop(0), out=total)
        for other in others:
            total.add_(other)
        if divisor != 1:
            total.div_(number)
        if tile is not None:
            target.copy_(total)
