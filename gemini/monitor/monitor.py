"""`MemoryMonitor`: the only reader of live memory.

It only reports. How much of the free memory a model may use is decided in planning (`gemini/model/budgets.py`).
"""

from __future__ import annotations

from pathlib import Path

from gemini.monitor.device import DeviceSource, source_of
from gemini.monitor.host import DiskSource, HostSource
from gemini.monitor.peaks import PositionPeaks
from gemini.monitor.readings import DeviceReading, HostReading, MemoryReading
from gemini.settings import Device


class MemoryMonitor:
    """Reads how much memory the device, the host and a disk have free, and who holds the rest. Needs no model.

    A CUDA device is looked up in NVIDIA's driver by its UUID, so that CUDA_VISIBLE_DEVICES in any form, and MIG
    instances, mean the same as for CUDA. If the driver's library does not work, a warning says so once, and only the
    CUDA runtime is asked. Nothing communicates with other processes or waits for the device. Each rank has its own
    monitor, and readings differ between ranks. Local.

    Args:
        device: "emulated", an int, a string or a torch.device, as in `Settings`, or an `EmulatedDevice`.
            None: the current accelerator, else the emulated device, which has no bound.
        directory: a directory whose file system is read too. It need not exist yet. None: no disk is read.

    Raises TypeError or ValueError for a device that does not exist.

    Example:
        >>> monitor = MemoryMonitor("emulated", directory=".")
        >>> reading = monitor.read()
        >>> 0 < reading.host.available_bytes <= reading.host.total_bytes
        True
        >>> reading.disk.free_bytes <= reading.disk.total_bytes
        True
    """

    def __init__(self, device: Device | DeviceSource = None, *, directory: str | Path | None = None) -> None:
        self._device = source_of(device)
        self._host = HostSource()
        self._disk = None if directory is None else DiskSource(Path(directory))

    def read(self) -> MemoryReading:
        """The present reading. Local; cheap enough for every step (`python -m benchmarks.memory_monitor` times it).

        Raises OSError if the directory's file system does not answer.
        """
        return MemoryReading(self.read_device(), self.read_host(), None if self._disk is None else self._disk.read())

    def read_device(self) -> DeviceReading:
        """The present reading of the device only. Local; raises nothing."""
        return self._device.read()

    def read_host(self) -> HostReading:
        """The present reading of the host only. Local; raises nothing."""
        return self._host.read()

    def record_peaks(self) -> PositionPeaks:
        """A context manager that records the peak of non-model bytes at each position of the code inside. Local.

        On CUDA the allocator's peak is reset at each position, so `torch.cuda.max_memory_allocated()` covers the time
        since the last position. On the emulated device a dispatch mode counts storages. Raises nothing.

            >>> with MemoryMonitor("emulated").record_peaks() as peaks:
            ...     peaks.at("first")
            ...     kept = torch.zeros(1000).sum()
            ...     peaks.at("second")
            ...     kept = torch.zeros(500)
            >>> peaks.by_position["first"] >= 4000 > peaks.by_position["second"] >= 2000
            True
        """
        return PositionPeaks(self._device.peak_meter())
