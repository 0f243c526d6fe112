"""A parameter's place in its chunk's payload, and the conversion between its shape and a flat run of elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class ParamPlace:
    """A parameter's place. Its elements are contiguous in the payload, in the order of its strides."""

    name: str  # the first of its names in the plain module
    position: int  # index among the chunk's parameters
    offset: int  # in the payload, in elements
    shape: torch.Size
    stride: tuple[int, ...]  # dense, see `dense_stride`

    @property
    def numel(self) -> int:
        return self.shape.numel()

    @property
    def in_payload(self) -> slice:
        """The parameter's elements as a slice of a flat payload."""
        return slice(self.offset, self.offset + self.numel)

    def view(self, payload: Tensor) -> Tensor:
        """The parameter as a view of `payload`."""
        # The offset of `as_strided` counts from the start of the storage, where a payload need not begin.
        return torch.as_strided(payload, self.shape, self.stride, payload.storage_offset() + self.offset)

    def shaped(self, flat: Tensor) -> Tensor:
        """The parameter as a view of `flat`, (numel,), which holds its elements alone."""
        return torch.as_strided(flat, self.shape, self.stride, flat.storage_offset())

    def laid_out(self, value: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None) -> Tensor:
        """(numel,) the elements of `value`, which has the parameter's shape, in payload order.

        A view of `value` if its strides match already. A parameter that fetches itself is copied.
        """
        dtype, device = dtype or value.dtype, device or value.device
        if type(value) is not Tensor or (value.dtype, value.device, value.stride()) != (dtype, device, self.stride):
            value = torch.empty_strided(self.shape, self.stride, dtype=dtype, device=device).copy_(value)
        # Not `view(-1)`: the elements are dense, but their strides may be those of a transposed weight.
        return torch.as_strided(value, (self.numel,), (1,), value.storage_offset())
