"""The sum of squares of `optim.norm` on the CPU in one pass over memory."""

from __future__ import annotations

import torch
from torch import Tensor

from optim import cpu_extension
from optim.cpu_extension import extension, levels

_VALUE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the numbers in csrc/norm.h


def can_sum(flat: Tensor) -> bool:
    """Whether the extension was built and accepts `flat`: contiguous in host memory, fp32, bf16 or fp16."""
    return flat.device.type == "cpu" and flat.dtype in _VALUE_TYPES and flat.is_contiguous() and extension() is not None


def accumulate_sum_of_squares_(
    limbs: Tensor, flat: Tensor, *, num_threads: int | None = None, level: str | None = None
) -> Tensor:
    """`optim.dispatch.accumulate_sum_of_squares_`, for tensors that `can_sum` accepts; `limbs` in host memory.

    num_threads and level as in `optim.cpu_adam.update`. Releases the GIL. Raises RuntimeError without the compiled
    kernels and for limbs that are not contiguous.
    """
    module = extension()
    if module is None or not limbs.is_contiguous():
        raise RuntimeError("gemini was installed without its CPU kernels, or the limbs are not contiguous")
    # The kernel gets addresses only. `can_sum` and `norm.check` have looked at shape, dtype and device.
    first_bad = module.sum_of_squares(
        limbs.data_ptr(),
        flat.data_ptr(),
        flat.numel(),
        _VALUE_TYPES[flat.dtype],
        num_threads or cpu_extension.num_threads(),
        level or levels()[0],
    )
    # A tensor, as from the kernels of other devices: there a plain number would make the host wait.
    return torch.tensor(first_bad, device="cpu")
