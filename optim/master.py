"""An fp32 master beside a half-precision parameter, and how each follows the other.

The optimizer updates the master, and the parameter is the master rounded (bf16: half up on the bit pattern, fp16: to
nearest even). If an element of a parameter is *not* its master rounded, it was written to since the last update, and
its master is set to it. So no edit of a weight is lost, and no other element loses its fraction.
"""

import torch
from torch import Tensor

from optim.rounding import to_bfloat16_half_up
from optim.scratch import scratch, tiles


def round_master_(weight: Tensor, master: Tensor) -> None:
    """Round `master` (fp32) into `weight` (bf16 or fp16). Both are contiguous."""
    if weight.dtype == torch.bfloat16:
        to_bfloat16_half_up(master, out=weight)
    else:
        weight.copy_(master)


def absorb_edits_(master: Tensor, weight: Tensor) -> None:
    """Set elements of `master` to those of `weight` that differ from the rounded master. Both flat, contiguous."""
    with torch.no_grad():
        for values, current in tiles(master, weight):
            expected = scratch("rounded master", values.numel(), weight.dtype, weight.device)
            round_master_(expected, values)
            expected_bits, bits = expected.view(torch.int16), current.view(torch.int16)
            # On the CPU the usual case, no edit, is detected without temporaries. On a device the host would have to
            # wait for the answer.
            if weight.device.type != "cpu" or not torch.equal(expected_bits, bits):
                values.copy_(torch.where(expected_bits != bits, current.float(), values))
