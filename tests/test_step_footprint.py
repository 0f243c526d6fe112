"""What a reader of a training step must open: files, lines, calls and depth are counted, and may only go down.

`python -m tests.test_step_footprint` prints the table. Counted are calls of Python functions of this project, in the
third step of a model of four operators and eight chunks; files are those that a call enters, with all of their lines.
"""

import gc
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from gemini import ShardedModel, ShardedOptimizer
from gemini.memory.collector import uncollected
from optim import HybridAdam
from tests.harness.ranks import RankPool

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(f"{ROOT / package}/" for package in ("gemini", "sharding", "optim"))
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # calls before Python 3.12, and none since
WIDTH = 64  # a weight fills a chunk, so that each bias has one of its own
PLACES: dict[str, dict[str, Any]] = {"tight": {"model_data_memory": 150_000}, "fits": {}}


class Footprint(NamedTuple):
    """What some calls enter."""

    files: int
    lines: int
    calls: int
    depth: int


class Entry(NamedTuple):
    """A function of ours that was called, and how many others of ours were running then."""

    code: CodeType
    depth: int


# What a row counts: all that calls of these functions enter. Where a row is one call, it shows the largest figures.
FETCH, OPERATOR = "chunk's fetch in forward", "operator's forward hook"
GRADIENT, STEP = "gradient's way", "training step"
ROWS = {
    FETCH: ("Payloads.fetch",),
    GRADIENT: ("_take_gradient", "AccumulateAndReduce.reduce", "AccumulateAndReduce._finish"),
    OPERATOR: ("_AroundOperator.before",),
    "backward's fetch": ("Backward.node_fetch",),
    "optimizer.step()": ("ShardedOptimizer.step",),
}


# Today's figures: files, lines, calls, depth. They only go down: who lowers one writes the lower number here.
# Targets: a step of 45 files and 11,000 lines, a fetch of 10 files and 40 calls, a gradient of 13 files, 9 deep.
NOISE = 1.02  # of lines and calls
BOUNDS: dict[tuple[int, str], dict[str, tuple[int, int, int, int]]] = {
    (1, "tight"): {
        FETCH: (15, 2275, 37, 7),
        GRADIENT: (9, 1911, 18, 9),
        OPERATOR: (25, 4481, 73, 9),
        "backward's fetch": (12, 1813, 21, 6),
        "optimizer.step()": (59, 10088, 1540, 12),
        STEP: (82, 14123, 2480, 15),
    },
    (1, "fits"): {
        GRADIENT: (9, 1911, 18, 9),
        "optimizer.step()": (58, 10019, 1284, 12),
        STEP: (83, 14149, 1785, 15),
    },
    (2, "tight"): {
        FETCH: (25, 4161, 104, 9),
        GRADIENT: (34, 5979, 124, 17),
        OPERATOR: (34, 5996, 261, 11),
        "backward's fetch": (38, 6374, 184, 12),
        "optimizer.step()": (65, 11017, 1359, 13),
        STEP: (100, 16148, 3958, 17),
    },
    (2, "fits"): {
        FETCH: (23, 3689, 59, 9),
        GRADIENT: (34, 5979, 124, 17),
        OPERATOR: (33, 5895, 209, 11),
        "backward's fetch": (36, 5923, 165, 12),
        "optimizer.step()": (68, 11616, 1525, 13),
        STEP: (107, 17108, 3843, 17),
    },
}


def entered_by(function: Callable[[], Any]) -> list[Entry]:
    """Our functions that a call enters, in their order."""
    entries: list[Entry] = []
    depth = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal depth
        code = frame.f_code
        if code.co_filename.startswith(OURS) and code.co_name not in COMPREHENSIONS:
            if event == "call":
                entries.append(Entry(code, depth))
                depth += 1
            elif event == "return":
                depth -= 1

    gc.collect()
    with uncollected():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return entries


@cache
def lines_of(file: str) -> int:
    return len(Path(file).read_text().splitlines())


def footprint(calls: Sequence[Entry], num_times: int = 1) -> Footprint:
    """Of entries in their order; those of several equal jobs are divided among them."""
    files = {entry.code.co_filename for entry in calls}
    depth = max(entry.depth for entry in calls) - min(entry.depth for entry in calls) + 1
    return Footprint(len(files), sum(map(lines_of, files)), round(len(calls) / num_times), depth)


def calls_of(names: Sequence[str], entries: Sequence[Entry]) -> list[list[Entry]]:
    """What each call of one of these functions enters, but for calls inside of another."""
    found: list[list[Entry]] = []
    end = 0
    for start, entry in enumerate(entries):
        if start >= end and entry.code.co_qualname in names:
            inside = takewhile(lambda each: each.depth > entry.depth, entries[start + 1 :])
            found.append([entry, *inside])
            end = start + len(found[-1])
    return found


def measured(rank: int, world_size: int, place: str) -> dict[str, Footprint]:
    """The rows for a model at this place, on this rank. Rows of what is never called are left out."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = ShardedModel(module, device="emulated", chunk_size=WIDTH * WIDTH, **PLACES[place])
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    entries = entered_by(step)
    num_chunks = len(model.chunk_manager.chunks)
    model.close()
    rows = {}
    for row, names in ROWS.items():
        # In backward a fetch is also the point where gradients are reduced, which is counted as theirs.
        where = calls_of(ROWS[OPERATOR], entries) if row == FETCH else [entries]
        calls = [call for each in where for call in calls_of(names, each)]
        if row == GRADIENT:  # in several calls, at any time in backward
            share = footprint([entry for call in calls for entry in call], num_chunks)
            rows[row] = share._replace(depth=max(footprint(call).depth for call in calls))
        elif calls:
            rows[row] = Footprint(*map(max, zip(*map(footprint, calls), strict=True)))
    return {**rows, STEP: footprint(entries)}


def measured_on(ranks: RankPool, world_size: int, place: str) -> dict[str, Footprint]:
    rows: dict[str, Footprint] = measured(0, 1, place) if world_size == 1 else ranks(world_size).run(measured, place)[0]
    lines = [
        f"  {row:24}{f.files:5} files{f.lines:7} lines{f.calls:6} calls{f.depth:4} deep" for row, f in rows.items()
    ]
    print(f"{world_size} rank{'s' * (world_size > 1)}, {place}", *lines, sep="\n")
    return rows


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("world_size", [1, pytest.param(2, marks=pytest.mark.ranks)], ids=["1rank", "2ranks"])
def test_a_step_enters_no_more_than_it_did(ranks: RankPool, world_size: int, place: str) -> None:
    bounds, rows = BOUNDS[world_size, place], measured_on(ranks, world_size, place)
    assert rows.keys() == bounds.keys(), "what is counted has another name now: see ROWS"
    for row, (files, lines, calls, depth) in bounds.items():
        most = Footprint(files, int(lines * NOISE), int(calls * NOISE), depth)
        assert all(now <= then for now, then in zip(rows[row], most, strict=True)), f"{row}: {rows[row]} above {most}"


def main() -> None:
    """Print the table."""
    ranks = RankPool()
    for world_size, place in BOUNDS:
        measured_on(ranks, world_size, place)
    ranks.stop()


if __name__ == "__main__":
    main()
