"""The device tier on a real accelerator, through `torch.accelerator` so that nothing here says CUDA.

Memory that is given back goes to torch's allocator, which orders its next use on the current stream. Copies from and to
it are made, and waited for, in transfer.py.
"""

import torch
from torch import Tensor

from gemini.memory.tier import MemoryTier


class AcceleratorTier(MemoryTier):
    """Memory of one GPU. It is not poisoned: a pass over device memory per eviction is for tests."""

    def __init__(self, device: torch.device, capacity_bytes: int | None = None) -> None:
        super().__init__("device", device, capacity_bytes, "model_data_memory= or device_memory=")

    def trim(self) -> None:
        """torch's allocator gives back the blocks that nothing lies in. Waits for the device."""
        torch.accelerator.empty_cache()

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
