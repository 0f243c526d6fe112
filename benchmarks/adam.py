"""Adam on the CPU: our kernels beside what the machine's memory gives, torch's kernels and DeepSpeed's.

    python -m benchmarks.adam                                           # minutes; beside torch
    python -m benchmarks.adam --deepspeed .venv-deepspeed/bin/python    # see deepspeed_adam.py for its environment
    python -m benchmarks.adam --tiny                                    # seconds, no figures to quote
    python -m benchmarks.adam --json adam.json --plot adam.html

All is measured in one run. The cases of a group do the same work on the same tensors with the same threads and take
turns, right after one another, in an order that rotates; what counts is the median of the ratios within each round.
The tensors are at least four times the last-level caches, so every byte comes from memory. The machine's bandwidth is
the best of several loops that read and write those very tensors and add 0 (csrc/streams.cpp), and torch's add_.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks import adam_plot, machine
from benchmarks.adam_cases import PEER, Case, Group, all_norms, update_group
from benchmarks.adam_memory import ALL_WORK, CACHES, LEAST_BYTES, Memory, Work, numel_beyond_caches
from benchmarks.adam_report import Measured, as_json, show
from benchmarks.deepspeed_adam import TRAFFIC_BYTES, DeepSpeedAdam, DeepSpeedFailed
from benchmarks.launch import ROOT
from benchmarks.rounds import turn
from benchmarks.streams import CompilerMissing, library

RESULTS = ROOT / "benchmarks" / "results"
TINY_NUMEL = 2**16
WARM_UP = 1
DEEPSPEED_WORK = {
    Work("split", "bf16"): ("bf16 parameters (no master)", "fp32 master, copied to bf16"),
    Work("whole", "fp32"): ("fp32 parameters",),
    Work("whole + half", "fp32"): ("fp32 master, copied to bf16",),
}
"""Beside which work DeepSpeed's cases stand."""


def deepspeed_cases(child: DeepSpeedAdam | None, work: Work, numel: int) -> tuple[Case, ...]:
    if child is None:
        return ()
    return tuple(
        Case(f"DeepSpeedCPUAdam: {name}", PEER, numel, TRAFFIC_BYTES[name] * numel, partial(child.turn, name))
        for name in DEEPSPEED_WORK.get(work, ())
    )


@contextlib.contextmanager
def deepspeed_children(python: str | None, numel: int, threads: list[int]) -> Iterator[dict[int, DeepSpeedAdam]]:
    """A process for each number of threads; none without a python."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder, contextlib.ExitStack() as stack:
        children: dict[int, DeepSpeedAdam] = {}
        for count in threads if python is not None else ():
            children[count] = DeepSpeedAdam(str(python), numel, count, Path(folder) / f"{count}.log")
            stack.callback(children[count].close)
        yield children


def measure(groups: list[Group], rounds: int, console: Console) -> list[Measured]:
    """Rounds over all groups; warm-up rounds leave nothing behind."""
    found = [Measured(group) for group in groups]
    for number in range(-WARM_UP, rounds):
        console.print(f"round {number + 1} of {rounds}" if number >= 0 else "warm-up", style="dim")
        for measured in found:
            cases = {case.name: case for case in measured.group.cases}
            for name in turn(list(cases), number):
                seconds = cases[name].turn()
                if number >= 0:
                    measured.add(cases[name], seconds)
    return found


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after warm-up; at least nine for figures to quote.")] = 9,
    numel: Annotated[int | None, typer.Option(min=1, help="Parameters; default: 20 M or beyond caches.")] = None,
    threads: Annotated[list[int] | None, typer.Option(help="May be repeated; default: 1, 2, 4, ... cores.")] = None,
    cache_mib: Annotated[float | None, typer.Option(help="Last-level caches, where the system says it wrong.")] = None,
    deepspeed: Annotated[str | None, typer.Option(metavar="PYTHON", help="A python that has deepspeed.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="65,536 parameters: to see that it runs.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/adam*.json.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the JSON here instead.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw it: an .html file (needs plotly).")] = None,
) -> None:
    """Measure Adam's update and the gradient norm against the machine's memory and against others' kernels."""
    console = Console(width=170)
    cache_bytes = int(cache_mib * 2**20) if cache_mib is not None else machine.last_level_cache_bytes()
    enough = numel_beyond_caches(cache_bytes)
    numel = numel or (TINY_NUMEL if tiny else enough)
    if LEAST_BYTES * numel < CACHES * cache_bytes:
        console.print(f"[yellow]{numel} parameters stay in the caches: no figures to quote (use {enough})")
    counts = sorted(set(threads or machine.thread_counts(2 if tiny else None)))
    facts = machine.describe() | {"last_level_cache_bytes": cache_bytes}
    console.print(
        f"{facts['cpu']}, torch {facts['torch']}, {numel / 1e6:.1f} M parameters, threads {counts}, "
        f"caches {cache_bytes / 2**20:.0f} MiB, load {facts['load_average'][0]:.2f}"
    )
    before = torch.get_num_threads()
    try:
        library()
        memory = Memory.allocate(numel, max(4 * numel, 0 if tiny else CACHES * cache_bytes))
        with deepspeed_children(deepspeed, memory.numel, counts) as children:
            groups = [
                group
                for count in counts
                for group in (
                    *(
                        update_group(memory, work, count, deepspeed_cases(children.get(count), work, memory.numel))
                        for work in ALL_WORK
                    ),
                    *all_norms(memory, count),
                )
            ]
            found = measure(groups, rounds, console)
            if children:
                facts["deepspeed"] = next(iter(children.values())).facts
    except (CompilerMissing, DeepSpeedFailed) as failure:
        console.print(f"[red]{failure}[/red]")
        raise typer.Exit(1) from None
    finally:
        torch.set_num_threads(before)
    show(console, found)
    arguments = {"rounds": rounds, "numel": memory.numel, "threads": counts, "tiny": tiny}
    result: dict[str, Any] = {"benchmark": "adam", "machine": facts, "arguments": arguments, **as_json(found)}
    if save or json_path is not None:
        path = json_path or RESULTS / ("adam_tiny.json" if tiny else "adam.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {path.name}")
    if plot is not None:
        adam_plot.write(result, plot)
        console.print(f"written: {plot.name}")


if __name__ == "__main__":
    typer.run(main)
