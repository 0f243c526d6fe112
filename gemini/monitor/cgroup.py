"""The limits that control groups put on this process's host memory.

`optim/control_groups.py` finds the groups. Linux documents their files in `admin-guide/cgroup-v2` and
`admin-guide/cgroup-v1/memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from optim.control_groups import PROCESS, group_folders, text_of

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
