"""A master in two halves: `bits = (weight << 16) + remainder`, exact for every fp32 value but NaN payloads.

`weight` is the master rounded half up on the bit pattern (see `optim.rounding`), so it is the bf16 parameter itself,
and the master costs only an int16 beside it. A NaN master becomes the NaN 0x7fc0 with remainder 0. No master splits
into a zero weight and a negative remainder. If that is found, the weight was set to zero since the last split, and the
remainder is ignored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from optim.rounding import to_bfloat16_half_up
from optim.scratch import scratch, tiles


def split_master_(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Split `master` (fp32) into `weight` (bf16) and `remainder` (int16): 1-D, contiguous, of one length and device."""
    _check(weight, remainder, master)
    with torch.no_grad():
        for values, hi, lo in tiles(master, weight, remainder):
            its_bits = scratch("split bits", values.numel(), torch.int32, values.device)
            to_bfloat16_half_up(values, out=hi)
            its_bits.copy_(hi.view(torch.int16))
            # The copy from int16 has extended the sign, which the shift pushes out.
            its_bits.bitwise_left_shift_(16)
            torch.sub(values.view(torch.int32), its_bits, out=its_bits)
            lo.copy_(its_bits)
            # As in `optim.rounding`: on the CPU one sum tells whether there can be a NaN.
            if values.device.type != "cpu" or values.sum().isnan().item():
                lo.masked_fill_(values.isnan(), 0)


def join_master_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Join `weight` (bf16) and `remainder` (int16) in `master` (fp32): 1-D, contiguous, of one length and device."""
    _check(weight, remainder, master)
    with torch.no_grad():
        for values, hi, lo in tiles(master, weight, remainder):
            bits = values.view(torch.int32)
            bits.copy_(hi.view(torch.int16))
            bits.bitwise_left_shift_(16)
            # The remainder is signed: the weight was rounded half up, so the master may lie below it.
            bits.add_(lo)
            # A zero weight with a negative remainder becomes a NaN. On the CPU one sum tells whether there can be one.
            if values.device.type != "cpu" or values.sum().isnan().item():
                bits.copy_(torch.where((hi == 0) & (lo < 0), hi.view(torch.int16).int() << 16, bits))


def _check(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    wanted = {"weight": torch.bfloat16, "remainder": torch.int16, "master": torch.float32}
    for (name, dtype), tensor in zip(wanted.items(), (weight, remainder, master)):
        right = tensor.dtype == dtype and tensor.dim() == 1 and tensor.is_contiguous()
        if not right or tensor.numel() != master.numel() or tensor.device != master.device:
            raise ValueError(
                f"{name} must be {dtype}, 1-D, contiguous, {master.numel()} elements on {master.device}, "
                f"found {tensor.dtype}, shape {tuple(tensor.shape)}, {tensor.device}"
            )
