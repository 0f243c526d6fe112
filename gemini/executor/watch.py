"""The watch: no rank waits for ever, and every rank learns why another one stopped.

A rank that waits for a collective looks at the store once a second. If another rank has published an exception, or
its process has ended, it raises `RemoteRankError` with that rank's message. If it has waited `DIVERGED_AFTER_S`, it
publishes where it is; two ranks that keep waiting at different places diverged, and all say so with both places.
After `rank_timeout_s` the missing rank is called lost. The watch needs the store that the process group was made
with, nothing else.
"""

from __future__ import annotations

import atexit
import sys
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gemini.errors import DivergenceError, GeminiError, RankLostError, RemoteRankError

POLL_S = 1.0
DIVERGED_AFTER_S = 4.0
UNCHANGED_S = 6.0  # a rank that is merely slow moves on within this time, on a machine that is not hopeless
LAST_WORDS_S = 6.0  # how long to look for the message of a rank whose connection closed, and to leave one's own
_JOIN_POLL_S = 0.02
_DIVERGED = f"{DivergenceError.__name__}: "
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
        self._where = where  # (place and sequence of the collective being waited for)
        self._polls = group.name() == "gloo" if callable(getattr(group, "name", None)) else True
        self._ranks = dist.get_process_group_ranks(group)
        prefix = f"gemini/watch/{_num_watches}/{'-'.join(map(str, self._ranks))}"
        _num_watches += 1
        self._store = PrefixStore(prefix, _default_store())
        self._heard = -1  # the last generation of whose failure this rank knows
        publish_exit()
        _watches.add(self)

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective. Raises RemoteRankError, DivergenceError or RankLostError."""
        if not self._polls:
            work.wait()
            return
        started = time.monotonic()
        published = False
        seen: dict[int, str] = {}
        changed = started
        try:
            while not self._done(work, POLL_S):
                self._raise_remote(work)
                now = time.monotonic()
                places = self._places()
                if now - started > DIVERGED_AFTER_S or places:
                    self._store.set(self._key(f"where/{self.rank}"), self._where())
                    published = True
                    places = self._places()
                    if places != seen:
                        seen, changed = places, now
                    if len(set(places.values())) > 1 and now - changed >= UNCHANGED_S:
                        self._raise_diverged(places)
                if now - started > self.rank_timeout_s:
                    error = RankLostError(
                        f"rank {self.rank} waited {now - started:.0f} s for the others at {self._where()}; not all of "
                        f"them answered. Raise rank_timeout= if a rank may be that slow"
                    )
                    self.publish(error)
                    raise error
        finally:
            if published and not self.failed:
                self._store.delete_key(self._key(f"where/{self.rank}"))

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. What another rank caused is not published again."""
        self.failed = True
        if isinstance(error, RemoteRankError):
            return
        try:
            self._store.compare_set(self._key("error"), "", f"{self.rank}\n{_words(error)}")
            self._note_heard()
        except RuntimeError:  # the store's rank is gone, and with it everyone who could read the message
            return

    def tear(self, error: BaseException) -> None:
        """This rank failed half way through an update: no generation after this one can start clean."""
        try:
            self._store.compare_set("torn", "", f"rank {self.rank}: {_words(error)}")
        except RuntimeError:  # as above
            return

    def next_generation(self) -> None:
        """After a failure that every rank caught."""
        self.generation += 1

    def join(self) -> None:
        """Wait until all ranks have come to the start of this generation."""
        self._raise_torn()
        joined = self._key("joined")
        deadline = time.monotonic() + self.rank_timeout_s
        last_look = time.monotonic()
        count = self._store.add(joined, 1)
        while count < self.world_size:
            now = time.monotonic()
            if now > deadline:
                raise RankLostError(
                    f"rank {self.rank} waited {self.rank_timeout_s:.0f} s for the others to start together"
                )
            if now - last_look > POLL_S:
                last_look = now
                self._raise_remote(None)
            time.sleep(_JOIN_POLL_S)
            count = self._store.add(joined, 0)
        self._raise_torn()

    def let_others_hear(self, deadline: float) -> None:
        """Before this process ends, which may hold the store: wait until every rank knows of the failure."""
        while self._heard == self.generation and time.monotonic() < deadline:
            if all(
                self._store.check([self._key(f"heard/{rank}")]) or _default_store().check([_ended_key(global_rank)])
                for rank, global_rank in enumerate(self._ranks)
            ):
                return
            time.sleep(_JOIN_POLL_S)

    def _raise_torn(self) -> None:
        if self._store.check(["torn"]):
            self.failed = True
            raise GeminiError(
                f"an optimizer step failed half way ({self._store.get('torn').decode()}), so some weights are updated "
                "and some are not. Build model and optimizer anew and load a checkpoint"
            )

    def _done(self, work: dist.Work, seconds: float) -> bool:
        """Wait for at most `seconds`. A collective that fails is the end: its connection is gone."""
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            if "Operation timed out" not in str(error):
                self._raise_lost(error)
            return False
        return True

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def _note_heard(self) -> None:
        if self._heard < self.generation:
            self._heard = self.generation
            self._store.set(self._key(f"heard/{self.rank}"), "")

    def _read(self, name: str) -> str | None:
        key = self._key(name)
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _raise_remote(self, work: dist.Work | None) -> None:
        """Raises what another rank published, or that its process ended."""
        try:
            error = self._read("error")
            ended = None if error else self._ended()
            if not (error or ended):
                return
            self._note_heard()
        except RuntimeError as lost:
            self.failed = True
            raise RankLostError(f"rank {self.rank}: the rank that holds the store is gone ({lost})") from None
        if error:
            rank, message = error.split("\n", 1)
            if int(rank) != self.rank or work is not None:
                self.failed = True
                if message.startswith(_DIVERGED):
                    raise DivergenceError(message.removeprefix(_DIVERGED))
                raise RemoteRankError(int(rank), message)
        elif ended and not (work is not None and self._done_at_last(work)):
            self.failed = True
            raise RemoteRankError(*ended)

    def _done_at_last(self, work: dist.Work) -> bool:
        """A process may end as soon as its own part is done: what it has sent is still to arrive."""
        try:
            work.wait(timedelta(seconds=2 * POLL_S))
        except RuntimeError:
            return False
        return True

    def _ended(self) -> tuple[int, str] | None:
        """(rank, why) of a rank whose process has ended."""
        store = _default_store()
        if _num_ended(store, 0):
            for rank, global_rank in enumerate(self._ranks):
                if rank != self.rank and store.check([_ended_key(global_rank)]):
                    return rank, store.get(_ended_key(global_rank)).decode()
        return None

    def _places(self) -> dict[int, str]:
        """Where the ranks that have waited long are."""
        places = {rank: self._read(f"where/{rank}") for rank in range(self.world_size)}
        return {rank: place for rank, place in places.items() if place}

    def _raise_diverged(self, places: dict[int, str]) -> NoReturn:
        words = "; ".join(f"rank {rank} waits at {place}" for rank, place in sorted(places.items()))
        error = DivergenceError(f"ranks took different ways: {words}. All ranks must run the same operators")
        self.publish(error)
        raise error

    def _raise_lost(self, error: RuntimeError) -> NoReturn:
        """The backend gave up: because a rank is gone, or because two ranks' collectives did not fit each other."""
        deadline = time.monotonic() + LAST_WORDS_S
        self.failed = True
        try:
            self._store.set(self._key(f"where/{self.rank}"), self._where())
            while time.monotonic() < deadline:
                self._raise_remote(None)
                places = self._places()
                if len(set(places.values())) > 1:
                    self._raise_diverged(places)
                time.sleep(0.1)
        except RuntimeError as gone:
            if isinstance(gone, GeminiError):
                raise
        raise RankLostError(
            f"rank {self.rank} lost the connection to another rank at {self._where()}: {error}"
        ) from error


# -- the end of this process

_watches: weakref.WeakSet[RankWatch] = weakref.WeakSet()
_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]
_previous_hook: _Hook | None = None
_last_words = "its process ended while the others waited for it; its own output says why"


def publish_exit() -> None:
    """From now on the end of this process is published, and why: wherever an exception was raised."""
    global _previous_hook
    if _previous_hook is None:
        _previous_hook = sys.excepthook
        sys.excepthook = _excepthook
        atexit.register(_at_exit)


def _excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    global _last_words
    _last_words = error.message if isinstance(error, RemoteRankError) else _words(error)
    for watch in list(_watches):
        watch.publish(error)
    assert _previous_hook is not None
    _previous_hook(kind, error, traceback)


def _at_exit() -> None:
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    try:
        store = _default_store()
        store.set(_ended_key(dist.get_rank()), _last_words)
        _num_ended(store, 1)
        deadline = time.monotonic() + LAST_WORDS_S
        for watch in list(_watches):
            if watch.failed:
                watch.let_others_hear(deadline)
    except RuntimeError:  # the store is gone
        return


def _default_store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _ended_key(global_rank: int) -> str:
    return f"gemini/ended/{global_rank}"


def _num_ended(store: Any, more: int) -> int:
    return int(store.add("gemini/num_ended", more))


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
