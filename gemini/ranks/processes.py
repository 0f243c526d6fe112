"""Which ranks' processes are gone without a word: killed, or crashed. Of the ranks on this host.

A process that ends by itself says so in the store (exit_report.py), and one that is killed cannot. gloo closes its
connections then, which is noticed where a rank waits for it in a collective of gloo's. A rank that waits at the store,
or for NCCL, would wait until `rank_timeout`. So ranks of one host look for the process itself. Of other hosts the ranks
there tell.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

_SAME_S = 2.0  # between two readings of the time at which one process began, which follow the clock
_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def announce(store: Any, global_rank: int) -> None:
    """This process is the rank. Local."""
    started = psutil.Process().create_time()
    store.set(_key(global_rank), f"{os.getpid()}\n{started}\n{_host()}")


def is_gone(store: Any, global_rank: int) -> bool:
    """The rank's process was on this host and has ended. False where that cannot be known. Local."""
    key = _key(global_rank)
    if not store.check([key]):
        return False
    pid, started, host = store.get(key).decode().split("\n")
    if host != _host():
        return False
    try:
        process = psutil.Process(int(pid))
        is_another = abs(process.create_time() - float(started)) > _SAME_S
        return is_another or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _key(global_rank: int) -> str:
    return f"gemini/process/{global_rank}"


def _host() -> str:
    """Where a number of a process means the same process: containers of one host have numbers of their own."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PID_NAMESPACE)}"
    except OSError:  # not Linux
        return platform.node()
