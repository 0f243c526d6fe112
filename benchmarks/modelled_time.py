"""Modelled step times beside measured ones, where the model data is on the host: ranks on the CPU, an emulated device.

    python -m benchmarks.modelled_time            # a minute
    python -m benchmarks.modelled_time --tiny     # seconds: to see that it runs

A 26 M GPT-2 in fp32 trains with all of its state on the emulated device, with half of it, and with none, on one rank
and on two, one thread each. The rates are those that `gemini plan` would measure in these processes, collectives
included. The cost model knows two sums, with nothing beside anything else and with all overlapping; on a CPU nothing
overlaps. There is no promise: the model leaves out Python, launches of kernels and everything but matrix products.
"""

from __future__ import annotations

import json
import statistics
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.cpu_cases import BYTES_PER_PARAMETER, LEARNING_RATE, Case, build
from benchmarks.launch import ROOT, RankFailed, run_ranks
from benchmarks.rounds import turn
from gemini import ShardedModel, ShardedOptimizer
from gemini.model.workload import workload_of
from gemini.monitor.rates import rates_of
from gemini.placement.cost import Ranks, modelled_step, moves_of
from optim import HybridAdam

WARM_UP = 3
PLACES: dict[str, dict[str, Any]] = {
    "all on the device": {},
    "half on the device": {"model_data_memory": 0.5},
    "all on the host": {"tensor_placement_policy": "cpu", "model_data_memory": 0.4},
}
"""Options of `ShardedModel`; memory as a part of what everything takes."""


def measured_and_modelled(rank: int, world_size: int, tiny: bool, rounds: int) -> dict[str, Any]:
    """Seconds of each place: of every round, and modelled. Collective."""
    group = dist.group.WORLD if world_size > 1 else None
    rates = rates_of("emulated", group, measure_again=True)
    cases, found = {}, {}
    for place, options in PLACES.items():
        module, tokens = build(tiny)
        work = workload_of(module, 4)
        in_all = sum(parameter.numel() for parameter in module.parameters()) * BYTES_PER_PARAMETER // world_size
        if "model_data_memory" in options:
            options = {**options, "model_data_memory": int(options["model_data_memory"] * in_all)}
        model = ShardedModel(module, device="emulated", **options)
        optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=LEARNING_RATE))
        cases[place] = Case(model, optimizer)
        batch = tokens(0, rank)
        flops = work.forward_flops(batch.numel(), batch.shape[1])
        moves = moves_of(model.plan)
        step = modelled_step(moves, flops, 0.0, "float32", rates, Ranks(world_size, world_size))
        found[place] = {
            "moves": vars(moves),
            "parts": dict(step.parts),
            "no_overlap_s": step.seconds,
            "all_overlap_s": step.least_seconds,
        }
    for number in range(-WARM_UP, rounds):
        for place in turn(list(cases), number):
            if group is not None:
                dist.barrier()
            cases[place].step(tokens(number + WARM_UP, rank))
    for place, case in cases.items():
        found[place]["measured_s"] = [each.step_s for each in case.times[WARM_UP:]]
    return {"rates": rates.to_json(), "places": found}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after warm-up.")] = 6,
    tiny: Annotated[bool, typer.Option("--tiny", help="A 0.4 M model, two rounds: no figures to quote.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/modelled_time*.json.")] = False,
) -> None:
    """Set modelled step times beside measured ones on one rank and on two."""
    console = Console(width=120)
    results = {}
    for world_size in (1, 2):
        options = {"tiny": tiny, "rounds": 2 if tiny else rounds}
        try:
            by_rank = run_ranks("benchmarks.modelled_time:measured_and_modelled", world_size, options, 300)
        except RankFailed as failure:
            console.print(f"[red]{failure}[/red]", markup=True)
            raise typer.Exit(1) from None
        results[world_size] = by_rank[0]
        table = Table(title=f"{world_size} rank(s), milliseconds a step; {by_rank[0]['rates']['source']}")
        for column in ("state", "measured", "modelled, no overlap", "modelled, all overlap", "measured / no overlap"):
            table.add_column(column, justify="left" if column == "state" else "right")
        for place in PLACES:
            rows = [its["places"][place]["measured_s"] for its in by_rank]
            measured = statistics.median(max(round_s) for round_s in zip(*rows, strict=True))
            its = by_rank[0]["places"][place]
            cells = [measured, its["no_overlap_s"], its["all_overlap_s"]]
            table.add_row(place, *(f"{1000 * cell:.1f}" for cell in cells), f"{measured / its['no_overlap_s']:.2f}")
        console.print(table)
    if save:
        path = ROOT / "benchmarks" / "results" / f"modelled_time{'_tiny' if tiny else ''}.json"
        path.write_text(json.dumps({"torch": torch.__version__, "measured": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
