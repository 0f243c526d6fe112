"""The watchdog: no rank waits for ever, and every rank learns why another one stopped.

A rank that waits for a collective looks at the store once a second. If another rank has published an exception, or its
process has ended, it raises `RemoteRankError` with that rank's message. If the process was killed, which ranks of the
same host see (processes.py), it raises `RankLostError`. After `DIVERGED_AFTER_S`, or while it waits in `meet`, a rank
publishes where it is. Two ranks that mean different collectives by one number have diverged, and so have two that keep
waiting at different places: all ranks raise `DivergenceError` with both places. After `rank_timeout_s` the missing rank
is called lost. The watch needs nothing but the store of the process group (messages.py).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch.distributed as dist

from gemini.errors import DivergenceError, GeminiError, RankLostError, RemoteRankError, torn
from gemini.ranks import exit_report, processes
from gemini.ranks.messages import Messages

POLL_S = 1.0
DIVERGED_AFTER_S = 4.0
# A slow rank moves on within this time; ranks that stay at different places for longer have diverged.
UNCHANGED_S = 6.0
_JOIN_POLL_S = 0.02
_MEET_POLL_S = 0.0005
# Most collectives are over within this time. After it the thread sleeps, to leave the processor to others.
_SPIN_S = 0.002
_DIVERGED = f"{DivergenceError.__name__}: "
ALL_ALIKE = (
    "All ranks must run the same operators in the same order: look for code that differs by rank. If a module there "
    "chooses among its children by data, mark it with gemini.set_leaf_module() before it is wrapped"
)
_num_watches: Counter[tuple[int, ...]] = Counter()  # by the global ranks that take part


class Watchdog:
    """The watch of one process group. Collective to create: every rank makes its watches in the same order.

    blocks: the backend's `wait` blocks the host until the collective is over, as gloo's does. NCCL's only orders the
    device's stream, and the first read of a result on the host would wait for a failed rank without end.
    """

    def __init__(
        self, group: dist.ProcessGroup, rank_timeout_s: float, where: Callable[[], tuple[int, str]], blocks: bool
    ) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.rank_timeout_s = rank_timeout_s
        self.failed = False
        self._where = where  # (number, description) of the last collective
        self._blocks = blocks
        self._ranks = dist.get_process_group_ranks(group)
        together = tuple(self._ranks)
        # The count keeps two watches of the same ranks apart, as all ranks make them in one order.
        self._prefix = f"gemini/watch/{_num_watches[together]}/{'-'.join(map(str, together))}"
        _num_watches[together] += 1
        self._messages = Messages(self._prefix, self.rank, self.world_size)
        exit_report.publish_exit()
        processes.announce(exit_report.default_store(), dist.get_rank())
        exit_report.watches.add(self)

    @property
    def name(self) -> str:
        """A name for this generation's process group, equal on all its ranks and used by no other watch."""
        return f"{self._prefix}/{self._messages.generation}/group"

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
                places = self._messages.places()
                # Answer as soon as another rank has published its place: it waits for this rank's to compare.
                if now - started > DIVERGED_AFTER_S or places:
                    self._messages.say_where(*self._where())
                    published = True
                    # The places are read once more, with this rank's own among them.
                    places = self._messages.places()
                    if places != seen:
                        seen, changed = places, now
                    if _contradict(places) or (len(set(places.values())) > 1 and now - changed >= UNCHANGED_S):
                        self._raise_diverged(places)
                self._raise_if_lost(now - started)
        finally:
            # After a failure the place stays: it tells the others where this rank was.
            if published and not self.failed:
                self._messages.drop_place()

    def meet(self) -> None:
        """Wait until all ranks come here, without a collective that could stay open.

        Raises DivergenceError on all ranks if one is elsewhere, RemoteRankError or RankLostError.
        """
        number, words = self._where()
        keys = self._messages.begin_meeting(number, words)
        started = last_look = time.monotonic()
        # Polled closely, since ranks usually come together; failures are looked for only once in `POLL_S`.
        while not self._messages.all_met(keys):
            now = time.monotonic()
            if now - last_look > POLL_S:
                last_look = now
                self._raise_remote(None)
                self._messages.say_where(*self._where())
                if _contradict(places := self._messages.places()):
                    self._raise_diverged(places)
                self._raise_if_lost(now - started)
            time.sleep(_MEET_POLL_S)
        said = {rank: (str(number), words) for rank, words in enumerate(self._messages.said(keys))}
        if _contradict(said):
            self._raise_diverged(said)
        # This rank may have published its place while it waited for the meeting.
        self._messages.drop_place()
        self._messages.end_meeting(keys)

    def reason_lost(self) -> str | None:
        """Why the ranks will not come together any more; None if nothing is known against it. Local, from any thread.

        For a thread that waits for other ranks beside the one that trains. That one has to hear of the failure itself:
        nothing is marked here.
        """
        if self.failed:
            return "a rank has failed"
        try:
            failure = self._messages.failure()
            ended = None if failure else self._ended()
        except RuntimeError:
            return "the rank that holds the store is gone"
        if failure:
            return f"rank {failure[0]}: {failure[1]}"
        return None if ended is None else f"rank {ended[0]}: {ended[1] or 'its process is gone'}"

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. A failure that another rank caused is not published again."""
        self.failed = True
        if isinstance(error, RemoteRankError):
            return
        try:
            self._messages.publish_failure(exit_report.words_of(error))
        # The rank that holds the store is gone, so nobody could read the message.
        except RuntimeError:
            return

    def tear(self, error: BaseException) -> None:
        """Record that this rank failed in the middle of an update: no later generation can start from these weights."""
        try:
            self._messages.tear(exit_report.words_of(error))
        except RuntimeError:  # the rank that holds the store is gone
            return

    def next_generation(self) -> None:
        """Begin another generation, after a failure that every rank caught: its keys are new."""
        self._messages.begin_generation()

    def join(self) -> None:
        """Wait until all ranks have come to the start of this generation. Collective.

        Raises RankLostError after `rank_timeout_s`, and what another rank has published.
        """
        self._raise_torn()
        deadline = time.monotonic() + self.rank_timeout_s
        last_look = time.monotonic()
        count = self._messages.join()
        # Ranks that come together do not wait for long; a rank that waits longer asks the store less often.
        pause_s = _MEET_POLL_S
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
            count = self._messages.num_joined()
        # Another rank may have published a torn update while this one waited.
        self._raise_torn()

    def let_others_hear(self, deadline: float) -> None:
        """Wait until every rank knows of the failure, before this process ends: it may hold the store."""
        while self._messages.knows_failure and time.monotonic() < deadline:
            # A rank whose process has ended will never say that it has heard.
            if all(
                self._messages.has_heard(rank) or exit_report.of(global_rank) is not None
                for rank, global_rank in enumerate(self._ranks)
            ):
                return
            time.sleep(_JOIN_POLL_S)

    def _raise_torn(self) -> None:
        words = self._messages.torn()
        if words is not None:
            self.failed = True
            raise torn(words)

    def _done(self, work: dist.Work, seconds: float) -> bool:
        """Wait for at most `seconds`. Any failure but a timeout is final: the connection is gone."""
        try:
            return self._completes(work, seconds)
        except RuntimeError as error:
            # gloo reports a timeout of `wait` and a lost connection by the same class.
            if "Operation timed out" not in str(error):
                self._raise_lost(error)
            return False

    def _completes(self, work: dist.Work, seconds: float) -> bool:
        if not self._blocks:
            return _completes(work, seconds)
        # gloo's `wait` releases the GIL and wakes as soon as the collective is over, so no polling is needed.
        work.wait(timedelta(seconds=seconds))
        return True

    def _raise_remote(self, work: dist.Work | None) -> None:
        """Raises the error that another rank published, or that its process has ended."""
        try:
            failure = self._messages.failure()
            ended = None if failure else self._ended()
            if not (failure or ended):
                return
            self._messages.note_heard()
        except RuntimeError as lost:
            self.failed = True
            raise RankLostError(f"rank {self.rank}: the rank that holds the store is gone ({lost})") from None
        if failure:
            rank, message = failure
            # This rank's own message counts only if it waits for a collective again: the others will not come.
            if rank != self.rank or work is not None:
                self.failed = True
                if message.startswith(_DIVERGED):
                    raise DivergenceError(message.removeprefix(_DIVERGED))
                raise RemoteRankError(rank, message)
        elif ended and not (work is not None and self._done_at_last(work)):
            self._raise_ended(*ended)

    def _done_at_last(self, work: dist.Work) -> bool:
        """Whether the collective completes after all: a process may end while what it has sent still arrives."""
        try:
            return self._completes(work, 2 * POLL_S)
        except RuntimeError:
            return False

    def _ended(self) -> tuple[int, str | None] | None:
        """(rank, reason) of a rank whose process has ended. The reason is None if it had no time to publish one."""
        store, some_spoke = exit_report.default_store(), exit_report.any_ended()
        for rank, global_rank in enumerate(self._ranks):
            if rank == self.rank:
                continue
            is_gone = processes.is_gone(store, global_rank)
            # A process may publish its reason right before it is gone, so this is read after `is_gone`.
            words = exit_report.of(global_rank) if is_gone or some_spoke else None
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
        # Ranks on other hosts cannot see this process.
        self.publish(error)
        raise error

    def _raise_if_lost(self, waited_s: float) -> None:
        if waited_s > self.rank_timeout_s:
            error = RankLostError(
                f"rank {self.rank} waited {waited_s:.0f} s for the others at {self._where()[1]}; not all of them "
                "answered. Raise rank_timeout= if a rank may be that slow"
            )
            self.publish(error)
            raise error

    def _raise_diverged(self, places: dict[int, tuple[str, str]]) -> NoReturn:
        words = "; ".join(f"rank {rank} waits at {place}" for rank, (_, place) in sorted(places.items()))
        error = DivergenceError(f"ranks took different ways: {words}. {ALL_ALIKE}")
        self.publish(error)
        raise error

    def _raise_lost(self, error: RuntimeError) -> NoReturn:
        """The backend gave up, because a rank is gone or because two ranks' collectives did not match.

        The message of that rank, or its place, may reach the store a moment later.
        """
        deadline = time.monotonic() + exit_report.LAST_WORDS_S
        self.failed = True
        try:
            self._messages.say_where(*self._where())
            while time.monotonic() < deadline:
                self._raise_remote(None)
                places = self._messages.places()
                if len(set(places.values())) > 1:
                    self._raise_diverged(places)
                time.sleep(0.1)
        except RuntimeError as gone:
            # An error of ours names the cause. Any other one says that the store is gone, too.
            if isinstance(gone, GeminiError):
                raise
        raise RankLostError(
            f"rank {self.rank} lost the connection to another rank at {self._where()[1]}: {error}"
        ) from error


def _completes(work: dist.Work, seconds: float) -> bool:
    """Wait for at most `seconds` for the collective to be over, then order the stream after it."""
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
    """Whether two ranks are at the same number of collective with different descriptions: diverged, not slow."""
    return len(set(places.values())) > len({number for number, _ in places.values()})
