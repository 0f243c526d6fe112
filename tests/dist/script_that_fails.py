"""One rank of a script whose data loader breaks on rank 1: `script_that_fails.py STORE RANK`, started twice."""

import sys

import torch
import torch.distributed as dist

from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
module = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(4)))
model = ShardedModel(module, device="emulated")
optimizer = ShardedOptimizer(model, HybridAdam(model.parameters()))
for step in range(3):
    if rank == 1 and step == 1:
        raise ValueError("the loader broke")
    optimizer.backward(model(torch.ones(2, 32)).square().mean())
    optimizer.step()
