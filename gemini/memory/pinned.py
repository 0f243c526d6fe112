"""Host memory that a GPU's driver copies from and to directly: registered exactly, and unregistered before it is freed.

[Note: Registered memory] The driver goes by addresses. If memory were unmapped while it is registered, the next block
that the system put at its address could not be registered, or, worse, would pass for pinned while copies still went
to the pages of before. So the registration belongs to the extent (arena.py) that holds the mapping. It ends when the
last tensor in it dies, whoever holds that tensor, and right before the memory is unmapped.
"""

from __future__ import annotations

import os
import warnings
import weakref
from typing import Protocol

import torch

_registered: dict[int, tuple[int, int]] = {}  # address: (process, bytes); one dict operation a change, for all threads


def registered_bytes() -> int:
    """Of all models of this process, as long as tensors of theirs live."""
    return sum(num_bytes for process, num_bytes in _registered.copy().values() if process == os.getpid())


class Registrar(Protocol):
    """What pinning asks of a GPU's runtime. Error codes are the runtime's, 0 is success."""

    def register(self, address: int, num_bytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def launch(self) -> None:
        """Launch a kernel: raises RuntimeError for the last error of this thread, which is cleared thereby."""


class CudaRuntime:
    """The CUDA runtime that torch uses, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> int:
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> int:
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostUnregister(address))

    def launch(self) -> None:
        torch.ones(1, device=self._device).neg_()


class Pinning:
    """Registers memory for as long as that works. After a first failure training goes on with unpinned memory."""

    def __init__(self, runtime: Registrar) -> None:
        self._runtime = runtime
        self.works = True

    def register(self, owner: object, address: int, num_bytes: int) -> bool:
        """Register memory until `owner`, which keeps it mapped, dies. Warns, once, and is False if that is refused."""
        if not self.works:
            return False
        error = self._runtime.register(address, num_bytes)
        if error == 0:
            _registered[address] = os.getpid(), num_bytes
            ending = weakref.finalize(owner, _unregister, self._runtime, address, os.getpid())
            ending.atexit = False  # the process takes its registrations with it
            return True
        self.works = False
        _clear_error(self._runtime)
        warnings.warn(
            f"host memory of {num_bytes} bytes could not be pinned (cudaHostRegister error {error}). Training goes on "
            "with unpinned memory, and copies to and from the device will be slower. Raise the locked-memory limit "
            "(ulimit -l), or give host_memory= less than the machine can lock",
            stacklevel=2,
        )
        return False


def _unregister(runtime: Registrar, address: int, process: int) -> None:
    """Called by whatever drops the last tensor, so it must not raise. A forked child has no registrations."""
    _registered.pop(address, None)
    if os.getpid() == process and runtime.unregister(address) != 0:
        _clear_error(runtime)


def _clear_error(runtime: Registrar) -> None:
    """torch returns the error without clearing the runtime's last one, which the next launch, of anything, raises."""
    try:
        runtime.launch()
    except RuntimeError:
        runtime.launch()  # an error that is still there is not the one that was to be cleared
