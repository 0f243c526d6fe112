"""What NVIDIA's driver says of a device, through NVML: also without a CUDA context, and process by process.

NVML numbers devices as the machine has them, and CUDA as CUDA_VISIBLE_DEVICES names them, by index, by UUID or by a
part of one, and in another order. So devices are looked up by their UUID. NVML often does not work in containers (no
library, a library of another version than the driver, no permission): then nothing here is needed.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_SAME_PART = 16
"""Two accounts of one device's total differ by what the driver keeps for itself, which is less than this part."""


@dataclass(frozen=True)
class DriverReading:
    """One device by the driver's account, in bytes."""

    total_bytes: int
    free_bytes: int
    own_bytes: int | None  # of this process, its CUDA context included. None: the driver does not say


class Nvml:
    """NVML for as long as it works. After a first failure it says so, once, and answers None from then on."""

    def __init__(self, library: Any) -> None:
        """library: the module `pynvml`, or None if there is none."""
        self._library = library
        self._works = True
        try:
            if library is None:
                raise RuntimeError("the package nvidia-ml-py is not installed")
            library.nvmlInit()
        except Exception as error:
            self._give_up(error)

    def find(self, uuids: Sequence[str], total_bytes: int) -> Any | None:
        """The handle of the first device that is known by one of `uuids` and has about `total_bytes`.

        The bytes tell a MIG instance from the GPU that it is a part of, if CUDA names the whole by its UUID.
        """
        for uuid in uuids if self._works else ():
            try:
                handle = self._library.nvmlDeviceGetHandleByUUID(uuid)
                total = int(self._library.nvmlDeviceGetMemoryInfo(handle).total)
            except self._library.NVMLError:
                continue  # not known by this one
            if abs(total - total_bytes) <= total_bytes // _SAME_PART:
                return handle
        if self._works:
            self._give_up(f"it knows no device of {total_bytes} bytes as {' or '.join(uuids)}")
        return None

    def read(self, handle: Any, least_own_bytes: int) -> DriverReading | None:
        """What a device of `find` has now; None once NVML has failed.

        least_own_bytes: that this process holds for certain. The driver numbers processes as the machine does, so in a
        container another process can have the number that this one has inside.
        """
        if not self._works:
            return None
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        except self._library.NVMLError as error:
            self._give_up(error)
            return None
        own_bytes = self._own_bytes(handle)
        if own_bytes is not None and own_bytes < least_own_bytes:
            own_bytes = None
        return DriverReading(int(memory.total), int(memory.free), own_bytes)

    def _own_bytes(self, handle: Any) -> int | None:
        try:
            processes = self._library.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._library.NVMLError:
            return None  # processes are hidden here; what is free is known all the same
        own = [each.usedGpuMemory for each in processes if each.pid == os.getpid()]
        return int(own[0]) if own and own[0] is not None else None

    def _give_up(self, why: object) -> None:
        self._works = False
        warnings.warn(
            f"NVML does not work here ({why}). Free device memory is read from the CUDA runtime instead; what other "
            "processes hold is known less exactly",
            stacklevel=2,
        )


@functools.cache
def driver_of_process() -> Nvml:
    """The one that all monitors of this process use, so that a failure is said once. It is loaded at the first call."""
    try:
        import pynvml
    except ImportError:
        return Nvml(None)
    return Nvml(pynvml)
