"""A correctly rounded fp32 square root.

`torch.sqrt` on the CPU is not correctly rounded: about 20 % of its results are 1 ulp off. There are two exact ways,
chosen by speed. NumPy's `sqrt` is the processor's instruction, but runs on one thread. torch's fp64 `sqrt` is exact
after rounding to fp32, but slow; `1 / (1 / sqrt(v))` in fp64, which torch computes with the processor's instructions,
takes half the time. Its three roundings have a relative error below 3 * 2**-53 in all. The root of an fp32 number is
either an fp32 number or at least 2**-51 away from every border between two of them, so the final rounding to fp32 is
correct. Zeros, infinities and negative numbers give the results of IEEE 754.
"""

import numpy as np
import torch
from torch import Tensor

# NumPy takes 0.3 ns per element on its one thread. fp64 takes 1.2 ns divided by torch's threads.
MAX_NUMPY_THREADS = 3


def prefers_wide_square_root(device: torch.device) -> bool:
    """Whether `square_root_` needs the fp64 scratch buffer `wide` for tensors on `device`."""
    return device.type != "cpu" or torch.get_num_threads() > MAX_NUMPY_THREADS


def square_root_(out: Tensor, values: Tensor, wide: Tensor | None) -> None:
    """Write the roots of `values` to `out`, both fp32, contiguous. wide: fp64 scratch as long, or None to use NumPy."""
    if wide is None:
        # The root of a negative number is NaN, as in torch; NumPy would also warn.
        with np.errstate(invalid="ignore"):
            np.sqrt(values.numpy(), out=out.numpy())
        return
    wide.copy_(values)
    if values.device.type == "cpu":
        wide.rsqrt_().reciprocal_()
    else:
        wide.sqrt_()  # correctly rounded on GPUs, where rsqrt is not
    out.copy_(wide)
