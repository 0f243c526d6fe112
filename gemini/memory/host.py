"""The host tier: plain memory, or memory pinned for an accelerator.

torch's own pinned allocator rounds every block up to a power of two, up to twice the bytes. Here the memory is
ours and is registered with the driver exactly (pinned.py), in slabs: one registration each, since registering costs
milliseconds. Once registering is refused (a locked-memory limit), memory stays unpinned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.memory.ledger import Ledger
from gemini.memory.pinned import Pinning, Registrar, map_memory
from gemini.memory.tier import allocating

SLAB_BYTES = 256 * 2**20


class HostTier:
    """Host memory of this rank."""

    name = "host"

    def __init__(self, capacity_bytes: int | None = None, runtime: Registrar | None = None) -> None:
        """runtime: of the GPU that memory is pinned for; None: plain memory."""
        self.device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger()
        self._pinning = None if runtime is None else Pinning(runtime)
        self._slabs: dict[int, Slab] = {}  # address of a buffer -> the slab that it is cut from
        self._open: Slab | None = None

    def take(self, num_bytes: int, kind: str) -> Tensor:
        with allocating(self, num_bytes, kind, "host_memory="):
            buffer = self._cut(num_bytes)
        self.ledger.take(kind, num_bytes)  # what failed is not counted
        return buffer

    def _cut(self, num_bytes: int) -> Tensor:
        if self._pinning is None or num_bytes == 0:
            return torch.zeros(num_bytes, dtype=torch.uint8)
        if self._open is None or not self._open.fits(num_bytes):
            if not self._pinning.works:
                return torch.zeros(num_bytes, dtype=torch.uint8)
            self._open = Slab(max(SLAB_BYTES, num_bytes), self._pinning)
        buffer = self._open.take(num_bytes)
        self._slabs[buffer.data_ptr()] = self._open
        return buffer

    def give(self, buffer: Tensor, kind: str) -> None:
        self.ledger.give(kind, buffer.nbytes)
        slab = self._slabs.pop(buffer.data_ptr(), None) if buffer.nbytes else None
        if slab is not None and slab.give(buffer) and slab is self._open:
            self._open = None

    def poison(self, buffer: Tensor) -> None:
        return

    def synchronize(self) -> None:
        return


class Slab:
    """One registered block, cut front to back; unregistered and freed with the last buffer that is cut from it."""

    def __init__(self, num_bytes: int, pinning: Pinning) -> None:
        self._memory = map_memory(num_bytes, pinning)  # (num_bytes,) uint8, zeros
        self._used_bytes = 0
        self._live_bytes = 0

    def fits(self, num_bytes: int) -> bool:
        return self._used_bytes + num_bytes <= self._memory.numel()

    def take(self, num_bytes: int) -> Tensor:
        """A part that was never taken before."""
        buffer = self._memory[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // 64) * 64
        self._live_bytes += num_bytes
        return buffer

    def give(self, buffer: Tensor) -> bool:
        """True when nothing of the slab is in use any more."""
        self._live_bytes -= buffer.nbytes
        return self._live_bytes == 0
