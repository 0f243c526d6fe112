"""The limits that control groups put on this process's host memory.

A container, a Slurm job or a systemd unit is a control group, and groups are nested: the kernel holds a process to the
limits of its own group and of every group around that. Version 2 has one tree; version 1, which old systems still have,
has a tree of its own for memory. Linux documents them in `admin-guide/cgroup-v2` and `admin-guide/cgroup-v1/memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 2**62  # version 1 writes the greatest page-aligned number where there is no limit


@dataclass(frozen=True)
class Files:
    """What a version calls its files, and the lines of `memory.stat` that the kernel can give up at need."""

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
    """A group that has a limit, in bytes."""

    limit_bytes: int
    used_bytes: int  # without what can be reclaimed

    @property
    def left_bytes(self) -> int:
        """What its processes can still take."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True)
class Group:
    """One control group."""

    folder: Path
    files: Files

    def read(self) -> GroupReading | None:
        """Its limit and use; None without a limit, and where the files are not there or say something unknown.

        Limits are read every time: they can be changed while a process runs.
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
    """The memory groups that a process is in, each before the one around it. Empty where there are none.

    proc: the process's folder in the kernel's file system.
    """
    paths = dict(_paths(_text_of(proc / "cgroup")))
    groups = []
    for files, root, mounted_at in _mounts(_text_of(proc / "mountinfo")):
        if files not in paths:
            continue
        folder = mounted_at / _below(root, paths[files])
        if not folder.is_dir():
            folder = mounted_at  # the path is another namespace's: what is mounted here is this container's group
        while True:
            groups.append(Group(folder, files))
            if folder == mounted_at:
                break
            folder = folder.parent
    return groups


def tightest(groups: list[Group]) -> GroupReading | None:
    """The group that leaves least room. None: no group has a limit."""
    found = [reading for group in groups if (reading := group.read()) is not None]
    return min(found, key=lambda reading: reading.left_bytes, default=None)


def _paths(text: str) -> Iterator[tuple[Files, str]]:
    """(version, path of the process's group) of the lines `number:controllers:path` of a cgroup file."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield V2, path
        elif "memory" in controllers.split(","):
            yield V1, path


def _mounts(text: str) -> Iterator[tuple[Files, str, Path]]:
    """(version, the group that is mounted, where) of a mountinfo file."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2":
            yield V2, fields[3], Path(_unescaped(fields[4]))
        elif kind[0] == "cgroup" and "memory" in kind[2].split(","):
            yield V1, fields[3], Path(_unescaped(fields[4]))


def _below(root: str, path: str) -> str:
    """`path` as seen from `root`; "" where it is not below it."""
    if root != "/":
        if path != root and not path.startswith(root + "/"):
            return ""
        path = path[len(root) :]
    parts = path.strip("/").split("/")
    return "" if ".." in parts else "/".join(parts)


def _unescaped(path: str) -> str:
    """A path of mountinfo, which writes blanks and backslashes as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _text_of(path: Path) -> str:
    """ "" where it cannot be read: groups end, and containers hide files."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _bytes_in(path: Path) -> int | None:
    text = _text_of(path).strip()
    return int(text) if text.isdecimal() else None
