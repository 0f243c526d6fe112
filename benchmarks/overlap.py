"""What ran beside what in a profiled step: kernels, copies in each direction, and the time in which the device idled.

    python -m benchmarks.overlap benchmarks/results/gpu/profile_trace.json

It reads a trace of `torch.profiler` (`export_chrome_trace`). `benchmarks/gpu.sh` leaves one for each case that it
profiles: profile_trace.json, profile_host_trace.json and profile_big_trace.json. The same files open in Perfetto
(ui.perfetto.dev), with a row for each stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

Interval = tuple[float, float]
"""(begin, end) in microseconds."""


class Overlap(NamedTuple):
    """Milliseconds of one step. Each is the length of a union of intervals, so nothing is counted twice."""

    step: float  # from the first to the last event of the trace
    kernels: float
    to_device: float
    to_host: float
    copies_beside_kernels: float  # copies in either direction while a kernel runs
    copies_exposed: float  # while no kernel runs
    idle: float  # neither a kernel nor a copy runs: the device waits for the host

    def in_words(self) -> str:
        copies = self.copies_beside_kernels + self.copies_exposed
        share = f"{self.copies_beside_kernels / copies:.1%}" if copies else "there are none"
        return (
            f"step {self.step:.1f} ms: kernels {self.kernels:.1f}, host->device {self.to_device:.1f}, device->host "
            f"{self.to_host:.1f}; copies beside kernels {self.copies_beside_kernels:.1f} ({share}), exposed "
            f"{self.copies_exposed:.1f}; device idle {self.idle:.1f}"
        )


def overlap_of(events: Iterable[dict[str, Any]]) -> Overlap:
    """What the events of a Chrome trace ran beside. Raises ValueError for a trace without events that last."""
    lasting = [each for each in events if each.get("ph") == "X" and "dur" in each]
    if not lasting:
        raise ValueError("the trace has no event that lasts: was a step profiled?")
    kernels = union(_interval(each) for each in lasting if each.get("cat") == "kernel")
    memcpy = [each for each in lasting if each.get("cat") == "gpu_memcpy"]
    to_device = union(_interval(each) for each in memcpy if "HtoD" in each["name"])
    to_host = union(_interval(each) for each in memcpy if "DtoH" in each["name"])
    copies = union([*to_device, *to_host])
    # Length of an intersection: |A| + |B| - |A or B|.
    busy = length(union([*kernels, *copies]))
    beside = length(kernels) + length(copies) - busy
    everything = union(map(_interval, lasting))
    step = everything[-1][1] - everything[0][0]
    figures = step, length(kernels), length(to_device), length(to_host), beside, length(copies) - beside, step - busy
    return Overlap(*(each / 1000 for each in figures))


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time in intervals that do not touch, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def read(path: Path) -> Overlap:
    """The overlap in a file of `export_chrome_trace`. Raises ValueError for one without events."""
    trace = json.loads(path.read_text())
    return overlap_of(trace["traceEvents"] if isinstance(trace, dict) else trace)


def main(path: Annotated[Path, typer.Argument(help="A trace of torch.profiler.", exists=True)]) -> None:
    """Print what ran beside what."""
    try:
        found = read(path)
    except ValueError as error:
        Console(stderr=True).print(f"{path.name}: {error}", style="red")
        raise typer.Exit(1) from None
    print(found.in_words())


if __name__ == "__main__":
    typer.run(main)
