"""The watchdog: no rank waits for ever, and every rank learns why another one stopped.

A rank that waits for a collective looks at the store once a second. If another rank has published an exception, or
its process has ended, it raises `RemoteRankError` with that rank's message. If the process was killed, which ranks of
the same host see (`process_is_gone`), it raises `RankLostError`. After `DIVERGED_AFTER_S`, or while it waits in
`meet`, a rank publishes where it is. Two ranks that mean different collectives by one number have diverged, and so
have two that keep waiting at different places: all ranks raise `DivergenceError` with both places. After
`rank_timeout_s` the missing rank is called lost. The watch needs nothing but the store of the process group
(`Messages`).
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from gemini.errors import DivergenceError, GeminiError, RankLostError, RemoteRankError, torn
from gemini.log import get_dist_logger
from gemini.ranks import exit_report
from gemini.ranks.store_link import give_up_after

# -- Finds ranks of this host whose processes are gone without a word: killed, or crashed.
#
# A process that ends by itself says so in the store (exit_report.py); one that is killed cannot. gloo then closes its
# connections, which a rank notices that waits for it in a collective of gloo's. A rank that waits at the store, or for
# NCCL, would wait until `rank_timeout`. So ranks look for the processes of their own host; the ranks of other hosts
# report theirs.


# Two readings of one process's start time may differ by this much, as they follow the clock.
_SAME_S = 2.0
_BOOT_ID, _PID_NAMESPACE = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")


def announce_process(store: Any, global_rank: int) -> None:
    """Publish that this process is `global_rank`. Local."""
    started = psutil.Process().create_time()
    store.set(_key(global_rank), f"{os.getpid()}\n{started}\n{_host()}")


def process_is_gone(store: Any, global_rank: int) -> bool:
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


# -- What the ranks of one watch tell one another, in the store of the process group.
#
# Messages of a generation have keys of their own: after a failure that all ranks caught nobody reads those from before.
# Any method raises RuntimeError if the rank that holds the store is gone.


class Messages:
    """This rank's messages, and those that it reads."""

    def __init__(self, prefix: str, rank: int, world_size: int) -> None:
        """prefix: of all keys, equal on all ranks of the watch, and of no other watch."""
        self.generation = 0
        self._rank = rank
        self._world_size = world_size
        self._store = PrefixStore(prefix, exit_report.default_store())
        self._heard = -1  # the last generation whose failure this rank knows of
        self._met = ""  # key of this rank's last message at a meeting

    def begin_generation(self) -> None:
        """Use other keys from now on."""
        self.generation += 1

    def _key(self, name: str) -> str:
        return f"{self.generation}/{name}"

    def _read(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    # -- failures

    def publish_failure(self, words: str) -> None:
        """Say that this rank failed, unless another has: the first failure stays, later ones are mostly its results."""
        # With "" as the expected value `compare_set` writes only if the key does not exist yet.
        self._store.compare_set(self._key("error"), "", f"{self._rank}\n{words}")
        self.note_heard()

    def failure(self) -> tuple[int, str] | None:
        """(rank, words) of the failure of this generation."""
        found = self._read(self._key("error"))
        if found is None:
            return None
        rank, words = found.split("\n", 1)
        return int(rank), words

    def note_heard(self) -> None:
        """Say that this rank knows of the failure."""
        if self._heard < self.generation:
            self._heard = self.generation
            self._store.set(self._key(f"heard/{self._rank}"), "")

    @property
    def knows_failure(self) -> bool:
        """Whether this rank knows of a failure of this generation."""
        return self._heard == self.generation

    def has_heard(self, rank: int) -> bool:
        """Whether `rank` knows of the failure of this generation."""
        return bool(self._store.check([self._key(f"heard/{rank}")]))

    def tear(self, words: str) -> None:
        """Say, for all generations to come, that this rank failed in the middle of an update."""
        self._store.compare_set("torn", "", f"rank {self._rank}: {words}")

    def torn(self) -> str | None:
        """What was said of an update that a rank did not finish."""
        return self._read("torn")

    def tell(self, topic: str, words: str) -> None:
        """Say, for all generations to come, that this rank failed in something beside the steps: the first stays."""
        self._store.compare_set(f"told/{topic}", "", f"rank {self._rank}: {words}")

    def told(self, topic: str) -> str | None:
        """What was said of it."""
        return self._read(f"told/{topic}")

    # -- places

    def say_where(self, number: int, words: str) -> None:
        """Say at which collective this rank waits."""
        self._store.set(self._key(f"where/{self._rank}"), f"{number}\n{words}")

    def places(self) -> dict[int, tuple[str, str]]:
        """(number of collective, description) of each rank that has waited for long."""
        places = {rank: self._read(self._key(f"where/{rank}")) for rank in range(self._world_size)}
        return {rank: (place.split("\n")[0], place.split("\n")[1]) for rank, place in places.items() if place}

    def drop_place(self) -> None:
        """This rank waits no more: its place must not be compared with others' places in later collectives."""
        self._store.delete_key(self._key(f"where/{self._rank}"))

    # -- meetings

    def begin_meeting(self, number: int, words: str) -> Sequence[str]:
        """Say that this rank is here, at collective `number`. Returns the keys of all ranks' messages, by rank."""
        # With the number in the key, a rank that left the schedule at another collective does not complete this
        # meeting.
        keys = [self._key(f"met/{number}/{rank}") for rank in range(self._world_size)]
        self._store.set(keys[self._rank], words)
        return keys

    def all_met(self, keys: Sequence[str]) -> bool:
        """Whether all ranks have come."""
        return bool(self._store.check(list(keys)))

    def said(self, keys: Sequence[str]) -> list[str]:
        """What the ranks said, by rank. All have come."""
        return [self._store.get(key).decode() for key in keys]

    def end_meeting(self, keys: Sequence[str]) -> None:
        """All ranks have come, so each has left the meeting before this one and has read its messages."""
        if self._met:
            self._store.delete_key(self._met)
        self._met = keys[self._rank]

    def join(self) -> int:
        """Say that this rank is at the start of the generation. Returns the number of ranks that have come there."""
        return int(self._store.add(self._key("joined"), 1))

    def num_joined(self) -> int:
        """The number of ranks that have come there."""
        # Adding 0 reads the counter.
        return int(self._store.add(self._key("joined"), 0))


POLL_S = 1.0
DIVERGED_AFTER_S = 4.0
# A slow rank moves on within this time; ranks that stay at different places for longer have diverged.
UNCHANGED_S = 6.0
# A rank that waits for longer, while others wait in no collective of the model, says so once.
ALONE_AFTER_S = 10.0
_JOIN_POLL_S = 0.02
_MEET_POLL_S = 0.0005
# Most collectives are over within this time. After it the thread sleeps, to leave the processor to others.
_SPIN_S = 0.002
_DIVERGED = f"{DivergenceError.__name__}: "
ALL_ALIKE = (
    "All ranks must run the same operators in the same order: look for code that differs by rank. If a module there "
    "chooses by data among its children, or among experts in one tensor, mark its class with "
    "gemini.set_leaf_module(model, [TheClass]) before the model is wrapped"
)
IN_BACKWARD, IN_STEP = "backward", "the optimizer step"
"""How the words for a place in a step begin, or what they are."""
USED_ALONE = (
    "What uses the model takes all ranks: call it on every rank, not under `if accelerator.is_main_process`, or enter "
    "gathered_for_generation() of the accelerator, trainer or engine on every rank and call the module inside on one"
)
STARTED_ALONE = (
    "A model is wrapped, and goes on after an error, on every rank: look for code that differs by rank, such as "
    "ShardedModel(...) under `if rank == 0`. Raise rank_timeout= if a rank may be that slow"
)
_num_watches: Counter[tuple[int, ...]] = Counter()  # by the global ranks that take part
_num_boards: Counter[str] = Counter()  # of watches that were widened, likewise


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
        self._open_works: set[dist.Work] = set()
        self._blocks = blocks
        self._has_said_alone = False
        self._ranks = dist.get_process_group_ranks(group)
        together = tuple(self._ranks)
        # The count keeps two watches of the same ranks apart, as all ranks make them in one order.
        self._prefix = f"gemini/watch/{_num_watches[together]}/{'-'.join(map(str, together))}"
        _num_watches[together] += 1
        self._messages = Messages(self._prefix, self.rank, self.world_size)
        # Failures concern all ranks of a model, which may be more than meet in one group: see `widen`.
        self._board = self._messages
        self._all = list(enumerate(self._ranks))  # (rank on the board, global rank)
        exit_report.publish_exit()
        give_up_after(exit_report.default_store(), rank_timeout_s)
        announce_process(exit_report.default_store(), dist.get_rank())
        exit_report.watches.add(self)

    @property
    def name(self) -> str:
        """A name for this generation's process group, equal on all its ranks and used by no other watch."""
        return f"{self._prefix}/{self._messages.generation}/group"

    def widen(self, ranks: Sequence[int]) -> None:
        """Ranks with other parts of the model hear of failures here, and this one of theirs. Collective over all.

        ranks: all global ones, with those of this watch. They are known by their global numbers from here on.
        """
        self._all = [(rank, rank) for rank in ranks]
        prefix = f"gemini/watch of parts/{'-'.join(map(str, ranks))}"
        self._board = Messages(f"{prefix}/{_num_boards[prefix]}", dist.get_rank(), len(ranks))
        _num_boards[prefix] += 1

    def narrow(self) -> None:
        """The ranks of this watch go on by themselves: those with other parts are elsewhere. Local."""
        self._board, self._all = self._messages, list(enumerate(self._ranks))

    def begin_group(self, open_works: set[dist.Work]) -> None:
        """Collectives are those of another group from now on. open_works: takes those that this rank gives up on."""
        self._open_works = open_works

    def wait(self, work: dist.Work, is_beside: bool = False) -> None:
        """Wait for a collective. Raises RemoteRankError, DivergenceError or RankLostError.

        is_beside: it is with ranks of other parts, and none of those that are numbered: places say nothing about it.
        """
        started = time.monotonic()
        published = False
        seen: dict[int, tuple[str, str]] = {}
        changed = started
        try:
            while not self._done(work, POLL_S):
                self._raise_remote(work)
                now = time.monotonic()
                if is_beside:
                    self._raise_if_lost(now - started)
                    continue
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
                    self._warn_if_alone(places, now - started)
                self._raise_if_lost(now - started)
        except BaseException:
            self._open_works.add(work)
            raise
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
                self._warn_if_alone(places, now - started)
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
            failure = self._board.failure()
            ended = None if failure else self._ended()
        except RuntimeError:
            return "the rank that holds the store is gone"
        if failure:
            return f"rank {failure[0]}: {failure[1]}"
        return None if ended is None else f"rank {ended[0]}: {ended[1] or 'its process is gone'}"

    def tell(self, topic: str, words: str) -> None:
        """Tell whoever waits for `topic` that this rank fails in it. Local, from any thread; training goes on."""
        try:
            self._board.tell(topic, words)
        except RuntimeError:  # the rank that holds the store is gone
            return

    def told(self, topic: str) -> str | None:
        """What a rank has told about `topic`, with its number. Local, from any thread."""
        try:
            return self._board.told(topic)
        except RuntimeError:
            return "the rank that holds the store is gone"

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks that this one failed. A failure that another rank caused is not published again."""
        self.failed = True
        if isinstance(error, RemoteRankError):
            return
        try:
            self._board.publish_failure(exit_report.words_of(error))
        # The rank that holds the store is gone, so nobody could read the message.
        except RuntimeError:
            return

    def tear(self, error: BaseException) -> None:
        """Record that this rank failed in the middle of an update: no later generation can start from these weights."""
        try:
            self._board.tear(exit_report.words_of(error))
        except RuntimeError:  # the rank that holds the store is gone
            return

    def next_generation(self) -> None:
        """Begin another generation, after a failure that every rank caught: its keys are new."""
        self._messages.begin_generation()
        if self._board is not self._messages:
            self._board.begin_generation()

    def join(self) -> None:
        """Wait until all ranks have come to the start of this generation. Collective.

        Raises RankLostError after `rank_timeout_s`, and what another rank has published.
        """
        self._raise_torn()
        started = last_look = time.monotonic()
        count, num_ranks = self._board.join(), len(self._all)
        # Ranks that come together do not wait for long; a rank that waits longer asks the store less often.
        pause_s = _MEET_POLL_S
        while count < num_ranks:
            now = time.monotonic()
            waited_s = now - started
            if waited_s > self.rank_timeout_s:
                raise RankLostError(f"{self._waits_to_start(waited_s, count)}. {STARTED_ALONE}")
            if now - last_look > POLL_S:
                last_look = now
                self._raise_remote(None)
                if waited_s >= ALONE_AFTER_S:
                    self._warn_once(f"{self._waits_to_start(waited_s, count)} yet. {STARTED_ALONE}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _JOIN_POLL_S)
            count = self._board.num_joined()
        # Another rank may have published a torn update while this one waited.
        self._raise_torn()

    def let_others_hear(self, deadline: float) -> None:
        """Wait until every rank knows of the failure, before this process ends: it may hold the store."""
        while self._board.knows_failure and time.monotonic() < deadline:
            # A rank whose process has ended will never say that it has heard.
            if all(exit_report.of(self._global(rank)) is not None for rank in self._unheard()):
                return
            time.sleep(_JOIN_POLL_S)

    def wait_until_heard(self, seconds: float) -> list[int]:
        """Wait until every rank knows of the failure. Returns those that do not after that time. Local."""
        self._board.note_heard()
        deadline = time.monotonic() + seconds
        while unheard := self._unheard():
            if time.monotonic() > deadline:
                return unheard
            time.sleep(_JOIN_POLL_S)
        return []

    def failure_in_words(self) -> str:
        """Which rank has failed, and how; "" if none has said so. Local."""
        failure = self._board.failure()
        return "" if failure is None else f"rank {failure[0]}: {failure[1]}"

    def _unheard(self) -> list[int]:
        return [rank for rank, _ in self._all if not self._board.has_heard(rank)]

    def _global(self, rank: int) -> int:
        return dict(self._all)[rank]

    def raise_cause(self, error: BaseException) -> NoReturn:
        """Raise what has ended a collective that is none of this watch's: another rank's failure, or RankLostError."""
        self.failed = True
        deadline = time.monotonic() + exit_report.LAST_WORDS_S
        while time.monotonic() < deadline:
            self._raise_remote(None)
            time.sleep(_JOIN_POLL_S)
        raise RankLostError(f"rank {self.rank} lost the connection to a rank with another part: {error}") from error

    def _raise_torn(self) -> None:
        words = self._board.torn()
        if words is not None:
            self.failed = True
            raise torn(words)

    def _done(self, work: dist.Work, seconds: float, is_last: bool = False) -> bool:
        """Wait for at most `seconds`. Any failure but a timeout is final: the connection is gone.

        is_last: another rank has ended, and what it has sent may still arrive. A lost connection is no news then.
        """
        try:
            if not self._blocks:
                return _completes(work, seconds)
            # gloo's `wait` releases the GIL and wakes as soon as the collective is over, so no polling is needed.
            work.wait(timedelta(seconds=seconds))
            return True
        except RuntimeError as error:
            # gloo reports a timeout of `wait` and a lost connection by the same class.
            if not is_last and "Operation timed out" not in str(error):
                self._raise_lost(error)
            return False

    def _raise_remote(self, work: dist.Work | None) -> None:
        """Raises the error that another rank published, or that its process has ended."""
        try:
            failure = self._board.failure()
            ended = None if failure else self._ended()
            if not (failure or ended):
                return
            self._board.note_heard()
        except RuntimeError as lost:
            self.failed = True
            raise RankLostError(f"rank {self.rank}: the rank that holds the store is gone ({lost})") from None
        if failure:
            rank, message = failure
            # This rank's own message counts only if it waits for a collective again: the others will not come.
            if self._global(rank) != dist.get_rank() or work is not None:
                self.failed = True
                if message.startswith(_DIVERGED):
                    raise DivergenceError(message.removeprefix(_DIVERGED))
                raise RemoteRankError(rank, message)
        elif ended and not (work is not None and self._done(work, 2 * POLL_S, is_last=True)):
            self._raise_ended(*ended)

    def _ended(self) -> tuple[int, str | None] | None:
        """(rank, reason) of a rank whose process has ended. The reason is None if it had no time to publish one."""
        store, some_spoke = exit_report.default_store(), exit_report.any_ended()
        for rank, global_rank in self._all:
            if global_rank == dist.get_rank():
                continue
            is_gone = process_is_gone(store, global_rank)
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

    def _warn_if_alone(self, places: Mapping[int, object], waited_s: float) -> None:
        """Say once that other ranks are in no collective of this model: they may wait in another library's."""
        if waited_s < ALONE_AFTER_S or len(places) == self.world_size:
            return
        others = ", ".join(str(rank) for rank in range(self.world_size) if rank not in places)
        self._warn_once(
            f"rank {self.rank} uses the model alone, or rank {others} is slow: it has waited {waited_s:.0f} s at "
            f"{self._where()[1]}, and rank {others} is in no collective of the model. {USED_ALONE}"
        )

    def _warn_once(self, words: str) -> None:
        # A line in the log, because the other rank may be slow: a warning that is made an error would end this one.
        if not self._has_said_alone:
            self._has_said_alone = True
            get_dist_logger().warning(words)

    def _waits_to_start(self, waited_s: float, count: int) -> str:
        # No rank says who has come to the start, only how many have.
        missing = len(self._all) - count
        return (
            f"rank {self.rank} waited {waited_s:.0f} s for the others to start together, and {missing} of "
            f"{len(self._all)} ranks did not come"
        )

    def _raise_if_lost(self, waited_s: float) -> None:
        if waited_s > self.rank_timeout_s:
            error = RankLostError(
                f"rank {self.rank} waited {waited_s:.0f} s for the others at {self._where()[1]}; not all of them "
                f"answered. {USED_ALONE}. Raise rank_timeout= if a rank may be that slow"
            )
            self.publish(error)
            raise error

    def _raise_diverged(self, places: dict[int, tuple[str, str]]) -> NoReturn:
        at = {rank: place for rank, (_, place) in sorted(places.items())}
        words = "; ".join(f"rank {rank} waits at {place}" for rank, place in at.items())
        error = DivergenceError(f"ranks took different ways: {words}. {advice(at)}")
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


def advice(places: Mapping[int, str]) -> str:
    """What to do about ranks that have diverged. places: where each rank is, in words, by rank."""
    behind = [rank for rank, place in places.items() if f"{IN_BACKWARD} of " in place]
    ahead = [rank for rank, place in places.items() if IN_STEP in place]
    if not (behind and ahead):
        return ALL_ALIKE
    return (
        f"If rank {ahead[0]} made no backward because its loss had no graph to the model, as for a batch in which "
        f"everything is masked, add 0 * output.sum() of the model's output to the loss, on every rank. {ALL_ALIKE}"
    )


def _contradict(places: dict[int, tuple[str, str]]) -> bool:
    """Whether two ranks are at the same number of collective with different descriptions: diverged, not slow."""
    return len(set(places.values())) > len({number for number, _ in places.values()})
