"""Resident memory a parameter, as the system counts it: the slope over sizes of a model that rests on the host.

    python -m benchmarks.resident_memory
    python -m benchmarks.resident_memory --tiny    # to see that it runs

Training in bf16 with fp32 masters and moments holds 14 bytes a parameter: 2 of weights, 2 of gradients, 2 of remainders
and 8 of moments. `bytes_per_parameter` counts live tensors, and has malloc return what is free. Here nothing is done
that a user would not do, so blocks that malloc keeps count; every size runs in a process of its own. The emulated
device's memory is the process's too: its budget is the same at every size, so it is in the intercept. Beyond 14.3 bytes
after backward or after the step the exit status is 1.

A model without an optimizer holds its weights: 2 bytes in bf16, over all ranks. More than 2.05 bytes of live storages
are too many as well; what is resident is shown beside them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.bytes_per_parameter import RESULTS, Line
from benchmarks.launch import run_ranks
from benchmarks.resident_cases import num_parameters

WIDTH, NUM_BLOCKS = 512, (8, 16, 24, 32)  # 25 to 101 M parameters; fewer would not fill the device's budget
TINY_WIDTH, TINY_NUM_BLOCKS = 64, (2, 4)
LIMIT = 14.3
INFERENCE_LIMIT = 2.05
LIMITED = ("after backward", "after the step")
TIMEOUT_S = 300.0


def measure(width: int, counts: tuple[int, ...], built_on_shards: bool) -> list[dict[str, int]]:
    """Resident bytes by moment, and the parameters, of every size. Raises RankFailed."""
    sizes = []
    for num_blocks in counts:
        options: dict[str, Any] = {"num_blocks": num_blocks, "width": width, "built_on_shards": built_on_shards}
        (found,) = run_ranks("benchmarks.resident_cases:train", 1, options, TIMEOUT_S)
        sizes.append({"parameters": num_parameters(num_blocks, width), **found})
    return sizes


def measure_inference(width: int, counts: tuple[int, ...], num_ranks: int) -> list[dict[str, int]]:
    """Live storages and resident bytes of all ranks, and the parameters, of every size. Raises RankFailed."""
    sizes = []
    for num_blocks in counts:
        options = {"num_blocks": num_blocks, "width": width}
        found = run_ranks("benchmarks.resident_cases:infer", num_ranks, options, TIMEOUT_S)
        sums = {key: sum(each[key] for each in found) for key in found[0]}
        sizes.append({"parameters": num_parameters(num_blocks, width), **sums})
    return sizes


def main(
    tiny: Annotated[bool, typer.Option("--tiny", help="Two small sizes, which say nothing.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/resident_memory*.json.")] = False,
) -> None:
    """Measure what one more parameter costs in resident memory."""
    console = Console(width=150)
    width, counts = (TINY_WIDTH, TINY_NUM_BLOCKS) if tiny else (WIDTH, NUM_BLOCKS)
    table = Table(title="resident bytes a parameter (and what does not grow with the model, MiB)")
    results, is_within = {}, True
    for built_on_shards in (False, True):
        name = "built on shards" if built_on_shards else "built in fp32"
        sizes = results[name] = measure(width, counts, built_on_shards)
        numels = [size["parameters"] for size in sizes]
        lines = {key: Line.through(numels, [size[key] for size in sizes]) for key in sizes[0] if key != "parameters"}
        if not table.columns:
            for column in ("model", *lines):
                table.add_column(column)
        table.add_row(name, *(f"{line.text()} ({line.intercept_bytes / 2**20:.0f})" for line in lines.values()))
        is_within &= all(lines[key].bytes_per_parameter <= LIMIT for key in LIMITED)
    inference = Table("bf16, no optimizer", "live storages", "resident", title="bytes a parameter, all ranks together")
    for num_ranks in (1, 2):
        name = f"inference, {num_ranks} rank{'s' * (num_ranks > 1)}"
        sizes = results[name] = measure_inference(width, counts, num_ranks)
        numels = [size["parameters"] for size in sizes]
        lines = {key: Line.through(numels, [size[key] for size in sizes]) for key in ("storages", "resident")}
        inference.add_row(name, *(line.text() for line in lines.values()))
        is_within &= lines["storages"].bytes_per_parameter <= INFERENCE_LIMIT
    console.print(table)
    console.print(inference)
    if save:
        path: Path = RESULTS / ("resident_memory_tiny.json" if tiny else "resident_memory.json")
        path.parent.mkdir(parents=True, exist_ok=True)
        words = {"benchmark": "resident_memory", "torch": torch.__version__, "sizes": results}
        path.write_text(json.dumps(words, indent=1) + "\n")
        console.print(f"written: {path.name}")
    if not is_within and not tiny:
        console.print(f"more than {LIMIT} bytes a parameter, or {INFERENCE_LIMIT} without an optimizer")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
