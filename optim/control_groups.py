"""The control groups that this process is in, and the processor time that they allow it.

A container, a Slurm job or a systemd unit is a control group. Groups are nested, and the kernel enforces the limits of
a process's own group and of every group around it. Version 2 has one tree; version 1, which old systems still use, has
a separate tree for each controller. Linux documents them in `admin-guide/cgroup-v2` and `admin-guide/cgroup-v1`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

PROCESS = Path("/proc/self")


def group_folders(controller: str, proc: Path = PROCESS) -> list[tuple[int, Path]]:
    """(version, folder) of the groups in which a controller ("memory", "cpu") may limit this process.

    Each comes before the group around it. Empty if there are none.

    proc: the process's folder in the kernel's file system.
    """
    paths = dict(_paths(text_of(proc / "cgroup"), controller))
    folders = []
    for version, root, mounted_at in _mounts(text_of(proc / "mountinfo"), controller):
        if version not in paths:
            continue
        folder = mounted_at / _below(root, paths[version])
        # The path may be one of the host's namespace. In a container only its own group is mounted.
        if not folder.is_dir():
            folder = mounted_at
        while True:
            folders.append((version, folder))
            if folder == mounted_at:
                break
            folder = folder.parent
    return folders


def cpu_quota(proc: Path = PROCESS) -> float | None:
    """The number of cores whose time this process may use, by the tightest group. None: no group has a quota."""
    found = [_quota_of(folder, version) for version, folder in group_folders("cpu", proc)]
    return min((quota for quota in found if quota is not None), default=None)


def text_of(path: Path) -> str:
    """The file's text; "" if it cannot be read, because groups end and containers hide files."""
    try:
        return path.read_text()
    except OSError:
        return ""


def _quota_of(folder: Path, version: int) -> float | None:
    """Time divided by the period in which it may be used, both in microseconds: "150000 100000" in version 2."""
    if version == 2:
        words = text_of(folder / "cpu.max").split()
    else:
        words = [text_of(folder / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    # Without a quota the time is "max" or -1.
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):
        return None
    return int(words[0]) / int(words[1])


def _paths(text: str, controller: str) -> Iterator[tuple[int, str]]:
    """Yield (version, path of the process's group) for the lines `number:controllers:path` of a cgroup file."""
    for line in text.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # Version 2 has one tree for all controllers, and its line names none.
        if not controllers:
            yield 2, path
        elif controller in controllers.split(","):
            yield 1, path


def _mounts(text: str, controller: str) -> Iterator[tuple[int, str, Path]]:
    """Yield (version, mounted group, mount point) of each control group file system in a mountinfo file."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(" "), right.split(" ")
        if len(fields) < 5 or len(kind) < 3:
            continue
        # Version 2 has one tree. Version 1 mounts one for each controller, whose name is among the options of the file
        # system.
        if kind[0] == "cgroup2":
            yield 2, fields[3], Path(_unescaped(fields[4]))
        elif kind[0] == "cgroup" and controller in kind[2].split(","):
            yield 1, fields[3], Path(_unescaped(fields[4]))


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
