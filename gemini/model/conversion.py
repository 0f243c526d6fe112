"""Conversions that change nothing: `.to()`, `.float()` and the like of what has that dtype and device already."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def changes_nothing(convert: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> bool:
    """Whether `convert` would return every tensor itself. Tried on small ones that are like them."""
    for dtype, device, dim in sorted({(t.dtype, t.device, t.dim()) for t in tensors}, key=str):
        # two elements in each dimension: with one, a tensor is contiguous in every memory format
        probe = torch.empty((2,) * dim, dtype=dtype, device=device)
        try:
            if convert(probe) is not probe:
                return False
        except (RuntimeError, AssertionError):  # there is no such device
            return False
    return True
