"""A trace in numbers: bytes at each moment, what was in which slot, copies, and what a step has waited for.

Nothing is counted a second time here: all figures are sums over the events of a `RankTrace`, in their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gemini.observe import (
    Allowed,
    Copied,
    Failed,
    Held,
    Met,
    Move,
    Occupied,
    Reached,
    Shortage,
    Span,
    Stepped,
    TimesRead,
)
from gemini.placement.next_use import Phase
from gemini.tracing.recording import Entry, RankTrace

THREAD = "update thread"
"""The cause of what `exposed_ms` of a step says: training has waited for the thread that updates beside it."""

BETWEEN = "between steps"
"""The position behind a step, until an operator, or another step, begins."""

_CAUSES = {"thread": THREAD, "copy": "copies", "disk": "disk", "update": "update"}


class Slice(NamedTuple):
    """Something that takes time, in a row of its kind."""

    name: str
    begin_s: float
    end_s: float
    about: Mapping[str, Any] = {}


@dataclass(frozen=True)
class TracedStep:
    """What one optimizer step has moved and waited for. It is counted from the step before, as `optimizer.last_step`.

    The first step of a trace lacks what had happened when the trace began.

    Attributes:
        number: of the step.
        moved_bytes: by link, as in `optimizer.last_step`.
        update_ms: that the thread beside training has worked, as in `optimizer.last_step`.
        exposed_ms: by cause: milliseconds for which a training thread did this, or waited for it, and nothing else.
            Each moment counts for the innermost cause. That of "update thread" is `optimizer.last_step.exposed_ms`.
    """

    number: int
    moved_bytes: Mapping[str, int]
    update_ms: float
    exposed_ms: Mapping[str, float]


@dataclass
class TierTimeline:
    """The bytes of one tier."""

    name: str
    before: dict[str, int]  # by kind
    changes: list[tuple[float, str, int]] = field(default_factory=list)  # (second, kind, more bytes)
    budgets: list[tuple[float, int | None]] = field(default_factory=list)  # (second, from then on)
    shortages: list[tuple[float, str]] = field(default_factory=list)

    def after(self) -> Counter[str]:
        """Bytes by kind at the end."""
        held = Counter(self.before)
        for _, kind, num_bytes in self.changes:
            held[kind] += num_bytes
        return held

    def kinds(self) -> list[str]:
        """All that were there, in the order of their most bytes."""
        held, most = Counter(self.before), Counter(self.before)
        for _, kind, num_bytes in self.changes:
            held[kind] += num_bytes
            most[kind] = max(most[kind], held[kind])
        return [kind for kind, num_bytes in most.most_common() if num_bytes]


class SlotUse(NamedTuple):
    """A slot had a chunk's payload or gradient."""

    slot: int
    kind: str
    num_bytes: int
    chunk: int
    begin_s: float
    end_s: float


def tiers_of(trace: RankTrace) -> list[TierTimeline]:
    """The bytes of each tier, whether there are any or not."""
    before = trace.before
    tiers = {name: TierTimeline(name, dict(+its)) for name, its in before.bytes_by_kind.items()}
    for name, its in tiers.items():
        its.budgets.append((trace.begin_s, before.capacity_bytes[name]))
    for entry in trace.entries:
        event = entry.event
        if isinstance(event, Held):
            tiers[entry.tier].changes.append((entry.at_s, event.kind, event.num_bytes))
        elif isinstance(event, Allowed):
            tiers[entry.tier].budgets.append((entry.at_s, event.capacity_bytes))
        elif isinstance(event, Shortage):
            tiers[entry.tier].shortages.append((entry.at_s, event.words))
    return list(tiers.values())


def slot_uses(trace: RankTrace) -> list[SlotUse]:
    """What was in which slot, in the order of its end."""
    open_now = {slot: (its, trace.begin_s) for slot, its in trace.before.in_slots.items()}
    held, uses = trace.before.copy(), []
    for entry in trace.entries:
        if isinstance(entry.event, Occupied):
            slot = entry.event.slot
            if slot in open_now:
                its, begin_s = open_now.pop(slot)
                uses.append(SlotUse(slot, *its, begin_s, entry.at_s))
            held.follow(entry)
            if slot in held.in_slots:
                open_now[slot] = held.in_slots[slot], entry.at_s
    return uses + [SlotUse(slot, *its, begin_s, trace.end_s) for slot, (its, begin_s) in open_now.items()]


def failures_of(trace: RankTrace) -> list[tuple[float, str]]:
    """When a forward, a backward or a step has failed, and why."""
    return [(each.at_s, each.event.words) for each in trace.entries if isinstance(each.event, Failed)]


def copies_of(trace: RankTrace) -> list[Slice]:
    """The copies between tiers; their names are the links."""
    copied = (each.event for each in trace.entries if isinstance(each.event, Copied))
    return [Slice(each.link, each.begin_s, _end_of(each), {"bytes": each.num_bytes}) for each in copied]


def _end_of(event: Copied | Met) -> float:
    """Its end. What has not ended while the trace was recorded takes no time in it."""
    return event.begin_s if event.end_s is None else event.end_s


def positions_of(trace: RankTrace) -> list[Slice]:
    """The positions in steps, one after the other, with their phases."""
    reached: list[tuple[float, int | None]] = [(trace.begin_s, trace.before.position)]
    for entry in trace.entries:
        if isinstance(entry.event, Reached):
            reached.append((entry.at_s, entry.event.position))
        elif isinstance(entry.event, Stepped):
            reached.append((entry.at_s, None))
    ends = [begin_s for begin_s, _ in reached[1:]] + [trace.end_s]
    return [
        Slice(BETWEEN, begin_s, end_s, {"phase": "between"})
        if position is None
        else Slice(trace.positions[position], begin_s, end_s, {"phase": Phase(position % len(Phase)).name.lower()})
        for (begin_s, position), end_s in zip(reached, ends, strict=True)
        if end_s > begin_s
    ]


def collectives_of(trace: RankTrace) -> list[Slice]:
    """The collectives with the bytes that this rank has sent in each."""
    # One rank sends nothing, and waits for nobody.
    several = trace.world_size > 1
    met = [each.event for each in trace.entries if several and isinstance(each.event, Met)]
    sent = [each.sent_bytes for each in met[1:]] + [trace.sent_bytes]
    return [
        Slice(
            each.what,
            each.begin_s,
            _end_of(each),
            {"bytes": after - each.sent_bytes, "chunk": each.chunk},
        )
        for each, after in zip(met, sent, strict=False)
    ]


def work_threads(trace: RankTrace) -> dict[int, str]:
    """The threads beside training, by their numbers, with names."""
    names: dict[int, str] = {}
    for entry in trace.entries:
        if isinstance(entry.event, Span) and entry.event.what in ("work", "request") and entry.thread not in names:
            is_disk = entry.event.what == "request"
            number = 1 + sum(name.startswith("disk thread") for name in names.values())
            names[entry.thread] = f"disk thread {number}" if is_disk else THREAD
    return names


def updates_of(trace: RankTrace) -> list[tuple[int, Slice]]:
    """The updates of chunks, with the threads that made them."""
    spans = [(each.thread, each.event) for each in trace.entries if isinstance(each.event, Span)]
    return [
        (thread, Slice(f"update of chunk {its.chunk}", its.begin_s, its.end_s, {"chunk": its.chunk}))
        for thread, its in spans
        if its.what == "update"
    ]


# -- What training has waited for.


class Waited(NamedTuple):
    """A part of a training thread's time, with what it was for."""

    place: int  # of the entry that told it
    thread: int
    slice: Slice


def waits_of(trace: RankTrace) -> list[Waited]:
    """What training threads did, or waited for. One may be inside another."""
    beside = work_threads(trace)
    return [
        Waited(place, entry.thread, each)
        for place, entry in enumerate(trace.entries)
        if entry.thread not in beside and not (isinstance(entry.event, Met) and trace.world_size == 1)
        for each in _waits_in(entry)
    ]


def _waits_in(entry: Entry) -> Iterator[Slice]:
    event = entry.event
    if isinstance(event, Move):
        for begin_s, end_s in event.parts:
            yield Slice(event.what, begin_s, end_s, {"chunk": event.chunk, "reason": event.reason})
    elif isinstance(event, Span) and event.what in _CAUSES:
        yield Slice(_CAUSES[event.what], event.begin_s, event.end_s)
    elif isinstance(event, Met) and event.end_s is not None:
        yield Slice("other ranks", event.waited_from_s, event.end_s, {"collective": event.what})


def alone_s(waits: Sequence[Waited]) -> list[list[tuple[float, float]]]:
    """The parts of each that are inside no other that began later."""
    parts: list[list[tuple[float, float]]] = [[] for _ in waits]
    for thread in {each.thread for each in waits}:
        its = [number for number, each in enumerate(waits) if each.thread == thread]
        _lay(parts, {number: waits[number].slice for number in its})
    return parts


def _lay(parts: list[list[tuple[float, float]]], slices: Mapping[int, Slice]) -> None:
    """Give each moment of one thread to the slice that began last and is not over."""
    running: list[int] = []  # the one that began last at the end
    now = 0.0

    def advance(until: float) -> None:
        nonlocal now
        while running:
            top = slices[running[-1]]
            end = min(top.end_s, until)
            if end > now:
                parts[running[-1]].append((now, end))
                now = end
            if top.end_s > until:
                return
            running.pop()

    for number in sorted(slices, key=lambda number: (slices[number].begin_s, -slices[number].end_s)):
        advance(slices[number].begin_s)
        now = slices[number].begin_s
        running.append(number)
    advance(float("inf"))


def steps_of(trace: RankTrace) -> list[TracedStep]:
    """The steps that have ended in the trace."""
    waits = waits_of(trace)
    by_place: dict[int, list[tuple[str, float]]] = {}
    for waited, its in zip(waits, alone_s(waits), strict=True):
        seconds = _sum(end - begin for begin, end in its)
        by_place.setdefault(waited.place, []).append((waited.slice.name, seconds))
    found: list[TracedStep] = []
    moved, exposed = Counter[str](), dict[str, float]()
    work_s = thread_s = 0.0
    times = 0.0, 0.0
    for place, entry in enumerate(trace.entries):
        event = entry.event
        for cause, seconds in by_place.get(place, ()):
            if cause == THREAD:
                thread_s += seconds
            else:
                exposed[cause] = exposed.get(cause, 0.0) + seconds
        if isinstance(event, Copied):
            moved[event.link] += event.num_bytes
        elif isinstance(event, Span) and event.what == "work":
            work_s += event.end_s - event.begin_s
        elif isinstance(event, TimesRead):
            times, work_s, thread_s = (work_s, thread_s), 0.0, 0.0
        elif isinstance(event, Stepped):
            by_cause = {cause: 1e3 * seconds for cause, seconds in exposed.items()}
            by_cause[THREAD] = 1e3 * times[1]
            found.append(TracedStep(event.report.number, dict(moved), 1e3 * times[0], by_cause))
            moved, exposed = Counter[str](), {}
    return found


def _sum(numbers: Iterable[float]) -> float:
    return sum(numbers, start=0.0)
