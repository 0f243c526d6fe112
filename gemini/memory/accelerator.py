"""The device tier on a real accelerator. It uses `torch.accelerator`, so nothing here is specific to CUDA.

Memory that is given back goes to torch's allocator, which reuses it in the order of the current stream. Copies to and
from it are made, and waited for, in transfer.py.
"""

import torch
from torch import Tensor

from gemini.memory.tier import MemoryTier


class AcceleratorTier(MemoryTier):
    """Memory of one GPU. It is never poisoned: that would cost a pass over device memory for each eviction."""

    def __init__(self, device: torch.device, capacity_bytes: int | None = None) -> None:
        super().__init__("device", device, capacity_bytes, "model_data_memory= or device_memory=")

    def trim(self) -> None:
        """Return torch's unused cached blocks to the driver, for other processes. Waits for the device."""
        torch.accelerator.empty_cache()

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        # Not `torch.empty`: no parameter fills the paddings of a home, and norms and updates read homes whole.
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
