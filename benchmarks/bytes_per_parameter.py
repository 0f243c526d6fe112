"""Bytes of memory for each parameter that is trained: the slope of measured bytes over four sizes of a model.

    python -m benchmarks.bytes_per_parameter
    python -m benchmarks.bytes_per_parameter --deepspeed .venv-deepspeed/bin/python    # see deepspeed_adam.py
    python -m benchmarks.bytes_per_parameter --tiny                                    # to see that it runs

Every size runs in processes of its own, of one thread each, on the CPU and gloo; device memory is emulated. What is
measured is the sum over all ranks and over device and host: of the storages of all live tensors, and of what the system
says is resident. A line is fitted by least squares; what does not grow with the model is in its intercept, and the
largest distance from it is printed. All train in bf16 with fp32 masters and moments, and clip gradients, which must
therefore be held until the step. "No budget": the device keeps gathered copies, as there is room.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy
import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.bytes_cases import num_parameters
from benchmarks.deepspeed_adam import environment
from benchmarks.launch import ROOT, RankFailed, run_ranks
from benchmarks.measured_bytes import MALLOC

RESULTS = ROOT / "benchmarks" / "results"
MOMENTS = {"held": "after backward", "at_rest": "after the step"}
COUNTS = {"storages": "live storages", "resident": "resident"}
WIDTH, NUM_LAYERS = 1024, (10, 20, 40, 80)  # about 10, 20, 40 and 80 M parameters
TINY_WIDTH, TINY_NUM_LAYERS = 128, (4, 8)
TIMEOUT_S = 300.0


class System(NamedTuple):
    """What is trained with what."""

    name: str
    function: str  # of bytes_cases
    num_ranks: int
    options: dict[str, Any]


SYSTEMS = (
    *(
        System(
            f"ours, placement {placement}, {'smallest' if smallest else 'no'} budget",
            "ours",
            num_ranks,
            {"placement": placement, "smallest_budget": smallest},
        )
        for smallest in (True, False)
        for num_ranks in (1, 2)
        for placement in ("cpu", "cuda")
    ),
    *(
        System(
            f"ours, placement cpu, smallest budget, {optimizer}",
            "ours",
            num_ranks,
            {"placement": "cpu", "smallest_budget": True, "optimizer": optimizer},
        )
        for optimizer in ("8bit", "muon")
        for num_ranks in (1, 2)
    ),
    System("FSDP2, CPU offload", "fsdp2", 2, {}),
    System("DeepSpeed ZeRO-3, CPU offload", "deepspeed", 2, {}),
)


@dataclass(frozen=True)
class Line:
    """Least squares through (parameters, bytes)."""

    bytes_per_parameter: float
    intercept_bytes: float
    largest_residual_bytes: float

    @classmethod
    def through(cls, numels: Sequence[int], num_bytes: Sequence[int]) -> Line:
        """Raises ValueError for fewer than two sizes."""
        if len(set(numels)) < 2:
            raise ValueError(f"a slope needs two sizes, found {len(set(numels))}")
        x, y = numpy.asarray(numels, dtype=float), numpy.asarray(num_bytes, dtype=float)
        slope, intercept = numpy.polyfit(x, y, 1)
        return cls(float(slope), float(intercept), float(numpy.abs(y - slope * x - intercept).max()))

    def text(self) -> str:
        return f"{self.bytes_per_parameter:.2f}"


@dataclass
class Measured:
    """One system at all sizes."""

    system: System
    sizes: list[dict[str, Any]]  # num_parameters, and of each moment and count the bytes of all ranks together

    def line(self, moment: str, count: str) -> Line:
        return Line.through([s["num_parameters"] for s in self.sizes], [s[moment][count] for s in self.sizes])

    def lines(self) -> dict[str, dict[str, Line]]:
        return {moment: {count: self.line(moment, count) for count in COUNTS} for moment in MOMENTS}


def measure(system: System, width: int, layer_counts: Sequence[int], deepspeed: str | None) -> Measured:
    """All sizes of one system. Raises RankFailed."""
    variables, python = dict(MALLOC), {}
    if system.function == "deepspeed":
        assert deepspeed is not None
        variables |= environment(deepspeed)
        python = {"python": str(Path(deepspeed).absolute())}
    sizes = []
    for num_layers in layer_counts:
        options = {"num_layers": num_layers, "width": width, **system.options}
        function = f"benchmarks.bytes_cases:{system.function}"
        ranks = run_ranks(function, system.num_ranks, options, TIMEOUT_S, variables=variables, **python)
        size: dict[str, Any] = {"num_parameters": num_parameters(num_layers, width), "by_rank": ranks}
        for moment in MOMENTS:
            size[moment] = {count: sum(rank[moment][count] for rank in ranks) for count in COUNTS}
        sizes.append(size)
    return Measured(system, sizes)


def show(console: Console, found: list[Measured]) -> None:
    """The table of slopes."""
    if not found:
        return
    sizes = ", ".join(f"{size['num_parameters'] / 1e6:.1f}" for size in found[0].sizes)
    table = Table(title=f"bytes a parameter, all ranks together: slope over {sizes} M parameters")
    table.add_column("system")
    table.add_column("ranks", justify="right")
    for moment in MOMENTS.values():
        for count in COUNTS.values():
            table.add_column(f"{moment}:\n{count}", justify="right")
    table.add_column("largest distance from the\nlines, storages, resident", justify="right")
    for measured in found:
        lines = measured.lines()
        worst = [
            f"{max(lines[moment][count].largest_residual_bytes for moment in MOMENTS) / 2**20:.2f} MiB"
            for count in COUNTS
        ]
        cells = [lines[moment][count].text() for moment in MOMENTS for count in COUNTS]
        table.add_row(measured.system.name, str(measured.system.num_ranks), *cells, ", ".join(worst))
    console.print(table)


def as_json(found: list[Measured], failures: dict[str, str]) -> dict[str, Any]:
    return {
        "systems": [
            {
                "name": measured.system.name,
                "num_ranks": measured.system.num_ranks,
                "options": measured.system.options,
                "lines": {
                    moment: {count: asdict(line) for count, line in lines.items()}
                    for moment, lines in measured.lines().items()
                },
                "sizes": measured.sizes,
            }
            for measured in found
        ],
        "failures": failures,
    }


def main(
    deepspeed: Annotated[str | None, typer.Option(metavar="PYTHON", help="A python that has deepspeed.")] = None,
    only: Annotated[str | None, typer.Option(help="Only systems whose name has this in it.")] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="Two small sizes: resident bytes say nothing then.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/bytes_per_parameter*.json.")] = False,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the JSON here instead.")] = None,
) -> None:
    """Measure how many bytes one more parameter costs: ours, FSDP2 and DeepSpeed."""
    console = Console(width=150)
    width, layer_counts = (TINY_WIDTH, TINY_NUM_LAYERS) if tiny else (WIDTH, NUM_LAYERS)
    found, failures = [], {}
    for system in SYSTEMS:
        name = f"{system.name}, {system.num_ranks} rank{'s' if system.num_ranks > 1 else ''}"
        if only is not None and only not in name:
            continue
        if system.function == "deepspeed" and deepspeed is None:
            console.print(f"{name}: left out, no --deepspeed", style="dim")
            continue
        console.print(name, style="dim")
        try:
            found.append(measure(system, width, layer_counts, deepspeed))
        except RankFailed as failure:
            failures[name] = str(failure)
            console.print(f"[red]{failure}[/red]", markup=True)
    show(console, found)
    if save or json_path is not None:
        path = json_path or RESULTS / ("bytes_per_parameter_tiny.json" if tiny else "bytes_per_parameter.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        result = {"benchmark": "bytes_per_parameter", "torch": torch.__version__, **as_json(found, failures)}
        path.write_text(json.dumps(result, indent=1) + "\n")
        console.print(f"written: {path.name}")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
