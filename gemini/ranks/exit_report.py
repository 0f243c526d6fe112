"""What a rank that ends tells the others, and the threads of gloo that outlive it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from gemini.errors import RemoteRankError

# -- Waits for the threads in which gloo runs collectives before the process ends.
#
# [Note: Threads at the end] gloo's thread first marks a collective as done and then releases its tensors, for which it
# takes the GIL. If the script ends meanwhile, as one does that this very mark has woken, the thread waits for the lock
# of an interpreter that is ending. Python ends such a thread in the middle of a C++ destructor, and the process aborts:
# "terminate called without an active exception", exit code -6, after all work was done. The race lasts a few
# microseconds, more on a busy machine, and exists with plain PyTorch too.


_NAME = "pt_gloo_runloop"  # torch's name for them
_LOOK_S = 0.002
_TASKS = Path("/proc/self/task")


def wait_until_gloo_is_idle(seconds: float) -> None:
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


# -- Publishes why this process ends, wherever the exception was raised, to the ranks that wait for it.


# How long to look for the last message of a rank whose connection closed, and to stay until others have read one's own.
LAST_WORDS_S = 6.0

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous_hook: _Hook | None = None
_pid: int | None = None
_ends_run: BaseException | None = None
_words = (
    "its script has ended, without an exception, while another rank still used the model. Whatever uses a model is for "
    "every rank: an equal number of batches on each, and state_dict() outside `if rank == 0`, with rank0_only=True to "
    "have the weights on rank 0 alone; where the script called sys.exit(), its own output says why"
)
_last_store: Any = None  # of the default group as it was last: the script may end the group before its own end
_place = 0, 1  # this rank and the number of ranks in it


class _Watch(Protocol):
    failed: bool

    def publish(self, error: BaseException) -> None: ...

    def let_others_hear(self, deadline: float) -> None: ...


watches: weakref.WeakSet[_Watch] = weakref.WeakSet()


def publish_exit() -> None:
    """Publish the end of this process, and its reason, from now on."""
    global _previous_hook, _pid, _last_store, _place
    if dist.is_available() and dist.is_initialized():
        _last_store, _place = default_store(), (dist.get_rank(), dist.get_world_size())
    elif _pid != os.getpid():
        _last_store, _place = None, (0, 1)  # a fork has those of the rank that it was forked from
    if _previous_hook is None:
        # Installed once a process: with a second wrapper each exception would be told twice.
        _previous_hook = sys.excepthook
        sys.excepthook = _excepthook
    # This is done once in each process: multiprocessing empties the list of finalizers that a fork inherits.
    if _pid != os.getpid():
        _pid = os.getpid()
        atexit.register(_at_exit)
        # A child of multiprocessing ends without excepthook, and without atexit if it was forked: see
        # `_at_end_of_child`.
        if multiprocessing.parent_process() is not None:
            # With this priority it runs before multiprocessing waits for children of this process, which may take long.
            Finalize(None, _at_end_of_child, exitpriority=100)
            _note_what_ends_run()


def any_ended() -> bool:
    """Whether a process of the job has published its end. One look at the store."""
    # Adding 0 reads the counter. `get` would wait for somebody to make it.
    return int(default_store().add("gemini/num_ended", 0)) > 0


def of(global_rank: int) -> str | None:
    """Why the process of `global_rank` ended; None if it has not published an end."""
    store, key = default_store(), f"gemini/ended/{global_rank}"
    return store.get(key).decode() if store.check([key]) else None


def words_of(error: BaseException) -> str:
    """The text of an exception for other ranks."""
    return f"{type(error).__name__}: {error}"


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _tell(error)
    assert _previous_hook is not None
    _previous_hook(kind, error, traceback)


def _tell(error: BaseException) -> None:
    """Publish `error` to every watch of this process, and keep its text for `_publish`."""
    global _words
    # An error that came from another rank is passed on as that rank's, so that every rank shows the first cause.
    _words = error.message if isinstance(error, RemoteRankError) else words_of(error)
    for watch in list(watches):
        watch.publish(error)


def _note_what_ends_run() -> None:
    """Python 3.13 runs a child's finalizers when the exception that ends it is forgotten: note it on its way out."""
    if sys.version_info >= (3, 13):
        monitoring = sys.monitoring
        tool = next((each for each in range(6) if monitoring.get_tool(each) is None), None)
        if tool is None:  # debuggers and profilers have them all: others hear that this process ended, and not why
            return

        def on_unwind(code: CodeType, offset: int, error: BaseException) -> None:
            global _ends_run
            if code is BaseProcess.run.__code__:
                _ends_run = error

        monitoring.use_tool_id(tool, "gemini")
        monitoring.register_callback(tool, monitoring.events.PY_UNWIND, on_unwind)
        monitoring.set_events(tool, monitoring.events.PY_UNWIND)


def _at_end_of_child() -> None:
    """Runs when a process of multiprocessing ends: it calls no excepthook, and no atexit function if it was forked.

    Up to Python 3.12 its finalizers run while the exception that ends it is handled. `torch.multiprocessing` turns the
    exception into a SystemExit first.
    """
    error = sys.exception() or _ends_run
    if isinstance(error, SystemExit):
        error = error.__context__
    if error is not None:
        _tell(error)
    atexit.unregister(_at_exit)  # a spawned process runs atexit functions, too, and would publish its end twice
    _at_exit()


def _at_exit() -> None:
    _publish()
    # Also for the user's own groups, and after `destroy_process_group()`. See [Note: Threads at the end].
    wait_until_gloo_is_idle(LAST_WORDS_S)


def _publish() -> None:
    """Write to the store that this process has ended and why, and wait until other ranks have read of a failure."""
    if _pid != os.getpid():  # a fork of this rank is no rank
        return
    store, (rank, world_size) = _last_store, _place
    if dist.is_available() and dist.is_initialized():
        store, rank, world_size = default_store(), dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return
    try:
        store.set(f"gemini/ended/{rank}", _words)
        store.add("gemini/num_ended", 1)
        deadline = time.monotonic() + LAST_WORDS_S
        for watch in list(watches):
            if watch.failed:
                watch.let_others_hear(deadline)
    except RuntimeError:  # the store is gone
        return
