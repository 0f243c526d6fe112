"""A training script of which one rank fails: `script_that_fails.py WHERE WHO INIT_METHOD RANK`, started twice."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

LONGEST_S = 120.0  # nobody may be there any more to end it
where, who, init_method, rank = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        fail_in("backward")
        return grad


class Layer(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fail_in("forward")
        return Fails.apply(super().forward(x))


def fail_in(place: str) -> None:
    if place == where and rank == who and step == 1:
        if where == "exit":
            sys.exit(4)
        if where == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"the {where} broke")


step = -1
dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=2)
if where == "wrap" and rank == who:
    ShardedModel(torch.nn.Linear(8, 8), stage=9)
module = torch.nn.Sequential(*(Layer(32, 32) for _ in range(4)))
model = ShardedModel(module, device="emulated")
optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-3))
if where == "killed-before-another-model":
    if rank == who:
        os.kill(os.getpid(), signal.SIGKILL)
    ShardedModel(torch.nn.Linear(8, 8), device="emulated")  # waits for the others at the store
if where == "endless":
    Path(f"{init_method.removeprefix('file://')}-{rank}-trains").touch()
started = time.monotonic()
for step in range(10**9 if where == "endless" else 3):  # noqa: B007  (fail_in reads it)
    if time.monotonic() - started > LONGEST_S:
        break
    fail_in("loader")
    output = model(torch.ones(2, 32))
    fail_in("loss")
    output.square().mean().backward()
    fail_in("exit")
    fail_in("killed")
    if where == "step" and rank == who:
        optimizer.param_groups[0]["lr"] = -1.0
    optimizer.step()
if where == "diverging":
    with torch.no_grad():
        model.module[3 if rank == who else 0].weight.sum()
        model.module[2 if rank == who else 1].weight.sum()
if where.startswith("ends"):
    if rank != who:
        model.state_dict()
    if "destroys" in where:
        dist.destroy_process_group()
