"""Host memory that a GPU's driver copies from and to directly: registered exactly, and unregistered before it is freed.

[Note: Registered memory] The driver identifies memory by address. If memory were unmapped while it is registered, the
next block at that address could not be registered or, worse, would pass for pinned while copies still used the old
pages. So the registration belongs to the extent (arena.py) that holds the mapping. It ends when the last tensor in the
extent dies, whoever holds that tensor, and right before the memory is unmapped.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

import torch

from gemini.script import warn_at_script

# address: (process, bytes). Each change is one dict operation, so threads need no lock.
_registered: dict[int, tuple[int, int]] = {}


def registered_bytes() -> int:
    """Registered bytes of all models of this process whose tensors are alive."""
    # The sum goes over a copy, as another thread may change the dict meanwhile.
    return sum(num_bytes for process, num_bytes in _registered.copy().values() if process == os.getpid())


class Registrar(Protocol):
    """The calls of a GPU's runtime that pinning needs. Return values are the runtime's error codes, 0 is success."""

    def register(self, address: int, num_bytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def launch(self) -> None:
        """Launch a kernel. Raises RuntimeError for this thread's last error, and thereby clears it."""


class CudaRuntime:
    """The CUDA runtime that torch uses, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> int:
        # The runtime would otherwise act on the thread's current device, and create a context there: on GPU 0, if the
        # script or the thread has chosen none.
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> int:
        # This runs in a finalizer, so in any thread: the current device is a setting of each thread.
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostUnregister(address))

    def launch(self) -> None:
        # torch reads and clears the runtime's last error after each kernel that it launches.
        torch.ones(1, device=self._device).neg_()


class Pinning:
    """Registers memory. After the first failure it stops, and training goes on with unpinned memory."""

    def __init__(self, runtime: Registrar) -> None:
        self._runtime = runtime
        self.works = True

    def register(self, owner: object, address: int, num_bytes: int) -> bool:
        """Register memory until `owner`, which keeps it mapped, dies. False, with one warning, if that is refused."""
        if not self.works:
            return False
        error = self._runtime.register(address, num_bytes)
        if error == 0:
            # A forked child inherits this dict but no registration: the process number tells such entries apart.
            _registered[address] = os.getpid(), num_bytes
            ending = weakref.finalize(owner, _unregister, self._runtime, address, os.getpid())
            # The process's registrations end with it.
            ending.atexit = False
            return True
        self.works = False
        _clear_error(self._runtime)
        warn_at_script(
            f"host memory of {num_bytes} bytes could not be pinned (cudaHostRegister error {error}). Training goes on "
            "with unpinned memory, and copies to and from the device will be slower. Raise the locked-memory limit "
            "(ulimit -l), or give host_memory= less than the machine can lock",
        )
        return False


def _unregister(runtime: Registrar, address: int, process: int) -> None:
    """Runs in the finalizer of an extent, so it must not raise. A forked child has no registrations to end."""
    _registered.pop(address, None)
    if os.getpid() == process and runtime.unregister(address) != 0:
        _clear_error(runtime)


def _clear_error(runtime: Registrar) -> None:
    """Clear the runtime's last error: torch returns its code, but the next launch of any kernel would raise it."""
    try:
        runtime.launch()
    except RuntimeError:
        # An error that persists is another one, and must be seen.
        runtime.launch()
