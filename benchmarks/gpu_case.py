"""One system at one size, in a process of its own: what a step takes, and what it holds where.

    python -m benchmarks.gpu_case --name "ours 1.3B" --system ours --size 1.3B --out cases.jsonl
    python -m benchmarks.gpu_case --name try --system FSDP2 --tiny --device cpu --out cases.jsonl

The result is one line of the --out file, rewritten at the start of every phase, so that a case that is killed says
how far it came. Whatever goes wrong is in the line's "error".
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer
from torch import Tensor

from benchmarks import case_file, overlap
from benchmarks.gpu_systems import SYSTEMS, Training
from benchmarks.llama import SIZES, Size
from gemini import state_hash


class Case:
    """The line of one case, and the clock."""

    def __init__(self, path: Path, entry: dict[str, Any], max_s: float) -> None:
        self.path = path
        self.entry = entry
        self.started = time.monotonic()
        self.deadline = self.started + max_s

    def phase(self, name: str) -> None:
        now = round(time.monotonic() - self.started, 1)
        self.entry["phase"] = name
        self.entry.setdefault("phases_s", {})[name] = now
        case_file.write(self.path, self.entry)
        print(f"{self.entry['name']}: {name} at {now:.1f} s", flush=True)

    def late(self, needs_s: float = 0.0) -> bool:
        return time.monotonic() + needs_s > self.deadline


class Memory:
    """Device and host bytes of this process."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.used_at_start = psutil.virtual_memory().used

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def reset_peak(self) -> None:
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)

    def look(self) -> dict[str, int | None]:
        """Host bytes twice: memory that a driver pins may not be in a process's resident set."""
        cuda = self.is_cuda
        return {
            "device_peak_bytes": torch.cuda.max_memory_allocated(self.device) if cuda else None,
            "device_reserved_bytes": torch.cuda.max_memory_reserved(self.device) if cuda else None,
            "host_rss_bytes": psutil.Process().memory_info().rss,
            "host_taken_bytes": psutil.virtual_memory().used - self.used_at_start,
        }


def measure(
    case: Case, training: Training, size: Size, memory: Memory, counts: Sequence[int], warm_up: int, steps: int
) -> None:
    """Time steps of each number of micro-batches until enough are done or the time is up.

    Raises TimeoutError if not one step was measured. The line has the figures of the first number, and `curve` those of
    each. Where no step was left out, the line also has the hash of the weights after the last one: the same steps have
    the same hash wherever the states rest.
    """
    tokens = tokens_of(size, max(counts), memory.device)
    case.entry["curve"] = curve = []
    for count in counts:
        case.phase(f"{count * size.tokens} tokens a step")
        figures = timed(case, training, tokens[:count], memory, warm_up, steps)
        curve.append({"tokens_per_step": count * size.tokens, **figures})
        if len(curve) == 1:
            case.entry |= curve[0]
        if figures["steps"] < steps:
            return
    case.entry |= memory.look()
    if len(counts) > 1 and not case.late(30):  # a copy of all weights, and its hash
        case.phase("hash")
        case.entry["weights_hash"] = state_hash(training.model)


def tokens_of(size: Size, count: int, device: torch.device) -> Tensor:
    """(count, batch, length) token ids, the same for every system."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, size.vocab, (count, size.batch, size.length), generator=generator).to(device)


def timed(
    case: Case, training: Training, micro_batches: Tensor, memory: Memory, warm_up: int, steps: int
) -> dict[str, Any]:
    """Medians of some steps of these micro-batches, after some that are not timed."""
    forward_backward_s: list[float] = []
    optimizer_s: list[float] = []
    losses: list[float] = []
    for number in range(warm_up + steps):
        if number == warm_up:
            memory.reset_peak()
        memory.synchronize()
        started = time.perf_counter()
        loss = training.forward_backward(list(micro_batches))
        memory.synchronize()
        between = time.perf_counter()
        training.step()
        memory.synchronize()
        ended = time.perf_counter()
        losses.append(loss.item())
        if number >= warm_up:
            forward_backward_s.append(between - started)
            optimizer_s.append(ended - between)
        if case.late(ended - started) and number + 1 < warm_up + steps:
            break
    if not forward_backward_s:
        raise TimeoutError(f"no step was measured before the time was up; {len(losses)} of warm-up were done")
    step_s = statistics.median(a + b for a, b in zip(forward_backward_s, optimizer_s, strict=True))
    return {
        "steps": len(forward_backward_s),
        "step_s": step_s,
        "forward_backward_s": statistics.median(forward_backward_s),
        "optimizer_s": statistics.median(optimizer_s),
        "all_forward_backward_s": forward_backward_s,
        "all_optimizer_s": optimizer_s,
        "tokens_per_s": micro_batches.numel() / step_s,
        "losses": losses,
        **memory.look(),
    }


def profile(training: Training, size: Size, memory: Memory, path: Path) -> overlap.Overlap:
    """Write the operations that took longest in one more step, and its trace beside them. What ran beside what."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if memory.is_cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    tokens = tokens_of(size, 1, memory.device)
    with torch.profiler.profile(activities=activities) as recorded:
        training.forward_backward(list(tokens))
        training.step()
        memory.synchronize()
    averages = recorded.key_averages()
    orders = ["self_cpu_time_total", *(["self_cuda_time_total"] if memory.is_cuda else [])]
    trace = path.with_name(f"{path.stem}_trace.json")
    recorded.export_chrome_trace(str(trace))
    found = overlap.read(trace)
    tables = (averages.table(sort_by=order, row_limit=25) for order in orders)
    path.write_text("\n".join([found.in_words(), *tables]))
    return found


def _facts(training: Training) -> dict[str, Any]:
    """What a ShardedModel knows of itself."""
    report = getattr(training.model, "memory_report", None)
    if report is None:
        return {}
    device, host = training.model.chunk_manager.memory.tiers  # type: ignore[misc]
    step = training.optimizer.last_step  # type: ignore[attr-defined]
    return {
        "moved_bytes": dict(step.moved_bytes),
        "update_ms": step.update_ms,
        "exposed_ms": step.exposed_ms,
        "model_data_device_bytes": device.ledger.peak_bytes,
        "model_data_host_bytes": host.ledger.peak_bytes,
        "memory_report": report(),
    }


def _stop(number: int, frame: Any) -> None:
    raise TimeoutError("stopped by the time limit")


def main(
    name: Annotated[str, typer.Option(help="What the line is called.")],
    system: Annotated[str, typer.Option(help=f"One of: {', '.join(SYSTEMS)}.")],
    out: Annotated[Path, typer.Option(help="A file of JSON lines; this case's line is replaced.")],
    size: Annotated[str, typer.Option(help=f"One of: {', '.join(SIZES)}.")] = "1.3B",
    options: Annotated[str, typer.Option(help="JSON: for ours, arguments of ShardedModel.")] = "{}",
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    tiny: Annotated[bool, typer.Option("--tiny", help="The smallest model, to try the code.")] = False,
    micro_batches: Annotated[
        str, typer.Option(help="Micro-batches a step; several numbers, as in 1,2,4, are timed one after the other.")
    ] = "1",
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a step; else the size's own.")] = None,
    warm_up: Annotated[int, typer.Option(min=0)] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 5,
    max_s: Annotated[float, typer.Option(help="Start no step that would end after this many seconds.")] = 1e9,
    profile_to: Annotated[Path | None, typer.Option(help="Profile one more step into this file.")] = None,
) -> None:
    """Train a Llama-like model with one system for a few steps and write down time and memory."""
    if system not in SYSTEMS:
        raise typer.BadParameter(f"must be one of {', '.join(SYSTEMS)}, found {system!r}", param_hint="--system")
    if tiny:
        size = "tiny"
    if size not in SIZES:
        raise typer.BadParameter(f"must be one of {', '.join(SIZES)}, found {size!r}", param_hint="--size")
    try:
        counts = [int(count) for count in micro_batches.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"must be as in 1,2,4, found {micro_batches!r}", param_hint="--micro-batches")
    signal.signal(signal.SIGTERM, _stop)
    chosen = SIZES[size] if batch is None else replace(SIZES[size], batch=batch)
    entry = {
        "name": name,
        "system": system,
        "size": size,
        "options": json.loads(options),
        "holds": SYSTEMS[system].holds,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" and torch.cuda.is_available() else device,
        "error": None,
    }
    if device == "cpu":
        torch.set_num_threads(1)  # to try the code, beside whatever else runs
    case = Case(out, entry, max_s)
    failed = False
    try:
        run(case, chosen, torch.device(device), counts, warm_up, steps, profile_to)
    except BaseException as error:
        failed = True
        entry["error"] = f"{type(error).__name__}: {error}"[:1000]
        traceback.print_exc()
    case.phase(f"failed in {entry.get('phase', 'the start')}" if failed else "done")
    if failed:
        os._exit(1)  # a broken state may hang in teardown, and the next case waits for the memory


def run(
    case: Case,
    size: Size,
    device: torch.device,
    counts: Sequence[int],
    warm_up: int,
    steps: int,
    profile_to: Path | None,
) -> None:
    """Build, measure, profile, close."""
    memory = Memory(device)
    case.phase("build")
    training = SYSTEMS[case.entry["system"]].make(size, device, case.entry["options"])
    gc.collect()
    case.entry["num_parameters"] = sum(parameter.numel() for parameter in training.model.parameters())
    case.entry["after_build"] = memory.look()
    measure(case, training, size, memory, counts, warm_up, steps)
    case.entry |= _facts(training)
    if profile_to is not None and not case.late(2 * case.entry["step_s"] + 10):
        case.phase("profile")
        case.entry["overlap_ms"] = profile(training, size, memory, profile_to)._asdict()
    training.close()


if __name__ == "__main__":
    typer.run(main)
