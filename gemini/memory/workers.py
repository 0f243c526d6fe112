"""Threads that carry out pieces of work, and waits for them that Ctrl-C may cut at any line.

[Note: Interrupted waits] Python raises KeyboardInterrupt between any two bytecodes of the main thread. The locks of
`concurrent.futures` and of the conditions of `threading` are taken in Python code: an interrupt right behind that
leaves them taken, and whoever needs one next hangs, the end of the process included. So nothing that waits for a
thread of the model uses one of these. Each thread that waits has a lock of its own, which nobody else waits for. A
queue and a set change in one operation of the interpreter. A piece of work that was not begun when its caller was
interrupted is cancelled, so that nobody waits for it. A `with` of a plain `threading.Lock` is safe: it is one
operation, too.
"""

from __future__ import annotations

import atexit
import os
import weakref
from _thread import LockType, allocate_lock, get_ident, start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from time import perf_counter

from gemini.observe import Feed, Span


class Over:
    """Whether something is over, well or with an error. Anybody may wait for it, and an interrupt may cut a wait."""

    __slots__ = ("_error", "_waiting", "is_over")

    def __init__(self) -> None:
        self.is_over = False
        self._error: BaseException | None = None
        self._waiting: deque[LockType] = deque()  # taken; one of each thread that waits, or that was interrupted

    def end(self, error: BaseException | None = None) -> None:
        """It is over; an `error` is raised by `result`. Only the first call counts."""
        if self.is_over:
            return
        self._error = error
        # Before the locks: who adds one from now on looks behind it, and does not wait.
        self.is_over = True
        while self._waiting:
            self._waiting.popleft().release()

    def wait(self) -> None:
        """Wait until it is over, however it ended. See [Note: Interrupted waits]."""
        if self.is_over:
            return
        lock = allocate_lock()
        lock.acquire()
        self._waiting.append(lock)
        if not self.is_over:
            lock.acquire()

    def result(self) -> None:
        """Wait until it is over. Raises its error."""
        self.wait()
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # else the error's traceback would keep the error


class WorkPiece(Over):
    """A piece of work that a thread carries out once."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work = [work]  # empty: somebody has taken it

    def carry_out(self) -> None:
        """Do the work, unless somebody has taken it. Called by a thread of `Workers`."""
        work = self._pop_work()
        if work is None:
            return
        failed: BaseException | None = None
        try:
            work()
        except BaseException as error:
            failed = error
        # What the work has used is free before anybody is told that it is over: a slot of which a request still had a
        # view would count as held by the user, and the next chunk as one that gets none.
        del work
        try:
            self.end(failed)
        finally:
            del failed  # else the error's traceback would keep the error

    def cancel(self, error: BaseException) -> bool:
        """End the work with an error, if no thread has taken it. False: one has, and will end it."""
        if self._pop_work() is None:
            return False
        self.end(error)
        return True

    def _pop_work(self) -> Callable[[], None] | None:
        try:
            return self._work.pop()
        except IndexError:
            return None


def give_up(pieces: Iterable[WorkPiece], error: BaseException) -> None:
    """Leave nobody waiting for pieces that a failure, or an interrupt, kept from being begun. Waits for the others."""
    for piece in pieces:
        if not piece.cancel(error):
            piece.wait()


_Queue = SimpleQueue[WorkPiece | None]  # None: the thread that takes it ends


class Workers:
    """Threads that carry out pieces of work in the order in which these begin. There are none before the first piece.

    They do not keep a process alive, and end with it once all pieces are over. That is behind the threads of the user,
    which may train after the end of the main thread: `concurrent.futures` begins nothing any more by then.
    """

    def __init__(self, num_threads: int, holds_forks_up: bool = True) -> None:
        """holds_forks_up: a fork waits for the work. False: it is of no use to a child."""
        self._num_threads = num_threads
        self.holds_forks_up = holds_forks_up
        self._queue: _Queue = SimpleQueue()
        self._threads: dict[int, Over] = {}  # by its number: that the thread has ended
        self._left: set[WorkPiece] = set()  # begun, and not over
        self.heard = Feed()
        _all_workers.add(self)

    def begin(self, pieces: Iterable[WorkPiece]) -> None:
        """Have pieces carried out. The caller gives up those of a call that has raised: see `give_up`."""
        while len(self._threads) < self._num_threads:
            ended = Over()
            # Not `threading.Thread`, whose `start` waits by such a lock: see [Note: Interrupted waits].
            self._threads[start_new_thread(_serve, (self._queue, self._left, ended, self.heard))] = ended
        for piece in pieces:
            self._left.add(piece)
            self._queue.put(piece)

    @contextmanager
    def carrying_out(self, pieces: Sequence[WorkPiece]) -> Iterator[None]:
        """Have pieces carried out. None of them is under way behind the context, an interrupted one included."""
        try:
            self.begin(pieces)
            yield
        finally:
            give_up(pieces, RuntimeError("the work before it has failed"))

    def join(self) -> None:
        """Wait until all pieces that have begun are over, however they ended."""
        for piece in list(self._left):
            piece.wait()

    def close(self) -> None:
        """Wait until all pieces are over, and end the threads. The next piece has others."""
        threads, self._threads = self._threads, {}
        if threads:
            queue, self._queue = self._queue, SimpleQueue()
            for _ in threads:
                queue.put(None)
        for number, ended in threads.items():
            # The last owner of a model may be a piece of work, which dies in a thread.
            if number != get_ident():
                ended.wait()

    def drop(self) -> None:
        """A forked child has no such threads, and its next piece gets others."""
        self._threads, self._queue = {}, SimpleQueue()
        left, self._left = self._left, set()
        # Begun by another thread of the parent while it forked.
        for piece in left:
            piece.end(RuntimeError("this process was forked before the work was done"))

    def __del__(self) -> None:
        """Nobody waits for these threads, and no piece is left: pieces hold what they belong to."""
        for _ in self._threads:
            self._queue.put(None)


def _serve(queue: _Queue, left: set[WorkPiece], ended: Over, heard: Feed) -> None:
    """What a thread does."""
    while True:
        piece = queue.get()
        if piece is None:
            break
        begin_s = perf_counter()
        piece.carry_out()
        if heard:
            heard.tell(Span("request", begin_s, perf_counter(), piece=piece))
        left.discard(piece)
        # Until the next piece comes it would keep what belongs to this one.
        del piece
    ended.end()


_all_workers: weakref.WeakSet[Workers] = weakref.WeakSet()


def _before_fork() -> None:
    # The child, such as a DataLoader's worker, would see weights that nobody updates to the end, and memory into which
    # nobody reads.
    for each in list(_all_workers):
        if each.holds_forks_up:
            each.join()


def _after_fork() -> None:
    for each in list(_all_workers):
        each.drop()


def _at_exit() -> None:
    # A thread that came to an end of its own later would use torch while that is taken down.
    for each in list(_all_workers):
        each.close()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
atexit.register(_at_exit)
