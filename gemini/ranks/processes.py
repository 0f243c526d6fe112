"""Finds ranks of this host whose processes are gone without a word: killed, or crashed.

A process that ends by itself says so in the store (exit_report.py); one that is killed cannot. gloo then closes its
connections, which a rank notices that waits for it in a collective of gloo's. A rank that waits at the store, or for
NCCL, would wait until `rank_timeout`. So ranks look for the processes of their own host; the ranks of other hosts
report theirs.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil

# Two readings of one process's start time may differ by this much, as they follow the clock.
_SAME_S = 2.0
_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def announce(store: Any, global_rank: int) -> None:
    """Publish that this process is `global_rank`. Local."""
    started = psutil.Process().create_time()
    store.set(_key(global_rank), f"{os.getpid()}\n{started}\n{_host()}")


def is_gone(store: Any, global_rank: int) -> bool:
    """Whether the rank's process was on this host and has ended. False if that cannot be known. Local."""
    key = _key(global_rank)
    if not store.check([key]):
        return False
    pid, started, host = store.get(key).decode().split("\n")
    if host != _host():
        return False
    try:
        process = psutil.Process(int(pid))
        # The system may have given the number to a new process since: only the start time tells them apart.
        is_another = abs(process.create_time() - float(started)) > _SAME_S
        # A process that has ended stays a zombie until its parent, such as a launcher, reads its exit status.
        return is_another or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:
        return False


def _key(global_rank: int) -> str:
    return f"gemini/process/{global_rank}"


def _host() -> str:
    """Identifies where process numbers are comparable: each container of a host has numbers of its own."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PID_NAMESPACE)}"
    except OSError:  # not Linux
        return platform.node()
