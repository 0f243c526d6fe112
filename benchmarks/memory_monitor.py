"""What a look at live memory costs: `MemoryMonitor.read` and its parts, microseconds a call.

    python -m benchmarks.memory_monitor                 # this machine's device, else the emulated one

The host's part grows with the control groups around the process that have a limit, the device's with the processes
that use it. Median over rounds of calls, with quartiles.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated

import typer

from gemini import MemoryMonitor

CALLS = 50


def spread(call: Callable[[], object], rounds: int) -> tuple[float, float, float]:
    """Quartiles of microseconds a call."""
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begun) / CALLS * 1e6)
    low, middle, high = statistics.quantiles(times, n=4)
    return low, middle, high


def main(rounds: Annotated[int, typer.Option(min=2, help="Rounds of 50 calls.")] = 40) -> None:
    """Time readings."""
    begun = time.perf_counter()
    monitor = MemoryMonitor(directory=".")
    print(f"{'made once':12}{(time.perf_counter() - begun) * 1e6:>10.0f} us")
    parts = {"device": monitor.read_device, "host": monitor.read_host, "all, disk too": monitor.read}
    for name, call in parts.items():
        call()
        low, middle, high = spread(call, rounds)
        print(f"{name:14}{middle:>8.0f} us   ({low:.0f} to {high:.0f})")


if __name__ == "__main__":
    typer.run(main)
