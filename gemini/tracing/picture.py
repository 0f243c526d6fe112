"""The picture of a trace: one HTML file, with plotly's script and the numbers in it, which opens without a network."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any

from gemini.observe import Stepped
from gemini.tracing.recording import RankTrace
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
)

Json = dict[str, Any]

_PAGE = Path(__file__).with_name("picture.html")
# A page stays quick with this many bars in a row. Nothing that a screen could show is lost, and sums stay.
MOST_BARS = 1500


def script() -> str:
    """plotly's script. Raises ImportError, with what to install."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            "gemini.trace draws with the package plotly: pip install plotly, or 'gemini-chunks[trace]'"
        ) from error
    return str(get_plotlyjs())


def page_of(trace: RankTrace, title: str) -> str:
    """The file."""
    # "</" would end the element, whatever is around it.
    numbers = json.dumps(numbers_of(trace), separators=(",", ":")).replace("</", "<\\/")
    filled = {"TITLE": escape(title), "PLOTLY": script(), "NUMBERS": numbers}
    page = _PAGE.read_text()
    for name, text in filled.items():
        page = page.replace(f"{{{{{name}}}}}", text)
    return page


def numbers_of(trace: RankTrace) -> Json:
    """All that the page shows, in milliseconds since the trace began, and in bytes."""

    def ms(at_s: float) -> float:
        return round(1e3 * (at_s - trace.begin_s), 4)

    tiers = []
    for tier in tiers_of(trace):
        kinds = tier.kinds()
        place = {kind: number for number, kind in enumerate(kinds)}
        tiers.append(
            {
                "name": tier.name,
                "kinds": kinds,
                "before": [tier.before.get(kind, 0) for kind in kinds],
                "changes": [[ms(at), place[kind], more] for at, kind, more in tier.changes if kind in place],
                "budgets": [[ms(at), capacity] for at, capacity in tier.budgets],
                "shortages": [[ms(at), words] for at, words in tier.shortages],
            }
        )
    slots: dict[int, Json] = {}
    for use in slot_uses(trace):
        slot = slots.setdefault(use.slot, {"kind": use.kind, "bytes": use.num_bytes, "uses": []})
        slot["uses"].append([use.chunk, ms(use.begin_s), ms(use.end_s)])
    copies = copies_of(trace)
    rows = [
        {"name": link, "bars": _bars((each for each in copies if each.name == link), trace)}
        for link in sorted({each.name for each in copies})
    ]
    rows.append({"name": "other ranks", "bars": _bars(collectives_of(trace), trace)})
    by_thread: dict[int, list[Slice]] = {}
    for thread, update in updates_of(trace):
        by_thread.setdefault(thread, []).append(update)
    for thread, updates in by_thread.items():
        name = "updates" if thread == trace.main_thread else "updates, thread"
        rows.append({"name": name, "bars": _bars(updates, trace)})
    waits = waits_of(trace)
    exposed = [
        Slice(each.slice.name, *part) for each, parts in zip(waits, alone_s(waits), strict=True) for part in parts
    ]
    for cause in sorted({each.name for each in exposed}):
        rows.append(
            {"name": f"exposed: {cause}", "bars": _bars((wait for wait in exposed if wait.name == cause), trace)}
        )
    moved = Counter[str]()
    for each in copies:
        moved[each.name] += each.about["bytes"]
    positions = positions_of(trace)
    words = list(dict.fromkeys(each.name for each in positions))
    number = {each: place for place, each in enumerate(words)}
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "end": ms(trace.end_s),
        "chunks": list(trace.chunks),
        "tiers": tiers,
        "slots": sorted(slots.values(), key=lambda slot: str(slot["kind"]), reverse=True),
        "rows": [row for row in rows if row["bars"]],
        "bytes_by_link": dict(moved),
        "words": words,
        "positions": [[ms(each.begin_s), each.about["phase"], number[each.name]] for each in positions],
        "failures": [[ms(at), words] for at, words in failures_of(trace)],
        "step_ends": [ms(each.at_s) for each in trace.entries if isinstance(each.event, Stepped)],
        "steps": [
            [each.number, dict(each.moved_bytes), each.update_ms, dict(each.exposed_ms)] for each in steps_of(trace)
        ],
    }


def _bars(slices: Iterable[Slice], trace: RankTrace) -> list[list[Any]]:
    """[begin, end, bytes, number, words] of what a row shows. What a screen could not tell apart is one bar."""
    bars: list[list[Any]] = []
    least_ms = 1e3 * (trace.end_s - trace.begin_s) / MOST_BARS
    for each in sorted(slices, key=lambda each: each.begin_s):
        begin, end = (round(1e3 * (at - trace.begin_s), 4) for at in (each.begin_s, each.end_s))
        num_bytes = each.about.get("bytes", 0)
        if bars and begin <= bars[-1][1] + least_ms / 2 and max(end, bars[-1][1]) - bars[-1][0] <= least_ms:
            last = bars[-1]
            bars[-1] = [last[0], max(end, last[1]), last[2] + num_bytes, last[3] + 1, ""]
        else:
            bars.append([begin, end, num_bytes, 1, each.name])
    return bars
