"""One training step of a 26 M GPT-2 on the CPU: ours beside plain PyTorch, and beside FSDP2 at the same bytes.

    python -m benchmarks.train_step            # both tables; minutes
    python -m benchmarks.train_step --tiny     # a 0.4 M model; seconds, no figures to quote

fp32, one thread a rank, no dropout. All cases of a table take turns in the same processes; what counts is the median
of the ratios within each round. The device is emulated: its memory is the CPU's, so a "fetch" is a copy in memory.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.fsdp2 import HOW_MEASURED
from benchmarks.launch import ROOT, RankFailed, run_ranks
from benchmarks.rounds import PARTS, Spread, StepTime, paired_ratio, part_of, slowest_rank
from gemini.placement.demand import format_bytes

RESULTS = ROOT / "benchmarks" / "results"
TITLES = {
    "forward_backward_s": "forward+backward",
    "optimizer_s": "optimizer",
    "step_s": "step",
    "cpu_s": "CPU time, all ranks",
}
LOSS_TOLERANCE = 1e-4
"""Relative, for losses beside FSDP2: AdamW's kernels and the order of sums differ."""


@dataclass(frozen=True)
class Target:
    """`case` may take at most `limit` times what `base` takes."""

    case: str
    base: str
    limit: float


ONE_RANK_TARGETS = (Target("ours", "plain", 1.05), Target("ours, half", "ours", 1.25))
TWO_RANK_TARGETS = (
    Target("ours, reshard budget", "FSDP2, reshard", 0.9),
    Target("ours, no reshard budget", "FSDP2, no reshard", 0.9),
)


@dataclass(frozen=True)
class Verdict:
    """One target against what was measured; `ratio` is the spread over rounds."""

    case: str
    base: str
    part: str
    limit: float
    ratio: Spread

    @property
    def met(self) -> bool:
        return self.ratio.median <= self.limit

    def text(self) -> str:
        return f"{'met' if self.met else 'MISSED'} (≤ {self.limit:g})"


@dataclass
class Measurement:
    """One table: all cases of one world size."""

    world_size: int
    num_parameters: int
    times: dict[str, list[StepTime]]  # of the slowest rank, round by round
    losses: dict[str, list[float]]  # rank 0's
    facts: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, by_rank: list[dict[str, Any]]) -> Measurement:
        cases = by_rank[0]["cases"]
        times = {
            name: slowest_rank([[StepTime(*each) for each in rank["cases"][name]["times_s"]] for rank in by_rank])
            for name in cases
        }
        return cls(
            len(by_rank),
            by_rank[0]["num_parameters"],
            times,
            {name: case["losses"] for name, case in cases.items()},
            {name: case["facts"] for name, case in cases.items()},
        )

    def verdicts(self, targets: tuple[Target, ...]) -> list[Verdict]:
        """On forward and backward, and on the whole step."""
        return [
            Verdict(t.case, t.base, part, t.limit, self.ratio(t, part))
            for t in targets
            for part in ("forward_backward_s", "step_s")
        ]

    def ratio(self, target: Target, part: str) -> Spread:
        return paired_ratio(part_of(self.times[target.case], part), part_of(self.times[target.base], part))

    def loss_differences(self, targets: tuple[Target, ...]) -> dict[str, float]:
        """Largest relative difference of the losses of each target's two cases."""
        return {
            f"{t.case} and {t.base}": max(
                abs(a - b) / abs(b) for a, b in zip(self.losses[t.case], self.losses[t.base], strict=True)
            )
            for t in targets
        }


def measure(world_size: int, tiny: bool, rounds: int, clips: bool) -> Measurement:
    """Start the ranks and let them measure. Raises RankFailed."""
    function = "one_rank" if world_size == 1 else "two_ranks"
    options = {"tiny": tiny, "rounds": rounds, "clips": clips}
    timeout_s = 240 + (2 if tiny else 30) * (rounds + 10)
    return Measurement.of(run_ranks(f"benchmarks.cpu_cases:{function}", world_size, options, timeout_s))


def show(console: Console, found: Measurement, targets: tuple[Target, ...]) -> None:
    """Print times, ratios with their verdicts, and what else must be known."""
    rounds = len(next(iter(found.times.values())))
    ranks = "1 rank" if found.world_size == 1 else f"{found.world_size} ranks (gloo, stage 3)"
    size = f"{found.num_parameters / 1e6:.1f} M parameters"
    table = Table(title=f"{ranks}, {size}, {rounds} rounds; ms: median (quartiles) min..max")
    table.add_column("case")
    for part in PARTS:
        table.add_column(TITLES[part], justify="right")
    table.add_column("model data on the device", justify="right")
    table.add_column("on the host", justify="right")
    for name, times in found.times.items():
        cells = []
        for part in PARTS:
            spread = Spread.of(part_of(times, part))
            cells.append(f"{spread.text(1e3)}\n{spread.minimum * 1e3:.1f}..{spread.maximum * 1e3:.1f}")
        table.add_row(name, *cells, *_memory_cells(found, name))
    console.print(table)

    ratios = Table(title="median of the ratios within each round (quartiles)")
    for column in ("case / base", "part", "ratio", "target"):
        ratios.add_column(column)
    for verdict in found.verdicts(targets):
        style = "green" if verdict.met else "red"
        ratios.add_row(
            f"{verdict.case} / {verdict.base}",
            TITLES[verdict.part],
            verdict.ratio.text(digits=3),
            f"[{style}]{verdict.text()}[/{style}]",
        )
    for target in targets:
        for part in ("optimizer_s", "cpu_s"):
            spread = found.ratio(target, part)
            ratios.add_row(f"{target.case} / {target.base}", TITLES[part], spread.text(digits=3), "no target")
    console.print(ratios)
    for names, difference in found.loss_differences(targets).items():
        bits = "the same bits" if difference == 0 else f"largest relative difference {difference:.1e}"
        console.print(f"losses of {names}: {bits}")


def _memory_cells(found: Measurement, name: str) -> tuple[str, str]:
    facts = found.facts[name]
    if "peak_model_data" in facts:
        return format_bytes(facts["peak_model_data"]["total"]), "0 B"
    if "device_peak_bytes" in facts:
        budget = facts["budget_bytes"]
        of_budget = "no budget" if budget is None else f"budget {format_bytes(budget)}"
        return f"{format_bytes(facts['device_peak_bytes'])}\n{of_budget}", format_bytes(facts["host_peak_bytes"])
    return format_bytes(16 * found.num_parameters), "0 B"


def as_json(found: Measurement, targets: tuple[Target, ...]) -> dict[str, Any]:
    """Everything that was measured."""
    return {
        "world_size": found.world_size,
        "num_parameters": found.num_parameters,
        "cases": {
            name: {
                **{part: asdict(Spread.of(part_of(times, part))) for part in PARTS},
                "rounds": [asdict(time) for time in times],
                "losses": found.losses[name],
                "facts": found.facts[name],
            }
            for name, times in found.times.items()
        },
        "verdicts": [asdict(verdict) | {"met": verdict.met} for verdict in found.verdicts(targets)],
        "other_ratios": {
            f"{t.case} / {t.base}": {part: asdict(found.ratio(t, part)) for part in ("optimizer_s", "cpu_s")}
            for t in targets
        },
        "loss_differences": found.loss_differences(targets),
    }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after warm-up; at least nine for figures to quote.")] = 9,
    tiny: Annotated[bool, typer.Option("--tiny", help="A 0.4 M model: seconds, to see that it runs.")] = False,
    ranks: Annotated[str, typer.Option(help="Which tables: 1, 2 or both.")] = "both",
    clip: Annotated[bool, typer.Option(help="Clip gradients to norm 1 in all cases.")] = True,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/train_step*.json.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the JSON here instead.")] = None,
) -> None:
    """Time one training step: ours beside plain PyTorch (1 rank) and beside FSDP2 (2 ranks)."""
    if ranks not in ("1", "2", "both"):
        raise typer.BadParameter(f"must be 1, 2 or both, found {ranks!r}", param_hint="--ranks")
    console = Console(width=170)
    result: dict[str, Any] = {
        "benchmark": "train_step",
        "torch": torch.__version__,
        "arguments": {"rounds": rounds, "tiny": tiny, "clip": clip},
        "measurements": [],
    }
    clipping = "clipped to norm 1" if clip else "not clipped (ours computes the norm all the same)"
    console.print(f"torch {torch.__version__}, CPU, fp32, one thread a rank, gradients {clipping}")
    try:
        if ranks in ("1", "both"):
            found = measure(1, tiny, rounds, clip)
            show(console, found, ONE_RANK_TARGETS)
            console.print(
                "The optimizer of all three is HybridAdam. 'ours, half': half of 16 bytes a parameter on the device.\n"
            )
            result["measurements"].append(as_json(found, ONE_RANK_TARGETS))
        if ranks in ("2", "both"):
            found = measure(2, tiny, rounds, clip)
            show(console, found, TWO_RANK_TARGETS)
            for name, facts in found.facts.items():
                if "peak_model_data" in facts:
                    parts = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in facts["peak_model_data"].items())
                    console.print(f"{name}: {parts}")
            console.print(f"How the budgets were obtained: {HOW_MEASURED}.")
            console.print(
                "Optimizers: FSDP2 has torch.optim.AdamW(fused=True) after torch's clip_grad_norm_, ours HybridAdam "
                "and the exact norm. Times are the slowest rank's.\n"
            )
            result["measurements"].append(as_json(found, TWO_RANK_TARGETS))
    except RankFailed as failure:
        console.print(f"[red]{failure}[/red]", markup=True)
        raise typer.Exit(1) from None
    if save or out is not None:
        path = out or RESULTS / ("train_step_tiny.json" if tiny else "train_step.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {path.name}")


if __name__ == "__main__":
    typer.run(main)
