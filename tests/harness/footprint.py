"""Counts what a training step enters of this project: files, their lines, calls of Python functions, and depth."""

import gc
import sys
from collections.abc import Callable, Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

from gemini import ShardedModel, ShardedOptimizer
from gemini.memory.modes import uncollected
from optim import HybridAdam

ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{ROOT / package}/" for package in ("gemini", "sharding", "optim"))
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>"}  # calls before Python 3.12, and none since
WIDTH = 64  # a weight fills a chunk, so that each bias has one of its own

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


class Footprint(NamedTuple):
    files: int  # that a call enters
    lines: int  # of these files, all of them
    calls: int
    depth: int  # the largest number of our functions that run at once, each called by another


class Entry(NamedTuple):
    code: CodeType  # of a function of ours that was called
    depth: int  # how many others of ours were running


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


def measured(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Footprint]:
    """The rows of the third step of a model with these arguments, on this rank; none of what is never called."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = ShardedModel(module, device="emulated", chunk_size=WIDTH * WIDTH, **arguments)
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
        if calls and row == GRADIENT:  # in several calls, at any time in backward
            share = footprint([entry for call in calls for entry in call], num_chunks)
            rows[row] = share._replace(depth=max(footprint(call).depth for call in calls))
        elif calls:
            rows[row] = Footprint(*map(max, zip(*map(footprint, calls), strict=True)))
    return {**rows, STEP: footprint(entries)}
