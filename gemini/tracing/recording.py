"""What one rank does while it is traced: all that is told, in its order, and what there was before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from time import perf_counter, time
from typing import Any, NamedTuple

from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import find_times
from gemini.observe import Allowed, Copied, Failed, Feed, Held, Occupied, Reached, Span, Stepped
from gemini.runtime.manager import ChunkManager

KEPT_STEPS = 2
"""Steps that a recording keeps which is only written after a shortage, beside the one that runs."""


class Entry(NamedTuple):
    """An event, and when, where and by which thread it was told."""

    at_s: float  # of `time.perf_counter`, as all seconds here
    thread: int
    tier: str  # of a ledger's events; "" of all others
    event: object


class InSlot(NamedTuple):
    """A slot that has a chunk's payload or gradient."""

    kind: str
    num_bytes: int
    chunk: int


@dataclass
class Holdings:
    """What a rank holds at one moment."""

    bytes_by_kind: dict[str, Counter[str]]  # by tier
    capacity_bytes: dict[str, int | None]  # by tier
    in_slots: dict[int, InSlot]
    position: int = 0

    def follow(self, entry: Entry) -> None:
        """Be what there is behind this event."""
        event = entry.event
        if isinstance(event, Held):
            self.bytes_by_kind[entry.tier][event.kind] += event.num_bytes
        elif isinstance(event, Allowed):
            self.capacity_bytes[entry.tier] = event.capacity_bytes
        elif isinstance(event, Reached):
            self.position = event.position
        elif isinstance(event, Occupied):
            self.in_slots.pop(event.slot, None)
            if event.chunk is not None:
                self.in_slots[event.slot] = InSlot(event.kind, event.num_bytes, event.chunk)

    def copy(self) -> Holdings:
        """The same, to be followed from there on."""
        held = {tier: Counter(its) for tier, its in self.bytes_by_kind.items()}
        return Holdings(held, dict(self.capacity_bytes), dict(self.in_slots), self.position)


@dataclass
class RankTrace:
    """What one rank has done between two moments."""

    rank: int
    world_size: int
    begin_s: float
    end_s: float
    epoch_s: float  # what `time.time` says when `time.perf_counter` says 0, which differs among machines
    main_thread: int
    before: Holdings
    entries: Sequence[Entry]
    sent_bytes: int  # to other ranks until the end, of all that the model has sent
    chunks: Sequence[str]  # the names of their parameters
    positions: dict[int, str]  # in words, of those that were reached
    operators: Sequence[str] = field(default_factory=list)


class TraceRecording:
    """Listens to all that one model does on this rank."""

    def __init__(self, manager: ChunkManager, keeps_all: bool) -> None:
        """keeps_all: False, if only the last steps are of interest."""
        self._manager = manager
        self._keeps_all = keeps_all
        self._entries: list[Entry] = []
        self._step_ends: list[int] = []  # places in the entries
        self._ends: list[Callable[[], None]] = []
        self._begin_s = 0.0
        self._main_thread = 0
        self.at_shortage: RankTrace | None = None
        """What there was when a step had first no memory, which the script may have caught."""
        memory = manager.memory
        memory.work.join()  # the thread beside training would count bytes between the look at them and the first event
        held = {tier.name: Counter(tier.ledger.bytes_by_kind) for tier in self._tiers()}
        capacities = {tier.name: tier.capacity_bytes for tier in self._tiers()}
        self._before = Holdings(held, capacities, dict(_slots_of(manager)), manager.communicator.position.now)
        self._origin = memory.transfer.mark_now()

    def _tiers(self) -> Iterator[MemoryTier]:
        memory = self._manager.memory
        yield from memory.tiers
        if memory.disk is not None:
            yield memory.disk

    def begin(self) -> None:
        """Listen from now on."""
        self._begin_s, self._main_thread = perf_counter(), get_ident()
        manager = self._manager
        memory, communicator = manager.memory, manager.communicator
        feeds: list[tuple[str, Feed]] = [(tier.name, tier.ledger.heard) for tier in self._tiers()]
        others = [memory.transfer.heard, memory.work.heard, communicator.heard, communicator.position.heard]
        others += [manager.observer.moves, manager.observer.steps]
        if memory.disk is not None:
            others.append(memory.disk.requests)
        feeds += [("", feed) for feed in others]
        self._ends = [feed.listen(partial(self._note, tier)) for tier, feed in feeds]

    def _note(self, tier: str, event: object) -> None:
        self._entries.append(Entry(perf_counter(), get_ident(), tier, event))
        if isinstance(event, Stepped) and not self._keeps_all:
            self._step_ends.append(len(self._entries))
            if len(self._step_ends) > KEPT_STEPS:
                self._drop(self._step_ends[0])
        elif isinstance(event, Failed) and event.lacks_memory and self.at_shortage is None:
            self.at_shortage = self._trace(list(self._entries), self._before.copy())

    def _drop(self, num: int) -> None:
        """Forget the first entries: the recording begins behind them."""
        for entry in self._entries[:num]:
            self._before.follow(entry)
        self._begin_s = self._entries[num - 1].at_s
        # One operation, since another thread may add an entry meanwhile.
        del self._entries[:num]
        self._step_ends = [place - num for place in self._step_ends[1:]]

    def end(self) -> RankTrace:
        """Listen no more. Waits for the thread beside training, and for copies that were begun."""
        memory = self._manager.memory
        memory.work.join()
        for end in self._ends:
            end()
        recorded = self._trace(self._entries, self._before)
        for each in (self.at_shortage, recorded):
            if each is not None:
                _finish_copies(each, self._entries, self._origin)
        return recorded

    def _trace(self, entries: Sequence[Entry], before: Holdings) -> RankTrace:
        manager = self._manager
        communicator = manager.communicator
        reached = {before.position, *(each.event.position for each in entries if isinstance(each.event, Reached))}
        return RankTrace(
            communicator.rank,
            communicator.world_size,
            self._begin_s,
            perf_counter(),
            time() - perf_counter(),
            self._main_thread,
            before,
            entries,
            communicator.collectives.bytes_sent,
            [chunk.names() for chunk in manager.chunks],
            {position: communicator.position.describe(position) for position in reached},
            list(communicator.position.operators),
        )


def _finish_copies(trace: RankTrace, entries: Sequence[Entry], origin: Any) -> None:
    """Write down when copies have begun and ended of which that was not known when they were told.

    entries: which may go on behind those of the trace. origin: see `find_times`.
    """
    events = [each.event for each in entries]
    requests = {id(each.piece): each for each in events if isinstance(each, Span) and each.piece is not None}
    for copied in (each.event for each in trace.entries):
        if isinstance(copied, Copied):
            find_times(copied, origin)
            its = [requests[id(piece)] for piece in copied.pieces if id(piece) in requests]
            if copied.end_s is None and its:
                copied.set_times(min(each.begin_s for each in its), max(each.end_s for each in its))
            elif copied.end_s is None:
                copied.set_times(copied.begin_s, trace.end_s if copied.pieces else copied.begin_s)


def _slots_of(manager: ChunkManager) -> Iterator[tuple[int, InSlot]]:
    """The slots that have something in them."""
    memory = manager.memory
    pools = [*memory.slots, *memory.gradient_slots]
    slots = [(pool.kind, slot) for pool in pools for slot in pool.slots]
    slots += [("slots", chunk.own_slot) for chunk in manager.chunks if chunk.own_slot is not None]
    for kind, slot in slots:
        if slot.chunk is not None:
            yield id(slot), InSlot(kind, slot.num_bytes, slot.chunk)


def clock(trace: RankTrace, at_s: float) -> float:
    """A moment in seconds since 1970, which ranks of all machines count from."""
    return trace.epoch_s + at_s
