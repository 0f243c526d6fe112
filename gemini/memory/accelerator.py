"""The device tier on a real accelerator, through `torch.accelerator` so that nothing here says CUDA.

Memory that is given back goes to torch's allocator, which orders its next use on the current stream. Copies from and to
it are made, and waited for, in transfer.py.
"""

import torch
from torch import Tensor

from gemini.memory.ledger import Ledger
from gemini.memory.tier import allocating


class AcceleratorTier:
    """Memory of one GPU."""

    name = "device"

    def __init__(self, device: torch.device, capacity_bytes: int | None = None) -> None:
        self.device = device
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger()

    def take(self, num_bytes: int, kind: str) -> Tensor:
        with allocating(self, num_bytes, kind, "model_data_memory= or device_memory="):
            buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        self.ledger.take(kind, num_bytes)
        return buffer

    def give(self, buffer: Tensor, kind: str) -> None:
        self.ledger.give(kind, buffer.nbytes)

    def poison(self, buffer: Tensor) -> None:
        return  # a pass over device memory per eviction is for tests, which the emulated tier serves
