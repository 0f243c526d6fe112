"""The limits that control groups put on this process's host memory.

A container, a Slurm job or a systemd unit is a control group. Groups are nested, and the kernel enforces the limits of
a process's own group and of every group around it. Version 2 has one tree; version 1, which old systems still use, has
a separate tree for memory. Linux documents them in `admin-guide/cgroup-v2` and `admin-guide/cgroup-v1/memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
        return GroupReading(min(limits), max(0, used - self._reclaimable_bytes()))

    def _reclaimable_bytes(self) -> int:
        found = 0
        for line in _text_of(self.folder / "memory.stat").splitlines():
            name, _, number = line.partition(" ")
            if name in self.files.reclaimable and number.isdecimal():
                found += int(number)
        return found


def groups_of_process(proc: Path = Path("/proc/self")) -> list[Group]:
    """The memory groups that a process is in, each before the one around it. Empty if there are none.

    proc: the process's folder in the kernel's file system.
    """
    paths = dict(_paths(_text_of(proc / "cgroup")))
    groups = []
    for files, root, mounted_at in _mounts(_text_of(proc / "mountinfo")):
        if files not in paths:
            continue
        folder = mounted_at / _below(root, paths[files])
        # The path may be one of the host's namespace. In a container only its own group is mounted.
        if not folder.is_dir():
            folder = mounted_at
        while True:
            groups.append(Group(folder, files))
            if folder == mounted_at:
                break
            folder = folder.parent
    return groups


def tightest(groups: list[Group]) -> GroupReading | None:
    """The group with the least room left. None: no group has a limit."""
    found = [reading for group in groups if (reading := group.read()) is not None]
    return min(found, key=lambda reading: reading.left_bytes, default=None)


def _paths(text: str) -> Iterator[tuple[Files, str]]:
    """Yield (version, path of the process's group) for the lines `number:controllers:path` of a cgroup file."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Version 2 has one tree for all controllers, and its line names none.
        if not controllers:
            yield V2, path
        elif "memory" in controllers.split(","):
            yield V1, path


def _mounts(text: str) -> Iterator[tuple[Files, str, Path]]:
    """Yield (version, mounted group, mount point) of each control group file system in a mountinfo file."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        # Version 2 has one tree. Version 1 mounts one for each controller, whose name is among the options of the file
        # system.
        if kind[0] == "cgroup2":
            yield V2, fields[3], Path(_unescaped(fields[4]))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield V1, fields[3], Path(_unescaped(fields[4]))


def _below(root: str, path: str) -> str:
    """`path` relative to `root`; "" if it is not below `root`."""
    if root != "/":
        if path != root and not path.startswith(root + "/"):
            return ""
        path = path[len(root) :]
    parts = path.strip("/").split("/")
    # A path with ".." leads out of the mounted tree: the process was moved out of its namespace.
    return "" if ".." in parts else "/".join(parts)


def _unescaped(path: str) -> str:
    """A path of mountinfo with its octal escapes of blanks and backslashes decoded."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _text_of(path: Path) -> str:
    """The file's text; "" if it cannot be read, because groups end and containers hide files."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _bytes_in(path: Path) -> int | None:
    text = _text_of(path).strip()
    return int(text) if text.isdecimal() else None
