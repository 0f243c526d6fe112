"""The emulated device: the device tier on CPU memory, for machines without an accelerator.

A hard byte capacity that raises rather than be passed, and poison: memory that was given up reads as NaN, so a
forgotten fetch is a wrong number in every test instead of luck.
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
        """Nothing: malloc has no device."""

    def give(self, buffer: Tensor, kind: str) -> None:
        super().give(buffer, kind)
        self.poison(buffer)

    def poison(self, buffer: Tensor) -> None:
        buffer.fill_(_POISON)
