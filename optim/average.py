"""The exponential moving average of fp32 weights, in place: one pass over weights and averages."""

from __future__ import annotations

import torch
from torch import Tensor

from optim.master import join_master_, scratch, split_master_, tiles


def average_(average: Tensor, weight: Tensor, remainder: Tensor | None, share: float) -> None:
    """Move `average` by `share` of the way to the weights: `average += share * (weight - average)`.

    It has the bits of `torch.Tensor.lerp_`, which `torch.optim.swa_utils.get_ema_multi_avg_fn` uses; with a share of 1
    those of the weights.

    average: (numel,) fp32, or fp64 beside fp64 weights; updated. weight: (numel,) of the average's dtype, or bf16, the
    upper halves of masters whose lower ones are `remainder`, (numel,) int16.
    """
    with torch.no_grad():
        if remainder is None:
            _move(average, weight, share)
            return
        for its, hi, lo in tiles(average, weight, remainder):
            master = scratch("averaged master", its.numel(), torch.float32, its.device)
            join_master_(master, hi, lo)
            _move(its, master, share)


def _move(average: Tensor, weight: Tensor, share: float) -> None:
    if share == 1.0:
        average.copy_(weight)
    else:
        average.lerp_(weight, share)


def exchange_(average: Tensor, weight: Tensor, remainder: Tensor | None) -> None:
    """Exchange the contents of averages and weights, which are as for `average_`. Doing it twice changes no bit."""
    with torch.no_grad():
        lows = weight if remainder is None else remainder
        for its, hi, lo in tiles(average, weight, lows):
            kept = scratch("exchanged average", its.numel(), its.dtype, its.device)
            kept.copy_(its)
            if remainder is None:
                its.copy_(hi)
                hi.copy_(kept)
            else:
                join_master_(its, hi, lo)
                split_master_(hi, lo, kept)
