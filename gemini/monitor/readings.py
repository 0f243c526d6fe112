"""Readings of memory: frozen values, in bytes. `MemoryMonitor.read` makes them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class DeviceReading:
    """The memory of one device at one moment, in bytes.

    Args:
        device: the device; "cpu" for the emulated device.
        total_bytes: capacity of the device, or of the MIG instance that the process sees. None: no bound (the emulated
            device without a capacity).
        free_bytes: bytes that no process holds. None: no bound.
        allocated_bytes: bytes in live tensors of this process, as torch's allocator rounds them.
        reserved_bytes: bytes that torch's allocator holds for this process, allocated or cached.
        inactive_bytes: cached pieces of blocks whose other pieces are in use. The allocator reuses them for tensors
            that are small enough, and cannot free them.
        peak_bytes: peak of `allocated_bytes` since it was last reset. None: unknown.
        others_bytes: bytes that other processes hold. If the driver does not distinguish processes (in most
            containers), everything outside of torch's allocator counts, including this process's CUDA context.
        tells_processes_apart: whether `others_bytes` excludes all memory of this process.
        num_ooms: how often an allocation of this process has failed since it started.
        overdrawn_bytes: bytes held beyond the capacity, after that of an emulated device was lowered.
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
        """Bytes for new tensors: free, or cached by this process. None: no bound. Negative if overdrawn."""
        if self.free_bytes is None:
            return None
        return self.free_bytes + self.reserved_bytes - self.allocated_bytes - self.overdrawn_bytes


@dataclass(frozen=True)
class HostReading:
    """Host memory at one moment, in bytes: of all processes of the machine or container, not of this rank alone.

    Args:
        total_bytes: memory of the machine.
        limit_bytes: limit of the control group with the least room, among this process's group and those around it:
            the smaller of its maximum and of the mark above which the kernel slows its processes down. None: no limit.
        used_bytes: bytes in use of that limit, or of the machine. Page cache that the kernel can reclaim is not used.
        available_bytes: bytes that processes can still allocate, by all limits and by the machine.
        pinned_bytes: bytes of this process that our models registered with a GPU's driver, or that torch pinned.
        swap_total_bytes: swap of the machine. Swap is never counted as available.
        swap_free_bytes: unused swap.
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
        directory: the requested directory. If it does not exist yet, the nearest directory above it was read.
        total_bytes: capacity of the file system.
        free_bytes: bytes that this user may write. Quotas of a directory or project are not considered.
    """

    directory: Path
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class MemoryReading:
    """Everything that a monitor reads, at one moment.

    Args:
        device: the device's memory.
        host: host memory.
        disk: the file system of the monitor's directory. None: the monitor has no directory.
    """

    device: DeviceReading
    host: HostReading
    disk: DiskReading | None
