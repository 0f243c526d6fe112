"""What a look at memory found: frozen values, in bytes. `MemoryMonitor.read` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class DeviceReading:
    """The memory of one device at one moment, in bytes.

    Args:
        device: which one; "cpu" for the emulated device.
        total_bytes: of the device, or of the MIG instance that the process sees. None: no bound (the emulated device
            without a capacity).
        free_bytes: that nobody holds. None: no bound.
        allocated_bytes: in live tensors of this process, as torch's allocator rounds them.
        reserved_bytes: that torch's allocator holds for this process: what is allocated and what it caches.
        inactive_bytes: of what is cached, pieces of blocks whose other pieces are in use. The allocator reuses them for
            tensors that are small enough, and cannot give them back.
        peak_bytes: the most that was allocated since the last reset of the peak. None: not known.
        others_bytes: in use and not of this process. Where the driver does not tell processes apart (in most
            containers) all that is outside of torch's allocator counts, this process's CUDA context too.
        tells_processes_apart: `others_bytes` leaves out all of this process.
        num_ooms: how often a tensor of this process found no memory, since it began.
        overdrawn_bytes: held beyond the capacity, where that of an emulated device was lowered.
    """

    device: torch.device
    total_bytes: int | None
    free_bytes: int | None
    allocated_bytes: int
    reserved_bytes: int
    inactive_bytes: int
    peak_bytes: int | None
    others_bytes: int
    tells_processes_apart: bool
    num_ooms: int = 0
    overdrawn_bytes: int = 0

    @property
    def available_bytes(self) -> int | None:
        """Free, or cached by this process: what new tensors can have. None: no bound. Negative where overdrawn."""
        if self.free_bytes is None:
            return None
        return self.free_bytes + self.reserved_bytes - self.allocated_bytes - self.overdrawn_bytes


@dataclass(frozen=True)
class HostReading:
    """Host memory at one moment, in bytes. It is of all processes of the machine or container, not of this rank alone.

    Args:
        total_bytes: of the machine.
        limit_bytes: of the control group that leaves least room, of this process's group and all around it:
            the smaller of its maximum and of the mark above which the kernel slows its processes down. None: no limit.
        used_bytes: of that limit, or of the machine without one. Page cache that the kernel can give up is not used.
        available_bytes: what processes can still take before a limit or the machine's end: the least of all.
        pinned_bytes: of this process, registered with a GPU's driver by models of ours or allocated pinned by torch.
        swap_total_bytes: of the machine. Swap is never counted as available.
        swap_free_bytes: of it, not in use.
    """

    total_bytes: int
    limit_bytes: int | None
    used_bytes: int
    available_bytes: int
    pinned_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int


@dataclass(frozen=True)
class DiskReading:
    """The file system of a directory at one moment, in bytes.

    Args:
        directory: that was asked for. Where it does not exist yet the nearest directory above it was read.
        total_bytes: of the file system.
        free_bytes: that this user may write. Quotas of a directory or project are not in it.
    """

    directory: Path
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class MemoryReading:
    """All that a monitor reads, at one moment.

    Args:
        device: the device's memory.
        host: host memory.
        disk: of the monitor's directory. None: it has none.
    """

    device: DeviceReading
    host: HostReading
    disk: DiskReading | None
