"""Counts what a training step enters of this project: functions' lines, calls, moves between files, depth, and files.

It also draws the step as a tree of the calls that a reader should know, which docs/architecture.md shows.
"""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, pairwise, takewhile
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
    GRADIENT: ("_take_gradient", "GradientRules.reduce", "GradientRules.finish"),
    OPERATOR: ("_AroundOperator.before",),
    "backward's fetch": ("Backward.node_fetch",),
    "optimizer.step()": ("ShardedOptimizer.step",),
}


# The calls that `tree_of` shows, in no order: one that no step enters any more is an error.
SHOWN = {
    "ShardedModel.__call__": "",
    "_AroundRoot.before": "the model's forward begins",
    "Trainability.before_use": "is another plan due?",
    "Step.begin_pass": "ranks compare what they expect",
    "_AroundOperator.before": "an operator begins",
    "Payloads.fetch": "",
    "NextUse.touch": "the trace: this chunk, at this event",
    "PayloadRules.fetch": "is it there, or on its way?",
    "PayloadRules._make_room": "the farthest next use leaves",
    "ParamStore.depart": "home to slot, the gather starts",
    "ParamStore.arrive": "the gather ends",
    "Binding.bind": "parameters: views of the slot",
    "Payloads.fetch_ahead": "what comes next",
    "_Pack.__call__": "autograd keeps handles of weights",
    "_AroundOperator.after": "the pins are lifted",
    "SavedTensors.unpack": "a node reads what it kept",
    "Backward.node_fetch": "",
    "GradientRules.reduce": "at one point on all ranks",
    "Reductions._start": "to the other ranks",
    "_take_gradient": "autograd has made a gradient",
    "Reductions.take_gradient": "it goes into the chunk's gradient",
    "PlaceRules.open": "a gradient slot; another may be spilled",
    "GradientRules.arrived": "is the chunk complete?",
    "GradientRules.end": "what is left is reduced",
    "Communicator.start_reduce_scatter": "then a sum in rank order",
    "Reductions._merge": "the reduced gradient comes to rest",
    "ShardedOptimizer.step": "",
    "Step.before_update": "edits come home, ranks compare",
    "OptimizerStep._collect": "stale payloads leave their slots",
    "ChunkUpdates.room": "memory comes before ranks agree",
    "summarize": "the norm; one all-reduce",
    "ChunkUpdates.update": "",
    "ChunkUpdates._prepare": "weights and master, as one run",
    "update_pieces": "the kernel",
    "ParamStore.after_update": "",
    "GradStore.end_step": "the gradients are used up",
}


class Footprint(NamedTuple):
    lines: int  # of the functions that are entered
    calls: int
    moves: int  # between files: a call into another file is one, and the return from there another
    depth: int  # the largest number of our functions that run at once, each called by another
    files: int  # that a call enters


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
def lines_of(code: CodeType) -> int:
    """Lines of a function, from its first decorator to its last statement."""
    return max(line for *_, line in code.co_lines() if line is not None) - code.co_firstlineno + 1


def moves_of(calls: Sequence[Entry]) -> int:
    """How often a reader of these entries, in their order, goes on in another file."""
    visited: list[str] = []  # the file in which the innermost function runs, after each call and each return
    running: list[tuple[int, str]] = []  # (depth, file) of the functions that run, the innermost last

    def leave(depth: int) -> None:
        while running and running[-1][0] >= depth:
            running.pop()
            visited.extend(file for _, file in running[-1:])

    for code, depth in calls:
        leave(depth)
        running.append((depth, code.co_filename))
        visited.append(code.co_filename)
    leave(0)
    return sum(before != now for before, now in pairwise(visited))


def footprint(calls: Sequence[Entry], num_times: int = 1) -> Footprint:
    """Of entries in their order; those of several equal jobs are divided among them."""
    files = {entry.code.co_filename for entry in calls}
    depth = max(entry.depth for entry in calls) - min(entry.depth for entry in calls) + 1
    lines = sum(map(lines_of, {entry.code for entry in calls}))
    return Footprint(lines, round(len(calls) / num_times), round(moves_of(calls) / num_times), depth, len(files))


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


class Shown:
    """A call that the tree shows, with all others of one name at one place of the tree."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.num_calls = 0
        self.below: dict[str, Shown] = {}

    def names(self) -> set[str]:
        """Of all functions below."""
        return set(self.below).union(*(call.names() for call in self.below.values()))


def tree_of(entries: Sequence[Entry], known: dict[str, set[str]]) -> list[str]:
    """The calls of SHOWN as an indented tree: calls of one function at one place are one line, with their number.

    known: names below a function whose calls were shown before, with which three dots are enough.
    """
    root = Shown("")
    path = [(-1, root)]  # the running calls that are shown, with their depths
    for entry in entries:
        while path[-1][0] >= entry.depth:
            path.pop()
        name = entry.code.co_qualname
        if name in SHOWN:
            file = Path(entry.code.co_filename).relative_to(ROOT).as_posix()
            shown = path[-1][1].below.setdefault(name, Shown(file.removeprefix("gemini/")))
            shown.num_calls += 1
            path.append((entry.depth, shown))
    return list(_lines(root, 1, known))


def _lines(shown: Shown, indent: int, known: dict[str, set[str]]) -> Iterator[str]:
    for name, call in shown.below.items():
        times = f" x{call.num_calls}" if call.num_calls > 1 else ""
        again = bool(call.below) and call.names() <= known.get(name, set())
        title = "  " * indent + name + times + " ..." * again
        yield f"{title:46} {call.file:32} {SHOWN[name]}".rstrip()
        if not again:
            known.setdefault(name, set()).update(call.names())
            yield from _lines(call, indent + 1, known)


def step_tree(rank: int, world_size: int, arguments: dict[str, Any]) -> list[str]:
    """The third step of a model with these arguments, on this rank, as `tree_of` shows it, under the script's lines."""
    phases, _ = third_step(arguments)
    entered = {entry.code.co_qualname for entry in chain(*phases.values())}
    assert entered >= SHOWN.keys(), f"no step enters {sorted(SHOWN.keys() - entered)}: see SHOWN"
    known: dict[str, set[str]] = {}
    return [line for script, entries in phases.items() for line in (script, *tree_of(entries, known))]


def third_step(arguments: dict[str, Any]) -> tuple[dict[str, list[Entry]], int]:
    """What each line of a script enters in its third step; the number of chunks."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    model = ShardedModel(module, device="emulated", chunk_size=WIDTH * WIDTH, **arguments)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
    loss: Any = None

    def forward() -> None:
        nonlocal loss
        loss = model(torch.ones(2, WIDTH)).square().mean()

    lines: dict[str, Callable[[], Any]] = {
        "loss = model(batch)": forward,
        "loss.backward()": lambda: loss.backward(),
        "optimizer.step()": optimizer.step,
        "optimizer.zero_grad()": optimizer.zero_grad,
    }
    for _ in range(2):
        for line in lines.values():
            line()
    phases = {script: entered_by(line) for script, line in lines.items()}
    num_chunks = len(model.chunk_manager.chunks)
    model.close()
    return phases, num_chunks


def measured(rank: int, world_size: int, arguments: dict[str, Any]) -> dict[str, Footprint]:
    """The rows of the third step of a model with these arguments, on this rank; none of what is never called."""
    phases, num_chunks = third_step(arguments)
    entries = list(chain(*phases.values()))
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
