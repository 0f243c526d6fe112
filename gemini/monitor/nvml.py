"""Readings of a device from NVIDIA's driver, through NVML: without a CUDA context, and by process.

NVML numbers the devices of the machine. CUDA numbers those that CUDA_VISIBLE_DEVICES names (by index, UUID or the
beginning of one), in an order of its own. So devices are looked up by UUID. NVML often does not work in containers (no
library, a library of another version than the driver, no permission); the caller then does without it.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemini.script import warn_at_script

_SAME_PART = 16
"""Driver and runtime report totals that differ by the driver's own memory: less than the total divided by this."""


@dataclass(frozen=True)
class DriverReading:
    """The driver's reading of one device, in bytes."""

    total_bytes: int
    free_bytes: int
    own_bytes: int | None  # held by this process, its CUDA context included. None: the driver does not say


class Nvml:
    """NVML, as long as it works. The first failure warns once; from then on all answers are None."""

    def __init__(self, library: Any) -> None:
        """library: the module `pynvml`, or None if there is none."""
        self._library = library
        self._works = True
        try:
            if library is None:
                raise RuntimeError("the package nvidia-ml-py is not installed")
            library.nvmlInit()
        # Not only NVMLError: without the package there is no such class.
        except Exception as error:
            self._give_up(error)

    def find(self, uuids: Sequence[str], total_bytes: int) -> Any | None:
        """The handle of the first device with one of `uuids` and about `total_bytes`. None: there is none.

        The bytes distinguish a MIG instance from its GPU, if CUDA names the instance by the GPU's UUID.
        """
        # The order counts: a MIG instance's own UUID comes before that of its GPU, which has the memory of all
        # instances.
        for uuid in uuids if self._works else ():
            try:
                handle = self._library.nvmlDeviceGetHandleByUUID(uuid)
                total = int(self._library.nvmlDeviceGetMemoryInfo(handle).total)
            except self._library.NVMLError:
                # The driver does not know the device by this UUID.
                continue
            if abs(total - total_bytes) <= total_bytes // _SAME_PART:
                return handle
        if self._works:
            self._give_up(f"it knows no device of {total_bytes} bytes as {' or '.join(uuids)}")
        return None

    def read(self, handle: Any, least_own_bytes: int) -> DriverReading | None:
        """The present reading of a device from `find`. None once NVML has failed.

        least_own_bytes: bytes that this process certainly holds. The driver uses process ids of the machine, so another
        process may have the id that this one has inside a container. Smaller figures of it are not believed.
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
            return None  # the driver hides processes here, but free memory is known all the same
        own = [each.usedGpuMemory for each in processes if each.pid == os.getpid()]
        # The figure is None where the driver cannot attribute memory to processes.
        return int(own[0]) if own and own[0] is not None else None

    def _give_up(self, why: object) -> None:
        self._works = False
        warn_at_script(
            f"NVML does not work here ({why}). Free device memory is read from the CUDA runtime instead; what other "
            "processes hold is known less exactly",
        )


@functools.cache
def driver_of_process() -> Nvml:
    """The process's only `Nvml`, so that a failure warns once. Loaded at the first call."""
    try:
        import pynvml
    except ImportError:
        return Nvml(None)
    return Nvml(pynvml)
