"""A trace in Chrome's JSON, which ui.perfetto.dev opens: a process for each rank, a row for each thread and link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from gemini.observe import Span, Stepped
from gemini.placement.demand import format_bytes
from gemini.tracing.recording import RankTrace, clock
from gemini.tracing.timeline import (
    Slice,
    alone_s,
    collectives_of,
    copies_of,
    failures_of,
    positions_of,
    slot_uses,
    steps_of,
    tiers_of,
    updates_of,
    waits_of,
    work_threads,
)

Json = dict[str, Any]


def chrome_events(trace: RankTrace) -> list[Json]:
    """The events of one rank. Times are in microseconds since its trace began."""
    rows = _Rows(trace)
    rows.add("steps", _steps(trace))
    rows.add("position in the step", positions_of(trace))
    waits = waits_of(trace)
    for thread in dict.fromkeys(each.thread for each in waits):
        name = "training" if thread == trace.main_thread else "autograd"
        rows.add(f"{name}: moves and waits", [each.slice for each in waits if each.thread == thread])
        parts = [
            Slice(each.slice.name, *part)
            for each, its in zip(waits, alone_s(waits), strict=True)
            if each.thread == thread
            for part in its
        ]
        rows.add(f"{name}: exposed, by cause", parts)
    for thread, name in sorted(work_threads(trace).items(), key=lambda each: each[1]):
        spans = [each.event for each in trace.entries if each.thread == thread and isinstance(each.event, Span)]
        work = [
            Slice(each.what, each.begin_s, each.end_s) for each in spans if each.what in ("work", "request", "disk")
        ]
        rows.add(name, work + [its for by, its in updates_of(trace) if by == thread])
    copies = copies_of(trace)
    for link in sorted({each.name for each in copies}):
        its = [each._replace(name=format_bytes(each.about["bytes"])) for each in copies if each.name == link]
        rows.add(f"link {link}", its)
    rows.add("link to other ranks", collectives_of(trace))
    uses = slot_uses(trace)
    for number, slot in enumerate(sorted({each.slot for each in uses})):
        inside = [each for each in uses if each.slot == slot]
        its = [Slice(f"chunk {each.chunk}", each.begin_s, each.end_s, {"bytes": each.num_bytes}) for each in inside]
        rows.add(f"{inside[0].kind} {number}", its)
    failures = [
        {"ph": "i", "s": "p", "name": f"failed: {words}", "pid": trace.rank, "tid": 0, "ts": rows.micros(at_s)}
        for at_s, words in failures_of(trace)
    ]
    return [*rows.events, *_counters(trace, rows), *failures]


def document(ranks: Sequence[Sequence[Json]], sums: Sequence[Json]) -> Json:
    """The file: the events of all ranks, and their sums by step."""
    first_s = min(each["begins_s"] for each in sums)
    events = []
    for its, about in zip(ranks, sums, strict=True):
        later_us = 1e6 * (about["begins_s"] - first_s)
        events += [{**event, "ts": event["ts"] + later_us} if "ts" in event else event for event in its]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"ranks": list(sums)}}


def sums_of(trace: RankTrace) -> Json:
    """Of one rank: what each step has moved, and waited for, and what tiers hold in the end."""
    steps = [
        {
            "step": each.number,
            "moved_bytes": dict(each.moved_bytes),
            "update_ms": each.update_ms,
            "exposed_ms": dict(each.exposed_ms),
        }
        for each in steps_of(trace)
    ]
    links = Counter[str]()
    for each in copies_of(trace):
        links[each.name] += each.about["bytes"]
    return {
        "rank": trace.rank,
        "begins_s": clock(trace, trace.begin_s),
        "bytes_by_link": dict(links),
        "bytes_to_other_ranks": sum(each.about["bytes"] for each in collectives_of(trace)),
        "bytes_held": {tier.name: {k: b for k, b in tier.after().items() if b} for tier in tiers_of(trace)},
        "steps": steps,
    }


class _Rows:
    """The rows of one rank. What overlaps in a row is drawn in further rows of the same name."""

    def __init__(self, trace: RankTrace) -> None:
        self._rank = trace.rank
        self._begin_s = trace.begin_s
        self._num = 0
        self.events: list[Json] = [
            {"ph": "M", "name": "process_name", "pid": trace.rank, "args": {"name": f"rank {trace.rank}"}},
            {"ph": "M", "name": "process_sort_index", "pid": trace.rank, "args": {"sort_index": trace.rank}},
        ]

    def add(self, name: str, slices: Iterable[Slice]) -> None:
        """A row with these slices."""
        lanes: list[list[float]] = []  # of each row: the ends of the slices that are open, the innermost last
        rows: list[int] = []
        for each in sorted(slices, key=lambda each: (each.begin_s, -each.end_s)):
            lane = next((number for number, ends in enumerate(lanes) if _fits(ends, each)), None)
            if lane is None:
                lanes.append([])
                rows.append(self._row(name if len(lanes) == 1 else f"{name} ({len(lanes)})"))
                lane = len(lanes) - 1
            lanes[lane].append(each.end_s)
            self.events.append(
                {
                    "ph": "X",
                    "name": each.name,
                    "cat": name,
                    "pid": self._rank,
                    "tid": rows[lane],
                    "ts": self.micros(each.begin_s),
                    "dur": 1e6 * (each.end_s - each.begin_s),
                    "args": dict(each.about),
                }
            )

    def micros(self, seconds: float) -> float:
        """A moment as the file has it."""
        return 1e6 * (seconds - self._begin_s)

    def _row(self, name: str) -> int:
        self._num += 1
        where = {"pid": self._rank, "tid": self._num}
        self.events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
        self.events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": self._num}})
        return self._num


def _fits(ends: list[float], each: Slice) -> bool:
    """Whether a slice lies behind, or whole inside, the open ones of a row. Those that are over are taken out."""
    while ends and ends[-1] <= each.begin_s:
        ends.pop()
    return not ends or each.end_s <= ends[-1]


def _steps(trace: RankTrace) -> Iterator[Slice]:
    """From each step's end to that of the next, with the figures of the next one."""
    ends = [each.at_s for each in trace.entries if isinstance(each.event, Stepped)]
    for begin_s, end_s, step in zip([trace.begin_s, *ends], ends, steps_of(trace), strict=False):
        about = {"moved bytes": dict(step.moved_bytes), "exposed ms": dict(step.exposed_ms)}
        yield Slice(f"step {step.number}", begin_s, end_s, {**about, "update ms": step.update_ms})


def _counters(trace: RankTrace, rows: _Rows) -> Iterator[Json]:
    """The bytes of each tier, by kind, and its budget."""
    for tier in tiers_of(trace):
        held = Counter(tier.before)
        what = f"{tier.name}: bytes"

        def counter(at_s: float, name: str, args: Json) -> Json:
            return {"ph": "C", "name": name, "pid": trace.rank, "ts": rows.micros(at_s), "args": args}

        yield counter(trace.begin_s, what, dict(held))
        for at_s, kind, num_bytes in tier.changes:
            held[kind] += num_bytes
            yield counter(at_s, what, {**held})
        for at_s, capacity_bytes in tier.budgets:
            if capacity_bytes is not None:
                yield counter(at_s, f"{tier.name}: budget", {"bytes": capacity_bytes})
        for at_s, words in tier.shortages:
            where = {"pid": trace.rank, "tid": 0, "ts": rows.micros(at_s)}
            yield {"ph": "i", "s": "p", "name": f"no room on the {tier.name}", **where, "args": {"why": words}}
