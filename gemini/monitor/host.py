"""Readings of host memory and disks, from the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

from gemini.memory.pinned import registered_bytes
from gemini.monitor.cgroup import groups_of_process, tightest
from gemini.monitor.readings import DiskReading, HostReading

HOST_RESERVE = 0.1
"""Fraction of the available host memory that is left to the rest of the machine."""


def share_of_host(available_bytes: int) -> int:
    """One rank's share of the available host memory, without the reserve, in bytes."""
    # torchrun sets LOCAL_WORLD_SIZE: so many ranks of this host read the same free memory and plan with it.
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return int(available_bytes * (1 - HOST_RESERVE)) // max(1, num_ranks)


class HostSource:
    """Readings of the host memory that this process may use. Its control groups are looked up once, at the start."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        """proc: this process's folder in the kernel's file system."""
        self._groups = groups_of_process(proc)

    def read(self) -> HostReading:
        """The present reading."""
        machine, swap = psutil.virtual_memory(), psutil.swap_memory()
        group = tightest(self._groups)
        # `available` is the kernel's estimate (MemAvailable), which includes page cache that can be reclaimed.
        total, available = int(machine.total), int(machine.available)
        # A limit above the machine's memory does not apply.
        is_limited = group is not None and group.limit_bytes < total
        return HostReading(
            total_bytes=total,
            limit_bytes=group.limit_bytes if group is not None and is_limited else None,
            used_bytes=group.used_bytes if group is not None and is_limited else total - available,
            available_bytes=available if group is None else min(available, group.left_bytes),
            pinned_bytes=registered_bytes() + _pinned_by_torch(),
            swap_total_bytes=int(swap.total),
            swap_free_bytes=int(swap.free),
        )


class DiskSource:
    """Readings of the file system of a directory, which need not exist yet."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> DiskReading:
        """The present reading. Raises OSError if the file system does not answer."""
        existing = self._directory.absolute()
        while not existing.exists() and existing != existing.parent:
            existing = existing.parent
        found = os.statvfs(existing)
        # `f_bavail` leaves out the blocks that are reserved for root, and `f_bfree` would include them.
        return DiskReading(self._directory, found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize)


def _pinned_by_torch() -> int:
    """Bytes of torch's allocator of pinned memory, cached blocks included. 0 before CUDA is in use."""
    found = torch.cuda.host_memory_stats_as_nested_dict().get("allocated_bytes", {})
    return int(found.get("current", 0))
