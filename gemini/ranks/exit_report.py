"""The end of this process, published: the ranks that wait for it learn why, wherever an exception was raised."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
import weakref
from collections.abc import Callable
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, Protocol

import torch.distributed as dist

from gemini.errors import RemoteRankError
from gemini.ranks import gloo_threads

LAST_WORDS_S = 6.0  # how long to look for the message of a rank whose connection closed, and to leave one's own

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous_hook: _Hook | None = None
_pid: int | None = None
_words = "its process ended while the others waited for it; its own output says why"


class _Watch(Protocol):
    failed: bool

    def publish(self, error: BaseException) -> None: ...

    def let_others_hear(self, deadline: float) -> None: ...


watches: weakref.WeakSet[_Watch] = weakref.WeakSet()


def publish_exit() -> None:
    """From now on the end of this process is published, and why."""
    global _previous_hook, _pid
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _excepthook
    if _pid != os.getpid():
        _pid = os.getpid()
        atexit.register(_at_exit)
        if multiprocessing.parent_process() is not None:
            Finalize(None, _at_end_of_child, exitpriority=100)


def any_ended() -> bool:
    """Any process of the job, by its own words; one look at the store."""
    return int(default_store().add("gemini/num_ended", 0)) > 0


def of(global_rank: int) -> str | None:
    """Why that rank's process ended; None if it has not."""
    store, key = default_store(), f"gemini/ended/{global_rank}"
    return store.get(key).decode() if store.check([key]) else None


def words_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def default_store() -> Any:
    """The store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    _tell(error)
    assert _previous_hook is not None
    _previous_hook(kind, error, traceback)


def _tell(error: BaseException) -> None:
    global _words
    _words = error.message if isinstance(error, RemoteRankError) else words_of(error)
    for watch in list(watches):
        watch.publish(error)


def _at_end_of_child() -> None:
    """A process that multiprocessing has started ends: it calls no excepthook, and no atexit where it was forked.

    Its finalizers run while the exception that ends it is handled. `torch.multiprocessing` makes an exit of it first.
    """
    error = sys.exception()
    if isinstance(error, SystemExit):
        error = error.__context__
    if error is not None:
        _tell(error)
    atexit.unregister(_at_exit)
    _at_exit()


def _at_exit() -> None:
    _publish()
    gloo_threads.wait_until_idle(LAST_WORDS_S)  # of the user's groups, too, and after `destroy_process_group()`


def _publish() -> None:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    try:
        store = default_store()
        store.set(f"gemini/ended/{dist.get_rank()}", _words)
        store.add("gemini/num_ended", 1)
        deadline = time.monotonic() + LAST_WORDS_S
        for watch in list(watches):
            if watch.failed:
                watch.let_others_hear(deadline)
    except RuntimeError:  # the store is gone
        return
