"""A chain of 1,000 x Linear(8, 8), where nearly all time is calls: ours beside plain PyTorch, on one rank and on two.

    python -m benchmarks.tiny_operators            # half a minute
    python -m benchmarks.tiny_operators --tiny     # 50 layers, to see that it runs

fp32, one thread a rank, everything resident, weight decay for weights only. All cases take turns in one process; on two
ranks every rank also runs a plain model and DDP with the same batch. Plain PyTorch and DDP step with torch's fused
AdamW.
"""

from __future__ import annotations

import json
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.cpu_cases import WARM_UP, Case
from benchmarks.launch import ROOT, RankFailed, run_ranks
from benchmarks.rounds import Spread, StepTime, paired_ratio, part_of, slowest_rank, turn
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

PARTS = {"forward_backward_s": "forward+backward", "optimizer_s": "optimizer and zero_grad"}
LIMITS = {1: 1.3, 2: 1.6}
"""Of forward and backward beside plain PyTorch, by ranks."""
WIDTH = 8


class _Chain(nn.Sequential):
    """Called as the models of `cpu_cases` are."""

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:  # type: ignore[override]
        return _Output(super().forward(input_ids).sub(labels).square().mean())


class _Output(dict[str, torch.Tensor]):
    def __init__(self, loss: torch.Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    weights, biases = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() == 1]
    return [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]


def cases_of(rank: int, world_size: int, layers: int, rounds: int) -> dict[str, list[tuple[float, ...]]]:
    """Times of every case, round by round. Collective."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return _Chain(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))

    def of_torch(model: nn.Module) -> Case:
        return Case(model, torch.optim.AdamW(_groups(model), fused=True))

    model = ShardedModel(build(), device="emulated")
    cases = {"plain": of_torch(build()), "ours": Case(model, ShardedOptimizer(model, HybridAdam(_groups(model))))}
    if world_size > 1:
        cases["DDP"] = of_torch(DistributedDataParallel(build()))
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    for number in range(-WARM_UP, rounds):
        for name in turn(list(cases), number):
            if dist.is_initialized():
                dist.barrier()
            cases[name].step(batch)
    return {name: [astuple(time) for time in case.times[WARM_UP:]] for name, case in cases.items()}


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after warm-up.")] = 25,
    tiny: Annotated[bool, typer.Option("--tiny", help="50 layers: seconds, no figures to quote.")] = False,
    ranks: Annotated[str, typer.Option(help="Which tables: 1, 2 or both.")] = "both",
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/tiny_operators*.json.")] = False,
) -> None:
    """Time the steps of a model of tiny operators: ours beside plain PyTorch and DDP."""
    if ranks not in ("1", "2", "both"):
        raise typer.BadParameter(f"must be 1, 2 or both, found {ranks!r}", param_hint="--ranks")
    console = Console(width=130)
    layers, results = 50 if tiny else 1000, []
    for world_size in (1, 2) if ranks == "both" else (int(ranks),):
        try:
            options = {"layers": layers, "rounds": rounds}
            by_rank = run_ranks("benchmarks.tiny_operators:cases_of", world_size, options, 120 + 3 * rounds)
        except RankFailed as failure:
            console.print(f"[red]{failure}[/red]", markup=True)
            raise typer.Exit(1) from None
        times = {
            name: slowest_rank([[StepTime(*each) for each in its[name]] for its in by_rank]) for name in by_rank[0]
        }
        table = Table(title=f"{world_size} rank(s), {layers} x Linear({WIDTH}, {WIDTH}), {rounds} rounds")
        for column in ("part", *(f"{name}, ms" for name in times), *(f"ours / {n}" for n in times if n != "ours")):
            table.add_column(column)
        for part, title in PARTS.items():
            spreads = [Spread.of(part_of(its, part)).text(1e3) for its in times.values()]
            ratios = {
                name: paired_ratio(part_of(times["ours"], part), part_of(its, part))
                for name, its in times.items()
                if name != "ours"
            }
            table.add_row(title, *spreads, *(ratio.text(digits=2) for ratio in ratios.values()))
            results += [
                {"ranks": world_size, "part": part, "beside": name, "ratio": asdict(ratio)}
                for name, ratio in ratios.items()
            ]
        console.print(table)
        console.print(f"wanted: forward+backward at most {LIMITS[world_size]} times plain PyTorch")
    if save:
        path = Path(ROOT / "benchmarks" / "results" / f"tiny_operators{'_tiny' if tiny else ''}.json")
        path.write_text(json.dumps({"torch": torch.__version__, "layers": layers, "ratios": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
