"""The compiled CPU kernels, if they were built: their instruction levels, and the number of their threads.

The kernels have threads of their own: as many as the process's share of the machine's physical cores, or of those whose
time its container may use, unless `set_num_threads` or the environment's `GEMINI_NUM_THREADS` says otherwise. torch's
setting has no effect on them.
"""

from __future__ import annotations

import os
import warnings
from functools import cache
from types import ModuleType

import psutil

from optim.control_groups import cpu_quota

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
