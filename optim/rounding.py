"""fp32 to bf16, rounded half up on the bit pattern.

`hi = (bits + 0x8000) >> 16`, so `bits = (hi << 16) + lo` with an int16 `lo` restores every finite master exactly.
Round-to-nearest-even could not be inverted with 16 bits. The sign is a bit of its own, so ties round away from zero. An
infinity stays one. A NaN, which the addition could turn into an infinity or a zero, becomes 0x7fc0.
"""

import torch
from torch import Tensor

from optim.scratch import scratch, tiles

BF16_NAN_BITS = 0x7FC0


def to_bfloat16_half_up(master: Tensor, out: Tensor | None = None) -> Tensor:
    """`master` (fp32, contiguous, any shape) as bf16, in `out` (contiguous, same shape) if given.

    Raises ValueError for tensors of another dtype, layout or shape.
    """
    if master.dtype != torch.float32 or not master.is_contiguous():
        raise ValueError(f"master must be fp32 and contiguous, found {master.dtype}, stride {master.stride()}")
    if out is None:
        out = torch.empty_like(master, dtype=torch.bfloat16)
    if out.dtype != torch.bfloat16 or not out.is_contiguous() or out.shape != master.shape:
        raise ValueError(
            f"out must be bf16, contiguous and of shape {tuple(master.shape)}, "
            f"found {out.dtype}, stride {out.stride()}, shape {tuple(out.shape)}"
        )
    with torch.no_grad():
        for values, rounded in tiles(master.view(-1), out.view(-1)):
            _round_tile(values, rounded.view(torch.int16))
    return out


def _round_tile(values: Tensor, rounded: Tensor) -> None:
    sums = scratch("rounded bits", values.numel(), torch.int32, values.device)
    torch.add(values.view(torch.int32), 0x8000, out=sums)
    sums.bitwise_right_shift_(16)
    # The shift was arithmetic, so every sum fits into int16, with the weight's sign.
    rounded.copy_(sums)
    # A comparison per element costs more than all of the above. On the CPU one sum tells whether there can be a NaN. On
    # a device the host would have to wait for it.
    if values.device.type != "cpu" or values.sum().isnan().item():
        rounded.masked_fill_(values.isnan(), BF16_NAN_BITS)
