"""Where a parameter lies in its chunk's payload, and how a flat run of its elements becomes its shape and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class ParamPlace:
    """A parameter's place. Its elements lie in one run of the payload, in the order that its strides say."""

    name: str  # the first of its names in the plain module
    position: int  # among the chunk's parameters
    offset: int  # elements, in the payload
    shape: torch.Size
    stride: tuple[int, ...]  # dense, see `dense_stride`

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def in_payload(self) -> slice:
        """Its elements of a flat payload."""
        return slice(self.offset, self.offset + self.numel)

    def view(self, payload: Tensor) -> Tensor:
        """The parameter as a view of a payload."""
        return torch.as_strided(payload, self.shape, self.stride, payload.storage_offset() + self.offset)

    def shaped(self, flat: Tensor) -> Tensor:
        """The parameter as a view of its elements alone, (numel,)."""
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset())

    def laid_out(self, value: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """(numel,) the elements of `value`, of the parameter's shape, in the order of the payload.

        A view of `value` where that lies so already; parameters that fetch themselves are copied.
        """
        dtype, device = dtype or value.dtype, device or value.device
        if type(value) is not Tensor or (value.dtype, value.device, value.stride()) != (dtype, device, self.stride):
            value = torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device).copy_(value)
        return torch.as_strided(value, (self.numel,), (1,), value.storage_offset())
