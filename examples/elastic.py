"""A training that survives its ranks: killed ones are started again, on as many as there are, with the same bits.

    torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        examples/elastic.py folder                     # the same command on each machine that takes part
    srun --ntasks 2 python examples/elastic.py folder  # the same under Slurm
    python examples/elastic.py folder                  # or on one rank, from the same folder

The data comes in a fixed number of streams, which the ranks share: a rank with two of them makes two micro-batches. So
the sum of a step's gradients has the same numbers on any number of ranks. With two streams it has the same bits, too.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import nn

import gemini
from gemini import Keep, ShardedModel, ShardedOptimizer
from optim import HybridAdam


def main(
    folder: Annotated[Path, typer.Argument(help="of checkpoints, which all ranks see")],
    steps: Annotated[int, typer.Option(help="of the whole training")] = 20,
    stop: Annotated[int | None, typer.Option(help="end after this step, as if the time were up")] = None,
    streams: Annotated[int, typer.Option(help="of data: a multiple of every number of ranks")] = 2,
    width: Annotated[int, typer.Option(help="of the model")] = 64,
) -> None:
    """Train, and print the hash of all states at the end."""
    if "RANK" not in os.environ and "SLURM_PROCID" in os.environ:
        gemini.launch_from_slurm()
    else:
        gemini.launch_from_torch()
    module = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    model = ShardedModel(module)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
    first = 0
    if (folder / "latest").exists():
        first = int(gemini.load_checkpoint(folder, model, optimizer).step or 0)
    last = steps if stop is None else stop
    for step in range(first, last):
        own = range(model.rank, streams, model.world_size)
        for stream in own:
            x = torch.randn(8, width, generator=torch.Generator().manual_seed(1000 * step + stream))
            x = x.to(gemini.current_device())
            loss = (model(x) - x.flip(-1)).square().mean()
            optimizer.backward(loss / len(own))  # gradients are means over ranks
        optimizer.step()
        optimizer.zero_grad()
        gemini.save_checkpoint(folder, model, optimizer, keep=Keep(2), asynchronous=step + 1 < last)
    found = gemini.state_hash(model, optimizer)
    if model.rank == 0:
        print(f"steps {first + 1} to {last} on {model.world_size} ranks, state hash: {found}", flush=True)
    model.close()


if __name__ == "__main__":
    typer.run(main)
