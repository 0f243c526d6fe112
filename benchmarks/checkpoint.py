"""Saving and loading beside the disk's own rate, `torch.save`, and DCP on FSDP2, in turns; saving beside training.

    python -m benchmarks.checkpoint                 # about two minutes
    python -m benchmarks.checkpoint --ranks 2       # the same on two ranks, of which each has a half
    python -m benchmarks.checkpoint --tiny          # seconds: to see that it runs

A chain of linear layers in fp32 with Adam's moments, 0.8 GB of state. Every write ends with what it wrote on the disk
(fsync), and every read begins with none of it in the page cache. The disk's own rate is that of one file, written and
read past the page cache in pieces of 16 MiB by two threads. Memory is the peak of the process above what it had before.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint import filesystem, state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gemini
from benchmarks.launch import ROOT, run_ranks
from benchmarks.rounds import Spread, paired_ratio, turn
from gemini import HybridAdam, ShardedModel, ShardedOptimizer, load_checkpoint, save_checkpoint

TIMEOUT_S = 900
PIECE_BYTES = 2**24
FLOORS = {"gemini: write": 0.8, "gemini: read": 0.75, "gemini, verify=False: read": 0.8}  # of the disk's rate
CEILING = {1: 1.05, 2: 1.10}  # of a step beside a save, by ranks: two ranks leave no core for the threads that save
WIDTH, LAYERS, BATCH = 2048, 16, 256
SMALL = 256, 2, 8


def _chain(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


class Ours:
    """A training of ours."""

    def __init__(self, width: int, layers: int, batch: int) -> None:
        self.model = ShardedModel(_chain(width, layers), device="emulated")
        self.optimizer = ShardedOptimizer(self.model, HybridAdam(self.model.parameters(), lr=1e-3))
        self.inputs = torch.randn(batch, width)
        self.step()

    def step(self) -> None:
        loss = self.model(self.inputs).square().mean()
        self.optimizer.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        save_checkpoint(folder, self.model, self.optimizer, tag="it")

    def load(self, folder: Path, verify: bool = True) -> None:
        load_checkpoint(folder, self.model, self.optimizer, verify=verify)


class Fsdp2:
    """The same model under FSDP2, saved by torch.distributed.checkpoint."""

    def __init__(self, width: int, layers: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if not dist.is_initialized():
            dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = _chain(width, layers)
        for layer in self.model.children():
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.model(torch.randn(1, width)).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _states(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def save(self, folder: Path) -> None:
        state_dict_saver.save(self._states(), storage_writer=filesystem.FileSystemWriter(folder, sync_files=True))

    def load(self, folder: Path) -> None:
        states = self._states()
        state_dict_loader.load(states, storage_reader=filesystem.FileSystemReader(folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])


class TorchFiles:
    """`torch.save` and `torch.load` of one rank's share of the same bytes."""

    def __init__(self, num_bytes: int) -> None:
        self.values = {str(number): torch.randn(num_bytes // 64) for number in range(16)}

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f"{_rank()}.pt", "wb") as file:
            torch.save(self.values, file)
            file.flush()
            os.fsync(file.fileno())

    def load(self, folder: Path) -> None:
        found = torch.load(folder / f"{_rank()}.pt", weights_only=True)
        for name, value in self.values.items():
            value.copy_(found[name])


class Disk:
    """The disk alone: one file a rank, past the page cache where it has a way past it."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = memoryview(mmap.mmap(-1, num_bytes // PIECE_BYTES * PIECE_BYTES or PIECE_BYTES))
        self._memory[:] = os.urandom(PIECE_BYTES) * (len(self._memory) // PIECE_BYTES)

    def _run(self, path: Path, flags: int, move: Callable[..., int]) -> None:
        try:
            file = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            file = os.open(path, flags, 0o600)
        try:
            if flags & os.O_CREAT:
                os.posix_fallocate(file, 0, len(self._memory))
            with ThreadPoolExecutor(2) as pool:
                starts = range(0, len(self._memory), PIECE_BYTES)
                list(pool.map(lambda at: move(file, self._memory[at : at + PIECE_BYTES], at), starts))
            os.fsync(file)
        finally:
            os.close(file)

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._run(folder / f"{_rank()}.bin", os.O_WRONLY | os.O_CREAT, os.pwrite)

    def load(self, folder: Path) -> None:
        self._run(folder / f"{_rank()}.bin", os.O_RDONLY, lambda file, into, at: os.preadv(file, [into], at))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def _forget(folder: Path) -> None:
    """Take the files out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def _timed(move: Callable[[], None]) -> tuple[float, int]:
    """(seconds from when all ranks begin until all are done, bytes of the peak above the memory before)."""
    clear = Path("/proc/self/clear_refs")
    clear.write_text("5")  # the peak begins anew
    before = psutil.Process().memory_info().rss
    _meet()
    started = time.perf_counter()
    move()
    _meet()
    seconds = time.perf_counter() - started
    peak = int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
    return seconds, max(0, peak - before)


def rates(rank: int, world_size: int, folder: str, rounds: int, tiny: bool) -> dict[str, Any]:
    """One rank: bytes a second of all ranks together, and the peaks of this one, round by round."""
    width, layers, batch = SMALL if tiny else (WIDTH, LAYERS, 1)
    ours = Ours(width, layers, batch)
    total = 3 * 4 * width * width * layers
    systems: dict[str, Any] = {
        "disk": Disk(total // world_size),
        "gemini": ours,
        "torch.save": TorchFiles(total // world_size),
        "DCP, FSDP2": Fsdp2(width, layers),
    }
    root = Path(folder)
    times: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for number in range(-1, rounds):
        for name in turn(list(systems), number + 1):
            its = root / name.replace(",", "").replace(" ", "_")
            _meet()
            if rank == 0:
                shutil.rmtree(its, ignore_errors=True)
            _meet()
            moves = {
                f"{name}: write": partial(systems[name].save, its),
                f"{name}: read": partial(systems[name].load, its),
            }
            if name == "gemini":
                moves["gemini, verify=False: read"] = partial(ours.load, its, verify=False)
            for what, move in moves.items():
                if "read" in what:
                    _forget(its)
                seconds, peak = _timed(move)
                if number >= 0:
                    times.setdefault(what, []).append(total / seconds)
                    peaks[what] = max(peaks.get(what, 0), peak)
    return {"bytes_per_s": times, "peaks": peaks, "total": total, "chunk": _largest_chunk(ours)}


def _largest_chunk(ours: Ours) -> int:
    return max(chunk.payload_bytes for chunk in ours.model.chunk_manager.chunks)


def beside_training(rank: int, world_size: int, folder: str, rounds: int, tiny: bool) -> dict[str, Any]:
    """One rank: seconds of as many steps as a save lasts, with and without one in the background, in turns."""
    width, layers, batch = SMALL if tiny else (WIDTH, LAYERS, BATCH)
    ours = Ours(width, layers, batch)
    step_s = min(_timed(ours.step)[0] for _ in range(3))
    saved_s = _timed(partial(ours.save, Path(folder)))[0]
    num_steps = max(2, round(2 * saved_s / step_s))
    times: dict[str, list[float]] = {"alone": [], "beside a save": []}
    copied = 0
    for number in range(rounds):
        for name in turn(list(times), number):
            _meet()
            started = time.perf_counter()
            pending: Any = None
            if name != "alone":
                pending = save_checkpoint(folder, ours.model, ours.optimizer, tag="it", asynchronous=True)
            for _ in range(num_steps):
                ours.step()
            times[name].append((time.perf_counter() - started) / num_steps)
            if pending is not None:
                pending.wait()
                copied = max(copied, pending.copied_bytes)
    return {"step_s": times, "num_steps": num_steps, "save_s": saved_s, "copied_bytes": copied}


def main(
    ranks: Annotated[int, typer.Option(min=1, max=4, help="Ranks.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds after one to warm up.")] = 5,
    directory: Annotated[Path, typer.Option(help="On the disk that is measured.")] = ROOT / "benchmarks" / "outputs",
    tiny: Annotated[bool, typer.Option("--tiny", help="Small sizes, one round.")] = False,
    save: Annotated[bool, typer.Option("--save", help="Write benchmarks/results/checkpoint*.json.")] = False,
) -> None:
    """Rates of saving and loading, their memory, and what a save in the background costs the steps beside it."""
    folder = directory / "checkpoint_benchmark"
    options = {"folder": str(folder), "rounds": 1 if tiny else rounds, "tiny": tiny}
    try:
        by_rank = run_ranks("benchmarks.checkpoint:rates", ranks, options, TIMEOUT_S)
        shutil.rmtree(folder, ignore_errors=True)
        steps = run_ranks("benchmarks.checkpoint:beside_training", ranks, options, TIMEOUT_S)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found = by_rank[0]
    table = Table(
        title=f"{found['total'] / 1e9:.2f} GB on {ranks} rank(s), largest chunk {found['chunk'] / 1e6:.1f} MB"
    )
    for column in ("", "GB/s", "share of the disk's", "peak memory beyond, MB a rank"):
        table.add_column(column)
    shares = {}
    for what, its in found["bytes_per_s"].items():
        share = paired_ratio(its, found["bytes_per_s"][f"disk: {what.split(': ')[1]}"])
        peak = max(each["peaks"][what] for each in by_rank)
        shares[what] = asdict(share)
        table.add_row(what, Spread.of(its).text(1e-9, 2), share.text(digits=2), f"{peak / 1e6:.1f}")
    console = Console(width=130)
    console.print(table)
    ratio = paired_ratio(steps["step_s"]["beside a save"], steps["step_s"]["alone"])
    console.print(
        f"{steps['num_steps']} steps with a save in the background against {steps['num_steps']} without: "
        f"{ratio.text(digits=3)} of {Spread.of(steps['step_s']['alone']).text(1e3)} ms; "
        f"a save alone takes {steps['save_s']:.2f} s; copies of at most {steps['copied_bytes'] / 1e6:.0f} MB at once"
    )
    if not tiny:
        for what, floor in FLOORS.items():
            _verdict(console, f"{what}, share of the disk's rate", shares[what]["median"], floor, at_least=True)
        _verdict(console, "steps beside a save", ratio.median, CEILING.get(ranks, CEILING[2]), at_least=False)
    if save:
        path = ROOT / "benchmarks" / "results" / f"checkpoint_{ranks}rank{'_tiny' if tiny else ''}.json"
        results = {"torch": torch.__version__, "gemini": gemini.__version__, "rates": found, "steps": steps}
        path.write_text(json.dumps(results, indent=1) + "\n")


def _verdict(console: Console, what: str, found: float, wanted: float, at_least: bool) -> None:
    met = found >= wanted if at_least else found <= wanted
    console.print(f"{'met' if met else 'MISSED'}: {what} {found:.3f}, wanted {'>=' if at_least else '<='} {wanted}")


if __name__ == "__main__":
    typer.run(main)
