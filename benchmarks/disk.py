"""The disk tier beside the disk's own rate: what a step reads and writes, and how fast.

    python -m benchmarks.disk                          # 1.5 GB of states in the system's folder for temporary files
    python -m benchmarks.disk --folder /mnt/nvme --gigabytes 20

The disk's own rate is that of requests of 4 MiB by four threads, half of them reads, past the page cache, in a file of
the same size in the same folder, in turns with the steps. A step of the tier reads every state and writes it back.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from rich.console import Console
from torch import nn

from gemini import ShardedModel, ShardedOptimizer
from gemini.memory.direct import aligned_bytes
from gemini.memory.disk import DiskTier
from gemini.memory.workers import WorkPiece
from optim import HybridAdam

_PIECE = 2**24


def main(
    folder: Annotated[Path | None, typer.Option(help="On the disk. Default: for temporary files.")] = None,
    gigabytes: Annotated[float, typer.Option(min=0.01, help="Of moments.")] = 1.5,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    chunk_mib: Annotated[int, typer.Option(min=1, help="Of weights in a chunk.")] = 32,
) -> None:
    """Print GB/s of the disk and of steps, and what the process and the page cache held."""
    where = Path(tempfile.gettempdir()) if folder is None else folder
    width = 1024
    layers = max(1, round(gigabytes * 1e9 / (8 * width * width)))
    console = Console()
    cached = psutil.virtual_memory().cached
    module = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    chunk = chunk_mib * 2**20 // 4
    on_disk: dict[str, Any] = {"tensor_placement_policy": "disk", "disk_path": where, "chunk_size": chunk}
    model = ShardedModel(module, device="emulated", deferred_update=False, **on_disk)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
    states = model.plan.placement.disk_bytes(model.plan.demand)
    disk_s: list[float] = []
    step_s: list[float] = []
    for number in range(rounds + 1):
        own = _own_seconds(where, states)
        model(torch.ones(1, width)).sum().backward()
        start = time.perf_counter()
        optimizer.step()
        _wait(optimizer)
        taken = time.perf_counter() - start
        if number:
            disk_s.append(own)
            step_s.append(taken)
    report = optimizer.last_step
    assert report is not None
    num_bytes = report.moved_bytes["disk->host"] + report.moved_bytes["host->disk"]
    assert num_bytes == 2 * states
    ratios = [own / taken for own, taken in zip(disk_s, step_s, strict=True)]
    console.print(f"{states / 1e9:.2f} GB of states in {len(model.plan.packing.chunks)} chunks; {where}")
    console.print(f"the disk itself: {_rates(num_bytes, disk_s)}; a step: {_rates(num_bytes, step_s)}")
    console.print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    grown = psutil.virtual_memory().cached - cached
    host = model.chunk_manager.memory.host.ledger.peak_bytes
    console.print(
        f"resident {psutil.Process().memory_info().rss / 1e9:.2f} GB, of which weights and gradients {host / 1e9:.2f}; "
        f"the page cache grew by {grown / 1e9:.2f} GB"
    )
    model.close()


def _wait(optimizer: ShardedOptimizer) -> None:
    """What the step has started to write is written."""
    for state in optimizer._chunk_states.by_chunk.values():
        for ticket in state.tickets.pending():
            ticket.wait()


def _own_seconds(folder: Path, num_bytes: int) -> float:
    """To read `num_bytes` and to write as many, beside each other, with as many requests as the tier's."""
    tier = DiskTier(folder)
    there = tier.allocate(num_bytes, "benchmark")
    memory = aligned_bytes(_PIECE, False).zero_()
    _await(_all(tier, there, memory, False))
    start = time.perf_counter()
    _await(_all(tier, there, memory, True))
    taken = time.perf_counter() - start
    tier.free(there, "benchmark")
    tier.close()
    return taken


def _all(tier: DiskTier, there: torch.Tensor, memory: torch.Tensor, reads: bool) -> list[WorkPiece]:
    requests: list[WorkPiece] = []
    half = there.numel() // 2 // _PIECE * _PIECE
    for start in range(0, there.numel() - _PIECE + 1, _PIECE):
        if reads:
            # Half a file away from what is written.
            other = (start + half) % (there.numel() // _PIECE * _PIECE)
            requests += tier.read(memory, there[other : other + _PIECE])
        requests += tier.write(there[start : start + _PIECE], memory)
    return requests


def _await(requests: Sequence[WorkPiece]) -> None:
    for each in requests:
        each.result()


def _rates(num_bytes: int, seconds: Sequence[float]) -> str:
    rates = sorted(num_bytes / each / 1e9 for each in seconds)
    return f"{statistics.median(rates):.2f} GB/s ({rates[0]:.2f}-{rates[-1]:.2f})"


if __name__ == "__main__":
    typer.run(main)
