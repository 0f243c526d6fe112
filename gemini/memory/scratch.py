"""Scratch: one piece of device memory for the temporaries of a collective, taken at the first use and counted."""

import torch
from torch import Tensor

from gemini.memory.region import Region
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import ready, wait_on_stream
from gemini.placement.demand import Tier
from gemini.placement.scratch import round_to_alignment


class Scratch:
    """Hands out flat tensors front to back; `reset` takes them all back."""

    def __init__(self, tier: MemoryTier, num_bytes: int) -> None:
        self._tier = tier
        self.num_bytes = num_bytes
        self._memory: Region | None = None  # (num_bytes,) uint8
        self._used_bytes = 0
        self._regions: dict[tuple[int, int, torch.dtype], Region] = {}  # by first byte and numel: the same in each step

    def fill(self) -> Region:
        """Take the memory if it is not taken yet. Raises BudgetError."""
        if self._memory is None:
            self._memory = Region(Tier.DEVICE, self._tier.allocate(self.num_bytes, "scratch"))
        return self._memory

    def idle(self) -> Region | None:
        """All of it, between two collectives. None: it has no memory."""
        return self._memory

    def reset(self) -> None:
        """Reuse the memory from the start: nothing that was handed out is needed any more."""
        self._used_bytes = 0
        if self._memory is not None:
            # A copy of the last use may still read the memory: what is launched next must come after it.
            wait_on_stream(self._memory)

    def resize(self, num_bytes: int) -> None:
        """Give the memory back and take other memory at the next use, even for the same `num_bytes`.

        A collective that failed may still write to the old memory.
        """
        self._regions.clear()
        memory, self._memory = self._memory, None  # first: memory that an interrupt left here would be given twice
        self.num_bytes, self._used_bytes = num_bytes, 0
        if memory is not None:
            self._tier.free(ready(memory), "scratch")

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of `dtype`; the content is undefined."""
        return self.region(numel, dtype).flat

    def region(self, numel: int, dtype: torch.dtype) -> Region:
        """Do what `allocate` does, but return a region, for data that is copied to another tier."""
        num_bytes = numel * dtype.itemsize
        start = self._used_bytes
        assert start + num_bytes <= self.num_bytes, "scratch is smaller than the placement's scratch_bytes"
        self._used_bytes += round_to_alignment(num_bytes)
        region = self._regions.get((start, numel, dtype))
        if region is None:
            region = self._regions[start, numel, dtype] = self.fill()[start : start + num_bytes].view(dtype)
        return region
