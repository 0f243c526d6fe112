"""Conversions of a module: those that change nothing (`.float()` of an fp32 module) are allowed, others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

CONVERSION = (
    ".to(), .cuda(), .half(), .to_empty() and the like cannot change a ShardedModel: give device= and dtype= to "
    "ShardedModel(...). copy.deepcopy(model) is a plain module in host memory, which can be converted"
)


def unwritten(tensor: Tensor) -> Tensor:
    """Mark `tensor` as allocated but not written to since, and return it."""
    # Inference tensors have no version counter.
    if not tensor.is_inference():
        tensor._gemini_unwritten = tensor._version  # type: ignore[attr-defined]
    return tensor


def is_unwritten(tensor: Tensor) -> bool:
    """Whether a marked tensor still has no values. A tensor on the meta device never has any."""
    known: int | None = getattr(tensor, "_gemini_unwritten", None)
    return tensor.is_meta or (known is not None and known == tensor._version)


def changes_nothing(convert: Callable[[Tensor], Tensor], tensors: Iterable[Tensor]) -> bool:
    """Whether `convert` would return every tensor itself. It is tried on small tensors of the same kinds."""
    for dtype, device, dim in sorted({(t.dtype, t.device, t.dim()) for t in tensors}, key=str):
        # Two elements in each dimension: with one, a tensor would be contiguous in every memory format.
        probe = torch.empty((2,) * dim, dtype=dtype, device=device)
        try:
            if convert(probe) is not probe and not _only_copies(convert, probe):
                return False
        # The conversion is to a device that this machine does not have.
        except (RuntimeError, AssertionError):
            return False
    return True


def _only_copies(convert: Callable[[Tensor], Tensor], probe: Tensor) -> bool:
    """Whether `convert` copies within one device: `.to("cpu:0")` copies a tensor on "cpu", which is the same device."""
    # Two values: memory that the conversion allocates without copying does not follow both.
    for value in (0, 1):
        result = convert(probe.fill_(value))
        same = result.dtype is probe.dtype and result.device == probe.device and result.stride() == probe.stride()
        if not same or not torch.equal(result, probe):
            return False
    return probe.device.type == "cpu"
