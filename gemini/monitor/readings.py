"""Bytes that are free and used on the host and in the container around this process; what a reading is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from gemini.memory.arena import registered_bytes
from optim.cpu_extension import PROCESS, group_folders, text_of

# -- Readings of memory: frozen values, in bytes. `MemoryMonitor.read` makes them.


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


# -- The limits that control groups put on this process's host memory.
#
# `optim/cpu_extension.py` finds the groups. Linux documents their files in `admin-guide/cgroup-v2` and
# `admin-guide/cgroup-v1/memory`.


_UNLIMITED = 2**62  # version 1 writes the greatest page-aligned number where there is no limit


@dataclass(frozen=True)
class Files:
    """The file names of one version, and the lines of `memory.stat` that count memory which the kernel can reclaim."""

    limits: tuple[str, ...]
    use: str
    reclaimable: frozenset[str]


V2 = Files(
    # Above memory.high nothing is killed, but the kernel takes pages back and stops processes while it does.
    limits=("memory.max", "memory.high"),
    use="memory.current",
    reclaimable=frozenset(("inactive_file", "active_file", "slab_reclaimable")),
)
V1 = Files(
    limits=("memory.limit_in_bytes",),
    use="memory.usage_in_bytes",
    reclaimable=frozenset(("total_inactive_file", "total_active_file")),  # "total": with the groups inside
)


@dataclass(frozen=True)
class GroupReading:
    """The limit and use of a group that has a limit, in bytes."""

    limit_bytes: int
    used_bytes: int  # without memory that can be reclaimed

    @property
    def left_bytes(self) -> int:
        """Bytes that the group's processes can still allocate."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Group:
    """One control group."""

    folder: Path
    files: Files

    def read(self) -> GroupReading | None:
        """The group's limit and use. None without a limit, or if its files are missing or have an unknown format.

        Limits are read every time, because they can change while a process runs.
        """
        found = [_bytes_in(self.folder / name) for name in self.files.limits]
        limits = [limit for limit in found if limit is not None and limit < _UNLIMITED]
        used = _bytes_in(self.folder / self.files.use) if limits else None
        if used is None:
            return None
        # The two files are read one after the other, so the second figure may be the larger one.
        return GroupReading(min(limits), max(0, used - self._reclaimable_bytes()))

    def _reclaimable_bytes(self) -> int:
        found = 0
        for line in text_of(self.folder / "memory.stat").splitlines():
            name, _, number = line.partition(" ")
            if name in self.files.reclaimable and number.isdecimal():
                found += int(number)
        return found


def groups_of_process(proc: Path = PROCESS) -> list[Group]:
    """The memory groups that a process is in, each before the one around it. Empty if there are none.

    proc: the process's folder in the kernel's file system.
    """
    files = {1: V1, 2: V2}
    return [Group(folder, files[version]) for version, folder in group_folders("memory", proc)]


def tightest(groups: list[Group]) -> GroupReading | None:
    """The group with the least room left. None: no group has a limit."""
    # The kernel enforces the limit of every group. An outer one with a higher limit may have less room, because it also
    # holds other processes.
    found = [reading for group in groups if (reading := group.read()) is not None]
    return min(found, key=lambda reading: reading.left_bytes, default=None)


def _bytes_in(path: Path) -> int | None:
    text = text_of(path).strip()
    # Version 2 writes "max" where there is no limit.
    return int(text) if text.isdecimal() else None


# -- Readings of host memory and disks, from the kernel.


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
