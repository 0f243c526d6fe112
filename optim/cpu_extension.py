"""The kernels in C++: how they are found, and on how many cores they may run."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import psutil

# -- The control groups that this process is in, and the processor time that they allow it.
#
# A container, a Slurm job or a systemd unit is a control group. Groups are nested, and the kernel enforces the limits
# of a process's own group and of every group around it. Version 2 has one tree; version 1, which old systems still use,
# has a separate tree for each controller. Linux documents them in `admin-guide/cgroup-v2` and `admin-guide/cgroup-v1`.


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


# -- The compiled CPU kernels, if they were built: their instruction levels, and the number of their threads.
#
# The kernels have threads of their own: as many as the process's share of the machine's physical cores, or of those
# whose time its container may use, unless `set_num_threads` or the environment's `GEMINI_NUM_THREADS` says otherwise.
# torch's setting has no effect on them.


NUM_THREADS_VARIABLE = "GEMINI_NUM_THREADS"

_num_threads: int | None = None


@cache
def extension() -> ModuleType | None:
    """The module `optim._cpu`. None: it was not built."""
    try:
        from optim import _cpu
    except ImportError:
        return None
    return _cpu


@cache
def warn_missing() -> None:
    """Warn, once per process, that updates are slow without the extension."""
    warnings.warn(
        "gemini was installed without its CPU kernels (no C++ compiler?): optimizer steps on the CPU use plain torch "
        "operations, with the same results, several times slower. To build them, install a C++ compiler and CMake, "
        "then install gemini again; pip -v shows what goes wrong",
        stacklevel=3,
    )


def levels() -> tuple[str, ...]:
    """Instruction levels of this machine, best first. They differ only in speed. Empty without the extension."""
    module = extension()
    return () if module is None else tuple(module.levels())


def num_threads() -> int:
    """The number of threads of a CPU kernel."""
    return _num_threads if _num_threads is not None else _default_num_threads()


def set_num_threads(number: int | None) -> None:
    """Let CPU kernels use `number` threads. None: usable cores / ranks on this machine. Raises ValueError."""
    global _num_threads
    _num_threads = None if number is None else _positive("the number of threads", number)


@cache
def _default_num_threads() -> int:
    given = os.environ.get(NUM_THREADS_VARIABLE)
    if given:
        return _positive(NUM_THREADS_VARIABLE, int(given) if given.isdecimal() else given)
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    # A launcher or a container may have bound the process to some of the cores.
    usable = min(cores, len(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else cores
    # A container may run on every core, but only for a part of the time. More threads than that use their quota up at
    # the start of each period, and the kernel stops all of them for the rest of it.
    quota = cpu_quota()
    usable = usable if quota is None else min(usable, int(quota))
    # torchrun sets LOCAL_WORLD_SIZE to the number of ranks on the machine, which share its cores. A quota below one
    # core still leaves one thread.
    return max(1, usable // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))


def _positive(name: str, number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"{name} must be a whole number >= 1, found {number!r}")
    return number
