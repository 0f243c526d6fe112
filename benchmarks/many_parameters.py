"""Seconds to wrap many small layers, make the optimizer and train the first step.

    python -m benchmarks.many_parameters            one rank
    python -m benchmarks.many_parameters --ranks 2  the slowest of two, at stage 3

Each row doubles the layers, so that what grows faster than the model shows. Processor time of this process: other
processes count less than in wall time.
"""

import time
from itertools import pairwise
from typing import Annotated, Any

import torch
import typer
from torch import nn

from benchmarks.launch import run_ranks
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

WIDTH = 8
NUM_LAYERS = {1: (2_500, 5_000, 10_000), 2: (500, 1_000, 2_000)}
"""By ranks: of several, which agree on the order of each gradient in a first step, each waits for the slowest."""
PHASES = ("wrap", "optimizer", "forward", "backward", "step")
CHUNK_SIZES = {"searched": None, "a chunk per parameter": 256}


def measure(num_layers: int, chunk_size: int | None) -> list[float]:
    """Seconds of each of `PHASES`."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    times = [time.process_time()]

    def done(result: Any) -> Any:
        times.append(time.process_time())
        return result

    model = done(ShardedModel(module, device="emulated", chunk_size=chunk_size))
    optimizer = done(ShardedOptimizer(model, HybridAdam(model.parameters())))
    loss = done(model(torch.ones(4, WIDTH)).sum())
    done(loss.backward())
    done(optimizer.step())
    return [end - start for start, end in pairwise(times)]


def measure_as_rank(rank: int, world_size: int, num_layers: int, chunk_size: int | None) -> list[float]:
    """`measure`, after a small model that pays for imports. Collective."""
    measure(50, None)
    return measure(num_layers, chunk_size)


def main(ranks: Annotated[int, typer.Option(min=1, max=2, help="1 or 2.")] = 1) -> None:
    """Time models of more and more layers."""
    print(f"{'chunk size':24}{'parameters':>12}" + "".join(f"{phase:>11}" for phase in (*PHASES, "all")))
    for name, chunk_size in CHUNK_SIZES.items():
        for num_layers in NUM_LAYERS[ranks]:
            options = {"num_layers": num_layers, "chunk_size": chunk_size}
            by_rank = run_ranks("benchmarks.many_parameters:measure_as_rank", ranks, options, 300)
            seconds = max(by_rank, key=sum)
            row = "".join(f"{each:>11.2f}" for each in (*seconds, sum(seconds)))
            print(f"{name:24}{2 * num_layers:>12}{row}", flush=True)


if __name__ == "__main__":
    typer.run(main)
