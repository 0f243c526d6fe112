"""Where a training step of two ranks spends its time: wall clock by call, calls inside others included.

    python -m benchmarks.step_profile                       # at the budget of FSDP2 without resharding
    python -m benchmarks.step_profile --budget-mib 221.1

The command line's `--help` lists the other options.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_cases import Case, build, ours, plain
from benchmarks.launch import RankFailed, run_ranks
from gemini.runtime.params import ParamStore
from gemini.runtime.reduce import Reductions
from gemini.runtime.step import Payloads
from sharding import Collectives

STEPS = 10
WARM_UP = 3
RESULTS = Path(__file__).parent / "results"
TIMED: dict[type, tuple[str, ...]] = {
    Payloads: ("fetch", "fetch_ahead"),
    ParamStore: ("depart", "arrive"),
    Reductions: ("take_gradient", "end"),
    Collectives: ("start_all_gather", "start_reduce_scatter", "all_reduce_sum_", "all_reduce_max_", "check"),
}
"""Methods whose time is told."""


class Clock:
    """Seconds and calls by name, of the methods of classes that it was put around."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def around(self, kind: type, *names: str) -> None:
        for name in names:
            setattr(kind, name, self._timed(f"{kind.__name__}.{name}", getattr(kind, name)))

    def _timed(self, name: str, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - started
                self.calls[name] += 1

        return timed


def profile(rank: int, world_size: int, tiny: bool, budget_bytes: int) -> dict[str, Any]:
    """One rank's medians in ms for plain training of its own, and for ours with the time of each call a step."""
    _, tokens = build(tiny)
    alone = plain(tiny, clips=True)
    clock = Clock()
    # Before the model is made: its objects keep methods of each other.
    for kind, names in TIMED.items():
        clock.around(kind, *names)
    case = ours(tiny, clips=True, budget_bytes=budget_bytes)
    for step in range(WARM_UP):
        case.step(tokens(step, rank))
        alone.step(tokens(step, rank))
    clock.seconds.clear()
    clock.calls.clear()
    for step in range(WARM_UP, WARM_UP + STEPS):
        for each in (case, alone):
            dist.barrier()
            each.step(tokens(step, rank))
    calls = {name: (1e3 * seconds / STEPS, clock.calls[name] / STEPS) for name, seconds in clock.seconds.items()}
    return {"ours": _medians(case), "plain, alone": _medians(alone), "calls": calls}


def _medians(case: Case) -> tuple[float, float]:
    """(forward + backward, CPU time of the step) in ms."""
    times = case.times[WARM_UP:]
    return (
        1e3 * statistics.median(t.forward_backward_s for t in times),
        1e3 * statistics.median(t.cpu_s for t in times),
    )


def main(
    budget_mib: Annotated[float, typer.Option(min=0, help="Model data on each rank's device.")] = 263.2,
    tiny: Annotated[bool, typer.Option("--tiny", help="A 0.4 M model: seconds, to see that it runs.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/step_profile*.json.")] = False,
) -> None:
    """Print what a step of two ranks waits for, beside plain training without any communication."""
    console = Console()
    options = {"tiny": tiny, "budget_bytes": 2**23 if tiny else int(budget_mib * 2**20)}
    try:
        found = run_ranks("benchmarks.step_profile:profile", 2, options, 120 if tiny else 400)[0]
    except RankFailed as failure:
        console.print(f"[red]{failure}[/red]", markup=True)
        raise typer.Exit(1) from None
    for name in ("ours", "plain, alone"):
        wall, cpu = found[name]
        console.print(f"{name}: forward + backward {wall:.1f} ms, CPU time of the step {cpu:.1f} ms (medians, rank 0)")
    table = Table("call", "ms a step", "calls a step", title="ours, rank 0; calls inside others are counted in both")
    for name, (milliseconds, calls) in sorted(found["calls"].items(), key=lambda item: -item[1][0]):
        table.add_row(name, f"{milliseconds:.1f}", f"{calls:.1f}")
    console.print(table)
    if save:
        RESULTS.mkdir(parents=True, exist_ok=True)
        path = RESULTS / ("step_profile_tiny.json" if tiny else "step_profile.json")
        path.write_text(json.dumps({"options": options, **found}, indent=1) + "\n")
        console.print(f"written: {path.name}")


if __name__ == "__main__":
    typer.run(main)
