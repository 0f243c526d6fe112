"""The host tier: plain memory, or memory pinned for an accelerator.

torch's own pinned allocator rounds every block up to a power of two, up to twice the bytes. Here the memory is
ours and is registered with the driver exactly (`cudaHostRegister`), in slabs: one registration each, since
registering costs milliseconds. Where registering is refused (a locked-memory limit), the slab stays unpinned.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from gemini.memory.ledger import Ledger
from gemini.memory.tier import check_capacity

SLAB_BYTES = 256 * 2**20
_ALIGNMENT_BYTES = 4096


class HostTier:
    """Host memory of this rank."""

    name = "host"

    def __init__(self, capacity_bytes: int | None = None, pin: bool = False) -> None:
        self.device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger()
        self._pin = pin
        self._slabs: dict[int, PinnedSlab] = {}  # address -> slab that owns it
        self._open: PinnedSlab | None = None

    def take(self, num_bytes: int, kind: str) -> Tensor:
        check_capacity(self, num_bytes, kind, "host_memory=")
        self.ledger.take(kind, num_bytes)
        if not self._pin or num_bytes == 0:
            return torch.zeros(num_bytes, dtype=torch.uint8)
        if self._open is None or not self._open.fits(num_bytes):
            self._open = PinnedSlab(max(SLAB_BYTES, num_bytes))
        buffer = self._open.take(num_bytes)
        self._slabs[buffer.data_ptr()] = self._open
        return buffer

    def give(self, buffer: Tensor, kind: str) -> None:
        self.ledger.give(kind, buffer.nbytes)
        slab = self._slabs.pop(buffer.data_ptr(), None) if self._pin and buffer.nbytes else None
        if slab is not None and slab.give(buffer):
            slab.close()
            self._open = None if slab is self._open else self._open

    def poison(self, buffer: Tensor) -> None:
        return

    def synchronize(self) -> None:
        return


class PinnedSlab:
    """One registered block, handed out front to back, unregistered when everything taken from it came back."""

    def __init__(self, num_bytes: int) -> None:
        raw = torch.empty(num_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8)
        start = -raw.data_ptr() % _ALIGNMENT_BYTES
        self._memory = raw[start : start + num_bytes]
        self._used_bytes = 0
        self._live_bytes = 0
        error = int(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), num_bytes, 0))
        self.pinned = error == 0
        if not self.pinned:
            warnings.warn(
                f"host memory of {num_bytes} bytes could not be pinned (cudaHostRegister error {error}): copies to "
                "and from the device will be slower. Raise the locked-memory limit (ulimit -l)",
                stacklevel=2,
            )

    def fits(self, num_bytes: int) -> bool:
        return self._used_bytes + num_bytes <= self._memory.numel()

    def take(self, num_bytes: int) -> Tensor:
        buffer = self._memory[self._used_bytes : self._used_bytes + num_bytes].zero_()
        self._used_bytes += -(-num_bytes // 64) * 64
        self._live_bytes += num_bytes
        return buffer

    def give(self, buffer: Tensor) -> bool:
        """True when nothing of the slab is in use any more."""
        self._live_bytes -= buffer.nbytes
        return self._live_bytes == 0

    def close(self) -> None:
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self.pinned = False
