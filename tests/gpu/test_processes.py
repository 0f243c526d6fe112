"""What ends a process, or must not: each case is a script of its own, on one GPU."""

import os
import subprocess
import sys

import pytest
import torch

JOINING = "gemini.launch_from_torch(rank_timeout=60)", "torch.distributed.init_process_group()"
RANKS = """
import torch, gemini
{joining}
gemini.ShardedModel(torch.nn.Linear(8, 8))
"""
DROPPED = """
import gc, torch, gemini
from tests.gpu.late import LateCopies

def train(steps):
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    model = gemini.ShardedModel(module, tensor_placement_policy="cpu", dtype=torch.bfloat16)
    optimizer = gemini.ShardedOptimizer(model, gemini.HybridAdam(model.parameters()))
    for step in range(steps):
        loss = model(torch.ones(4, 512, device="cuda", dtype=torch.bfloat16)).square().mean()
        optimizer.backward(loss)
        optimizer.step()
    return model, optimizer, loss

wanted = gemini.state_hash(*train(3)[:2])
for _ in range(4):
    with LateCopies(40_000_000) as late:  # about 20 ms each: many are still to come when nothing refers to the model
        train(1)
    gc.collect()
    assert late.num_late > 0
    assert gemini.state_hash(*train(3)[:2]) == wanted
torch.cuda.synchronize()
"""


@pytest.mark.parametrize("joining", JOINING)
def test_ranks_that_share_a_gpu_are_told_so(joining: str, cuda: torch.device) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(cuda.index), "SCRIPT": RANKS.format(joining=joining)}
    done = subprocess.run(
        [*torchrun, "--no-python", sys.executable, "-c", "import os; exec(os.environ['SCRIPT'])"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode != 0
    assert done.stderr.count("UnsupportedError: ranks 0 and 1 both use the GPU") == 2, done.stderr[-3000:]


def test_models_that_are_dropped_in_mid_copy_disturb_nobody(cuda: torch.device) -> None:
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr[-3000:]
