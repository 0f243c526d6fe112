"""The threads in which gloo runs collectives, when the process ends.

[Note: Threads at the end] gloo's thread marks a collective as done first and lets go of its tensors then, for which
it takes Python's lock. A script that ends meanwhile, as one does that the thread's mark has just woken, leaves the
thread waiting for the lock of an interpreter that is ending. Python ends such a thread in the middle of a C++
destructor, and the process aborts: "terminate called without an active exception", exit code -6, after all work
was done. This is a race of a few microseconds, which a busy machine makes longer: with plain PyTorch too.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # what torch calls them
_LOOK_S = 0.002
_TASKS = Path("/proc/self/task")


def wait_until_idle(seconds: float) -> None:
    """Wait until gloo's threads have let go of tensors of collectives that are over, but for so long only. Local.

    A thread that waits for Python's lock sleeps, as an idle one does, and gets the lock while this function sleeps:
    threads that sleep at two looks are idle. They may also wait for other ranks, which nobody waits for here.
    """
    if not _TASKS.is_dir():  # no Linux: the time that they need on a machine that is not busy
        time.sleep(10 * _LOOK_S)
        return
    deadline = time.monotonic() + seconds
    num_quiet_looks = 0
    while num_quiet_looks < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        num_quiet_looks = 0 if any(map(_runs, _TASKS.iterdir())) else num_quiet_looks + 1


def _runs(task: Path) -> bool:
    """A thread of gloo's that has a core, or waits for one."""
    try:
        name, _, state = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False
    return name == _NAME and not state.startswith("S")
