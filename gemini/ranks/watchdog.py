"""The watchdog: no rank waits for ever, and every rank learns why another one stopped.

A rank that waits for a collective looks at the store once a second. If another rank has published an exception, or
its process has ended, it raises `RemoteRankError` with that rank's message; if the process was killed, which one on the
same host sees (processes.py), `RankLostError`. If it has waited `DIVERGED_AFTER_S`, or
for others that do not come where it meets them, it publishes where it is. Two ranks that mean different things by one
number of collective diverged, and so did two that keep waiting at different places; all say so with both places.
After `rank_timeout_s` the missing rank is called lost. The watch needs the store that the process group was made
with, nothing else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gemini.errors import DivergenceError, GeminiError, RankLostError, RemoteRankError, torn
from gemini.ranks import exit_report, processes

POLL_S = 1.0
DIVERGED_AFTER_S = 4.0
UNCHANGED_S = 6.0  # a rank that is merely slow moves on within this time, on a machine that is not hopeless
_JOIN_POLL_S = 0.02
_MEET_POLL_S = 0.0005
_SPIN_S = 0.002  # most collectives are over sooner; after that others may have the processor
_DIVERGED = f"{DivergenceError.__name__}: "
ALL_ALIKE = (
    "All ranks must run the same operators in the same order: look for code that differs by rank. If a module there "
    "chooses among its children by data, mark it with gemini.set_leaf_module() before it is wrapped"
)
_num_watches: Counter[tuple[int, ...]] = Counter()  # by the global ranks that take part


class Watchdog:
    """The watch of one process group. Collective to create: every rank makes its watches in the same order.

    blocks: the backend's `wait` holds up the host until the collective is over, as gloo's does. NCCL's only orders the
    device's stream, and the first read of a result on the host would wait for a failed rank without end.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank_timeout_s: float, where: Callable[[], tuple[int, str]], blocks: bool
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.rank_timeout_s = rank_timeout_s
        self.generation = 0
        self.failed = False
        self._met = ""  # key of this rank's last word to the others when it met them
        self._where = where  # (number, description) of the last collective
        self._blocks = blocks
        self._ranks = dist.get_process_group_ranks(group)
        together = tuple(self._ranks)
        self._prefix = f"gemini/watch/{_num_watches[together]}/{'-'.join(map(str, together))}"
        _num_watches[together] += 1
        self._store = PrefixStore(self._prefix, exit_report.default_store())
        self._heard = -1  # the last generation of whose failure this rank knows
        exit_report.publish_exit()
        processes.announce(exit_report.default_store(), dist.get_rank())
        exit_report.watches.add(self)

    @property
    def name(self) -> str:
        """Of this generation of this watch, the same on all its ranks and on none other."""
        return f"{self._prefix}/{self.generation}/group"

    def wait(self, work: dist.Work) -> None:
        """Wait for a collective. Raises RemoteRankError, DivergenceError or RankLostError."""
        started = time.monotonic()
        published = False
        seen: dict[int, tuple[str, str]] = {}
        changed = started
        try:
            while not self._done(work, POLL_S):
                self._raise_remote(work)
                now = time.monotonic()
                places = self._places()
                if now - started > DIVERGED_AFTER_S or places:
                    self._say_where()
                    published = True
                    places = self._places()
                    if places != seen:
                        seen, changed = places, now
                    if _contradict(places) or (len(set(places.values())) > 1 and now - changed >= UNCHANGED_S):
                        self._raise_diverged(places)
                self._raise_if_lost(now - started)
        finally:
            if published and not self.failed:
                self._store.delete_key(self._key(f"where/{self.rank}"))

    def meet(self) -> None:
        """Wait until all ranks are here, without a collective that could stay open.

        Raises DivergenceError on all ranks if one is elsewhere, RemoteRankError or RankLostError.
        """
        number, words = self._where()
        keys = [self._key(f"met/{number}/{rank}") for rank in range(self.world_size)]
        self._store.set(keys[self.rank], words)
        started = last_look = time.monotonic()
        while not self._store.check(keys):
            now = time.monotonic()
            if now - last_look > POLL_S:
                last_look = now
                self._raise_remote(None)
                self._say_where()
                if _contradict(places := self._places()):
                    self._raise_diverged(places)
                self._raise_if_lost(now - started)
            time.sleep(_MEET_POLL_S)
        said = {rank: (str(number), self._store.get(key).decode()) for rank, key in enumerate(keys)}
        if _contradict(said):
            self._raise_diverged(said)
        self._store.delete_key(self._key(f"where/{self.rank}"))
        if self._met:
            self._store.delete_key(self._met)  # by now all have read it
        self._met = keys[self.rank]

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. What another rank caused is not published again."""
        self.failed = True
        if isinstance(error, RemoteRankError):
            return
        try:
            self._store.compare_set(self._key("error"), "", f"{self.rank}\n{exit_report.words_of(error)}")
            self._note_heard()
        except RuntimeError:  # the store's rank is gone, and with it everyone who could read the message
            return

    def tear(self, error: BaseException) -> None:
        """This rank failed half way through an update: no generation after this one can start clean."""
        try:
            self._store.compare_set("torn", "", f"rank {self.rank}: {exit_report.words_of(error)}")
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
        pause_s = _MEET_POLL_S  # ranks that come together do not wait for long
        while count < self.world_size:
            now = time.monotonic()
            if now > deadline:
                raise RankLostError(
                    f"rank {self.rank} waited {self.rank_timeout_s:.0f} s for the others to start together"
                )
            if now - last_look > POLL_S:
                last_look = now
                self._raise_remote(None)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _JOIN_POLL_S)
            count = self._store.add(joined, 0)
        self._raise_torn()

    def let_others_hear(self, deadline: float) -> None:
        """Before this process ends, which may hold the store: wait until every rank knows of the failure."""
        while self._heard == self.generation and time.monotonic() < deadline:
            if all(
                self._store.check([self._key(f"heard/{rank}")]) or exit_report.of(global_rank) is not None
                for rank, global_rank in enumerate(self._ranks)
            ):
                return
            time.sleep(_JOIN_POLL_S)

    def _raise_torn(self) -> None:
        if self._store.check(["torn"]):
            self.failed = True
            raise torn(self._store.get("torn").decode())

    def _done(self, work: dist.Work, seconds: float) -> bool:
        """Wait for at most `seconds`. A collective that fails is the end: its connection is gone."""
        try:
            return self._completes(work, seconds)
        except RuntimeError as error:
            if "Operation timed out" not in str(error):
                self._raise_lost(error)
            return False

    def _completes(self, work: dist.Work, seconds: float) -> bool:
        if not self._blocks:
            return _completes(work, seconds)
        work.wait(timedelta(seconds=seconds))
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
            self._raise_ended(*ended)

    def _done_at_last(self, work: dist.Work) -> bool:
        """A process may end as soon as its own part is done: what it has sent is still to arrive."""
        try:
            return self._completes(work, 2 * POLL_S)
        except RuntimeError:
            return False

    def _ended(self) -> tuple[int, str | None] | None:
        """(rank, why) of a rank whose process has ended. Why is None for one that had no time to say it."""
        store, some_spoke = exit_report.default_store(), exit_report.any_ended()
        for rank, global_rank in enumerate(self._ranks):
            if rank == self.rank:
                continue
            is_gone = processes.is_gone(store, global_rank)
            words = exit_report.of(global_rank) if is_gone or some_spoke else None  # its last word before it went
            if is_gone or words is not None:
                return rank, words
        return None

    def _raise_ended(self, rank: int, words: str | None) -> NoReturn:
        self.failed = True
        if words is not None:
            raise RemoteRankError(rank, words)
        error = RankLostError(
            f"rank {self.rank} lost rank {rank} at {self._where()[1]}: its process is gone without a word. It was "
            "killed, or crashed: its own output may say why, or the kernel's log if the host ran out of memory"
        )
        self.publish(error)  # to ranks on other hosts
        raise error

    def _raise_if_lost(self, waited_s: float) -> None:
        if waited_s > self.rank_timeout_s:
            error = RankLostError(
                f"rank {self.rank} waited {waited_s:.0f} s for the others at {self._where()[1]}; not all of them "
                "answered. Raise rank_timeout= if a rank may be that slow"
            )
            self.publish(error)
            raise error

    def _say_where(self) -> None:
        number, words = self._where()
        self._store.set(self._key(f"where/{self.rank}"), f"{number}\n{words}")

    def _places(self) -> dict[int, tuple[str, str]]:
        """(number of collective, description) of the ranks that have waited long."""
        places = {rank: self._read(f"where/{rank}") for rank in range(self.world_size)}
        return {rank: (place.split("\n")[0], place.split("\n")[1]) for rank, place in places.items() if place}

    def _raise_diverged(self, places: dict[int, tuple[str, str]]) -> NoReturn:
        words = "; ".join(f"rank {rank} waits at {place}" for rank, (_, place) in sorted(places.items()))
        error = DivergenceError(f"ranks took different ways: {words}. {ALL_ALIKE}")
        self.publish(error)
        raise error

    def _raise_lost(self, error: RuntimeError) -> NoReturn:
        """The backend gave up: because a rank is gone, or because two ranks' collectives did not fit each other."""
        deadline = time.monotonic() + exit_report.LAST_WORDS_S
        self.failed = True
        try:
            self._say_where()
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
            f"rank {self.rank} lost the connection to another rank at {self._where()[1]}: {error}"
        ) from error


def _completes(work: dist.Work, seconds: float) -> bool:
    """Look for at most `seconds` whether a collective is over; then order the stream after it."""
    started = time.monotonic()
    while not work.is_completed():
        waited_s = time.monotonic() - started
        if waited_s > seconds:
            return False
        if waited_s > _SPIN_S:
            time.sleep(_MEET_POLL_S)
    work.wait()
    return True


def _contradict(places: dict[int, tuple[str, str]]) -> bool:
    """Two ranks are at the same number of collective with different intentions: not slow, but diverged."""
    return len(set(places.values())) > len({number for number, _ in places.values()})
