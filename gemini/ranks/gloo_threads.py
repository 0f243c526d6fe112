"""Waits for the threads in which gloo runs collectives before the process ends.

[Note: Threads at the end] gloo's thread first marks a collective as done and then releases its tensors, for which it
takes the GIL. If the script ends meanwhile, as one does that this very mark has woken, the thread waits for the lock of
an interpreter that is ending. Python ends such a thread in the middle of a C++ destructor, and the process aborts:
"terminate called without an active exception", exit code -6, after all work was done. The race lasts a few
microseconds, more on a busy machine, and exists with plain PyTorch too.
"""

from __future__ import annotations

import time
from pathlib import Path

_NAME = "pt_gloo_runloop"  # torch's name for them
_LOOK_S = 0.002
_TASKS = Path("/proc/self/task")


def wait_until_idle(seconds: float) -> None:
    """Wait, for at most `seconds`, until gloo's threads have released the tensors of finished collectives. Local.

    A thread that waits for the GIL sleeps, as an idle one does, but it gets the lock while this function sleeps. So
    threads that sleep at two looks in a row are idle. Threads that wait for other ranks count as idle, too: nobody
    waits for these.
    """
    # Not Linux: wait the time that the threads need on a machine that is not busy.
    if not _TASKS.is_dir():
        time.sleep(10 * _LOOK_S)
        return
    deadline = time.monotonic() + seconds
    num_quiet_looks = 0
    while num_quiet_looks < 2 and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
        num_quiet_looks = 0 if any(map(_runs, _TASKS.iterdir())) else num_quiet_looks + 1


def _runs(task: Path) -> bool:
    """Whether `task` is one of gloo's threads and has a core, or waits for one."""
    try:
        # A line such as `123 (pt_gloo_runloop) S ...`; the name may itself contain spaces and brackets.
        name, _, state = (task / "stat").read_text().partition(" (")[2].rpartition(") ")
    except (FileNotFoundError, ProcessLookupError):  # it has ended since it was listed
        return False
    return name == _NAME and not state.startswith("S")
