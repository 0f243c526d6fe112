"""What launching a collective costs beside what its bytes cost: the figure by which chunk sizes are searched.

    python -m benchmarks.collective_cost            # a quarter of a minute
    python -m benchmarks.collective_cost --tiny     # seconds: to see that it runs

Two ranks gather and reduce-scatter chunks of rising sizes, by the library's own collectives, in turn. Of each kind's
medians, the line through the smallest size and the best-fitting slope over the others gives seconds a launch and
seconds a byte; their quotient is the number of chunk bytes that a launch is worth.

A second table has torch's own collectives of a few bytes beside each other: the library takes the cheapest of them
for what ranks tell each other and for small gathers on gloo (sharding/gloo.py).
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.launch import ROOT, RankFailed, run_ranks
from benchmarks.rounds import turn
from gemini.placement.packing import BYTES_PER_COLLECTIVE
from sharding import Collectives, ShardLayout, Unit
from sharding.gloo import start_gather

SIZES = [2**exponent for exponent in range(13, 22)]
"""Bytes of a chunk: below what the caches of a small machine hold, where the cost of a byte does not jump."""
WARM_UP = 3
FEW = 256
"""Elements of fp32: as many bytes as ranks tell each other at once."""
FEW_RANKS = [2, 4]
REPEATS = 10


@dataclass(frozen=True)
class Line:
    """Seconds of a collective of n bytes: `launch_s + n * byte_s`."""

    launch_s: float
    byte_s: float

    @classmethod
    def through(cls, seconds: dict[int, float]) -> Line:
        """The least-squares line through medians by size. Raises ValueError for fewer than two sizes."""
        slope, intercept = statistics.linear_regression(list(seconds), list(seconds.values()))
        return cls(intercept, slope)


def medians_of(rank: int, world_size: int, sizes: list[int], rounds: int) -> dict[str, dict[int, float]]:
    """Seconds by kind and chunk bytes, of fp32 chunks of one unit. Collective."""
    collectives = Collectives(dist.group.WORLD)
    buffers: dict[str, torch.Tensor] = {}

    def scratch(numel: int, dtype: torch.dtype) -> torch.Tensor:
        return buffers.setdefault(f"{numel} {dtype}", torch.empty(numel, dtype=dtype))

    def gather(payload: torch.Tensor, shard: torch.Tensor, layout: ShardLayout) -> None:
        collectives.all_gather(payload, shard, layout, None)

    def reduce(payload: torch.Tensor, shard: torch.Tensor, layout: ShardLayout) -> None:
        collectives.start_reduce_scatter(payload, layout, shard, None, scratch=scratch).finish()

    kinds = {"all_gather": gather, "reduce_scatter": reduce}
    times: dict[tuple[str, int], list[float]] = {(kind, size): [] for kind in kinds for size in sizes}
    cases = {}
    for size in sizes:
        layout = ShardLayout((Unit(0, size // 4),), world_size)
        cases[size] = torch.zeros(layout.numel), torch.zeros(layout.shard_numel), layout
    for number in range(-WARM_UP, rounds):
        for size in (int(each) for each in turn([str(size) for size in sizes], number)):
            for kind, run in kinds.items():
                dist.barrier()
                started = time.perf_counter()
                run(*cases[size])
                if number >= 0:
                    times[kind, size].append(time.perf_counter() - started)
    return {kind: {size: statistics.median(times[kind, size]) for size in sizes} for kind in kinds}


def few_bytes(rank: int, world_size: int, rounds: int) -> dict[str, float]:
    """Median seconds of what gives every rank `FEW` elements of each, by name. Collective."""
    own, every = torch.zeros(FEW), torch.zeros(world_size * FEW)
    sent, parts = torch.zeros_like(every), every.view(world_size, FEW).unbind()

    def broadcasts() -> None:
        works = [dist.broadcast(part, source, async_op=True) for source, part in enumerate(parts)]
        for work in works:
            work.wait()

    kinds: dict[str, Callable[[], Any]] = {
        "all_to_all": lambda: dist.all_to_all_single(every, sent, async_op=True).wait(),
        "all_gather": lambda: start_gather(own, every, None).wait(),
        "one broadcast a rank": broadcasts,
        "all_reduce": lambda: dist.all_reduce(own, async_op=True).wait(),
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(-WARM_UP, rounds):
        for kind in turn(list(kinds), number):
            dist.barrier()
            started = time.perf_counter()
            for _ in range(REPEATS):
                kinds[kind]()
            if number >= 0:
                times[kind].append((time.perf_counter() - started) / REPEATS)
    return {kind: statistics.median(its) for kind, its in times.items()}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after warm-up.")] = 60,
    tiny: Annotated[bool, typer.Option("--tiny", help="Two sizes, few rounds: no figures to quote.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/collective_cost*.json.")] = False,
) -> None:
    """Measure what a launch of a collective is worth in bytes, on two ranks."""
    console = Console(width=130)
    sizes, rounds = (SIZES[::8], 3) if tiny else (SIZES, rounds)
    try:
        by_rank = run_ranks("benchmarks.collective_cost:medians_of", 2, {"sizes": sizes, "rounds": rounds}, 120)
        of_few = {n: run_ranks("benchmarks.collective_cost:few_bytes", n, {"rounds": rounds}, 120) for n in FEW_RANKS}
    except RankFailed as failure:
        console.print(f"[red]{failure}[/red]", markup=True)
        raise typer.Exit(1) from None
    table = Table(title=f"2 ranks, chunks of {sizes[0] // 1024} KiB to {sizes[-1] // 1024} KiB, {rounds} rounds")
    for column in ("collective", "a launch, us", "bytes, GB/s", "a launch is worth, KiB"):
        table.add_column(column)
    results: dict[str, Any] = {}
    lines = {}
    for kind in by_rank[0]:
        # JSON made the sizes text; both ranks take part in a collective until the later one is done
        seconds = {int(size): max(its[kind][size] for its in by_rank) for size in by_rank[0][kind]}
        lines[kind] = line = Line.through(seconds)
        results[kind] = {"seconds": seconds, "launch_s": line.launch_s, "byte_s": line.byte_s}
        table.add_row(kind, *_cells(line))
    # a step gathers a chunk twice and reduces it once
    step = Line(
        sum(lines[kind].launch_s * times for kind, times in (("all_gather", 2), ("reduce_scatter", 1))),
        sum(lines[kind].byte_s * times for kind, times in (("all_gather", 2), ("reduce_scatter", 1))),
    )
    table.add_row("two gathers and a reduction, as in a step", *_cells(step))
    console.print(table)
    console.print(f"the search counts a launch as {BYTES_PER_COLLECTIVE // 1024} KiB")
    few = Table(title=f"gloo, {FEW * 4} bytes of each rank to all: us")
    for column in ("ranks", *of_few[FEW_RANKS[0]][0]):
        few.add_column(column)
    for ranks, medians in of_few.items():
        few.add_row(str(ranks), *(f"{1e6 * max(its[kind] for its in medians):.0f}" for kind in medians[0]))
    console.print(few)
    if save:
        path = ROOT / "benchmarks" / "results" / f"collective_cost{'_tiny' if tiny else ''}.json"
        path.write_text(
            json.dumps({"torch": torch.__version__, "measured": results, "few_bytes": of_few}, indent=1) + "\n"
        )


def _cells(line: Line) -> list[str]:
    rate, worth = (1e-9 / line.byte_s, line.launch_s / line.byte_s / 1024) if line.byte_s > 0 else (0.0, 0.0)
    return [f"{line.launch_s * 1e6:.0f}", f"{rate:.2f}", f"{worth:.0f}"]


if __name__ == "__main__":
    typer.run(main)
