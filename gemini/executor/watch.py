"""The watch: no rank waits for ever, and every rank learns why another one stopped.

A rank that waits for a collective looks at the store once a second. If another rank has published an exception,
it raises `RemoteRankError` with that rank's message. If it has waited `_DIVERGED_AFTER_S`, it publishes where it is;
two ranks that wait at different places diverged, and both say so with both places. After `rank_timeout_s`
the missing rank is called lost. The watch needs the store that the process group was made with, nothing else.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gemini.errors import DivergenceError, GeminiError, RankLostError, RemoteRankError

_POLL = timedelta(seconds=1)
_DIVERGED_AFTER_S = 4.0
_UNCHANGED_S = 6.0  # a rank that is merely slow moves on within this time, on a machine that is not hopeless
_LAST_WORDS_S = 5.0  # how long to look for the message of a rank whose connection closed
_num_watches = 0


class RankWatch:
    """The watch of one process group. Collective to create: every rank makes its watches in the same order."""

    def __init__(self, group: dist.ProcessGroup, rank_timeout_s: float, where: Callable[[], str]) -> None:
        global _num_watches
        self.rank = group.rank()
        self.world_size = group.size()
        self.rank_timeout_s = rank_timeout_s
        self.generation = 0
        self.failed = False
        self._where = where  # (sequence and place of the collective being waited for)
        self._polls = group.name() == "gloo" if callable(getattr(group, "name", None)) else True
        ranks = "-".join(map(str, dist.get_process_group_ranks(group)))
        self._prefix = f"gemini/watch/{_num_watches}/{ranks}"
        _num_watches += 1
        self._store = PrefixStore(self._prefix, dist.distributed_c10d._get_default_store())
        _publish_on_exit(self)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective. Raises RemoteRankError, DivergenceError or RankLostError."""
        if not self._polls:
            work.wait()
            return
        started = time.monotonic()
        published = False
        seen: dict[int, str] = {}
        unchanged_s = 0.0
        try:
            while True:
                try:
                    work.wait(_POLL)
                    return
                except RuntimeError as error:
                    if "Operation timed out" not in str(error):
                        self._raise_lost(error)
                self._raise_remote()
                waited = time.monotonic() - started
                if waited > _DIVERGED_AFTER_S:
                    self._store.set(self._key(f"where/{self.rank}"), self._where())
                    published = True
                    places = self._places()
                    unchanged_s = 0.0 if places != seen else unchanged_s + _POLL.total_seconds()
                    seen = places
                    if len(set(places.values())) > 1 and unchanged_s >= _UNCHANGED_S:
                        self._raise_diverged(places)
                if waited > self.rank_timeout_s:
                    self.failed = True
                    raise RankLostError(
                        f"rank {self.rank} waited {waited:.0f} s for the others at {self._where()}; none of them "
                        f"answered. Raise rank_timeout= if a rank may be that slow"
                    )
        finally:
            if published and not self.failed:
                self._store.delete_key(self._key(f"where/{self.rank}"))

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. What another rank caused is not published again."""
        self.failed = True
        if isinstance(error, (RemoteRankError, RankLostError)):
            return
        message = f"{self.rank}\n{type(error).__name__}: {error}"
        try:
            self._store.compare_set(self._key("error"), "", message)
        except RuntimeError:  # the store's rank is gone, and with it everyone who could read the message
            return

    def rejoin(self) -> None:
        """Start a new generation together after a failure that every rank caught. Waits for all ranks."""
        self.generation += 1
        joined = self._key("joined")
        self._store.add(joined, 1)
        deadline = time.monotonic() + self.rank_timeout_s
        while self._store.add(joined, 0) < self.world_size:
            if time.monotonic() > deadline:
                raise RankLostError(
                    f"rank {self.rank} waited {self.rank_timeout_s:.0f} s to start anew after a failure"
                )
            time.sleep(0.05)
        self.failed = False

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def _read(self, name: str) -> str | None:
        key = self._key(name)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _raise_remote(self) -> None:
        try:
            error = self._read("error")
        except RuntimeError as lost:
            self.failed = True
            raise RankLostError(f"rank {self.rank}: the rank that holds the store is gone ({lost})") from None
        if error:
            rank, message = error.split("\n", 1)
            if int(rank) != self.rank:
                self.failed = True
                raise RemoteRankError(int(rank), message)

    def _places(self) -> dict[int, str]:
        """Where the ranks that have waited long are."""
        places = {rank: self._read(f"where/{rank}") for rank in range(self.world_size)}
        return {rank: place for rank, place in places.items() if place}

    def _raise_diverged(self, places: dict[int, str]) -> NoReturn:
        time.sleep(2 * _POLL.total_seconds())  # let the others see it too before this rank leaves
        self.failed = True
        words = "; ".join(f"rank {rank} waits at {place}" for rank, place in sorted(places.items()))
        raise DivergenceError(f"ranks took different ways: {words}. All ranks must run the same operators")

    def _raise_lost(self, error: RuntimeError) -> NoReturn:
        deadline = time.monotonic() + _LAST_WORDS_S
        self._raise_remote()
        try:
            self._store.set(self._key(f"where/{self.rank}"), self._where())
            while time.monotonic() < deadline:
                self._raise_remote()
                places = self._places()
                if len(set(places.values())) > 1:
                    self._raise_diverged(places)
                time.sleep(0.1)
        except RuntimeError as gone:
            if isinstance(gone, GeminiError):
                raise
        self.failed = True
        raise RankLostError(
            f"rank {self.rank} lost the connection to another rank at {self._where()}: {error}"
        ) from error


_watches: weakref.WeakSet[RankWatch] = weakref.WeakSet()
_previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object] | None = None


def _publish_on_exit(watch: RankWatch) -> None:
    """An exception that ends this process is published, wherever it was raised (a loss function, a data loader)."""
    global _previous_hook
    _watches.add(watch)
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _excepthook


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    for watch in list(_watches):
        watch.publish(error)
    assert _previous_hook is not None
    _previous_hook(kind, error, traceback)
