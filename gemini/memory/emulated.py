"""The emulated device: the device tier on CPU memory, for machines without an accelerator.

It has a hard byte capacity and poisons memory: what was given back reads as NaN, so that a forgotten fetch is a wrong
number in every test instead of luck.
"""

import torch
from torch import Tensor

from gemini.memory.accelerator import AcceleratorTier

_POISON = 0xFF  # 0xFFFF... is a NaN in every float dtype


class EmulatedTier(AcceleratorTier):
    """Device memory that is really host memory."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(torch.device("cpu"), capacity_bytes)

    def trim(self) -> None:
        """Does nothing: there is no device allocator with cached blocks."""

    def free(self, buffer: Tensor, kind: str) -> None:
        super().free(buffer, kind)
        self.poison(buffer)

    def poison(self, buffer: Tensor) -> None:
        buffer.fill_(_POISON)
