"""The emulated device: the device tier on CPU memory, for machines without an accelerator.

A hard byte capacity that raises rather than be passed, and poison: memory that was given up reads as NaN, so a
forgotten fetch is a wrong number in every test instead of luck.
"""

import torch
from torch import Tensor

from gemini.memory.ledger import Ledger
from gemini.memory.tier import allocating

_POISON = 0xFF  # 0xFFFF... is a NaN in every float dtype


class EmulatedTier:
    """Device memory that is really host memory."""

    name = "device"

    def __init__(self, capacity_bytes: int | None = None) -> None:
        self.device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger()

    def take(self, num_bytes: int, kind: str) -> Tensor:
        with allocating(self, num_bytes, kind, "model_data_memory= or device_memory="):
            buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        self.ledger.take(kind, num_bytes)  # what was interrupted, or failed, is not counted
        return buffer

    def give(self, buffer: Tensor, kind: str) -> None:
        self.ledger.give(kind, buffer.nbytes)
        self.poison(buffer)

    def poison(self, buffer: Tensor) -> None:
        buffer.fill_(_POISON)
