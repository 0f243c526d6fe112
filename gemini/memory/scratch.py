"""Scratch: one piece of device memory that a collective's temporaries share, taken at its first use and counted."""

import torch
from torch import Tensor

from gemini.memory.region import Region, Tickets
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import wait_on_stream
from gemini.placement.demand import Tier
from gemini.placement.scratch import round_to_alignment


class Scratch:
    """Hands out flat tensors front to back; `reset` takes all of them back."""

    def __init__(self, tier: MemoryTier, num_bytes: int) -> None:
        self._tier = tier
        self.num_bytes = num_bytes
        self._buffer: Tensor | None = None
        self._used_bytes = 0
        self._tickets = Tickets()  # of all regions in it

    def fill(self) -> Tensor:
        """Take the memory if it is not there. Raises BudgetError."""
        if self._buffer is None:
            self._buffer = self._tier.take(self.num_bytes, "scratch")
        return self._buffer

    def reset(self) -> None:
        """Nothing that was handed out is needed any more."""
        self._used_bytes = 0
        if self._buffer is not None:
            wait_on_stream(self._region(self._buffer))

    def renew(self) -> None:
        """Other memory: a collective that failed may still write to this one."""
        self.resize(self.num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Other memory, of another size."""
        if self._buffer is not None:
            wait_on_stream(self._region(self._buffer))
            self._tier.give(self._buffer, "scratch")
        self._buffer, self.num_bytes = None, num_bytes
        self._used_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of `dtype`, content irrelevant."""
        return self.region(numel, dtype).flat

    def region(self, numel: int, dtype: torch.dtype) -> Region:
        """`take`, for what is copied to another tier."""
        num_bytes = numel * dtype.itemsize
        start = self._used_bytes
        assert start + num_bytes <= self.num_bytes, "scratch is smaller than the placement's scratch_bytes"
        self._used_bytes += round_to_alignment(num_bytes)
        return self._region(self.fill()[start : start + num_bytes].view(dtype))

    def _region(self, part: Tensor) -> Region:
        return Region(Tier.DEVICE, part, self._tickets)
