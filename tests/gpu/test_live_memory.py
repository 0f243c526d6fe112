"""The GPU's memory is taken by another process, or by a batch that is too large: states move, and no bit changes."""

import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

from gemini import HybridAdam, ShardedModel, ShardedOptimizer, state_hash

GIB = 2**30
OTHER = """
import sys, torch
device = torch.device("cuda", int(sys.argv[1]))
kept = torch.empty(torch.cuda.mem_get_info(device)[0] - 64 * 2**20, dtype=torch.uint8, device=device)
print(kept.numel(), flush=True)
sys.stdin.readline()
"""
STEPS, ROWS = 8, 8192
ROOM = 9 * GIB
"""Of the device: 4 GiB of state, 2.4 GiB of activations (16 layers keep 4096 fp32 numbers a row), and what the other
process takes. Once that is taken, the part that is left out beside activations, a tenth of them and 3 % of all, does
not fit beside the state."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(16)))  # 1 GiB of weights, 4 GiB of state


def clear() -> None:
    """A closed model keeps its homes and moments until the collector of cycles finds them."""
    gc.collect()
    torch.cuda.empty_cache()


def train(between: object = None) -> tuple[list[float], int]:
    model = ShardedModel(build())
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-4))
    losses = []
    for step in range(STEPS):
        x = torch.randn(ROWS, 4096, generator=torch.Generator().manual_seed(step)).to("cuda")
        loss = (model(x) - x).square().mean()
        optimizer.backward(loss)
        losses.append(float(loss.detach()))
        optimizer.step()
        if callable(between):
            between(step, model)
    found = losses, state_hash(model, optimizer)
    model.close()
    return found


def test_states_leave_for_another_process_and_come_back(cuda: torch.device) -> None:
    clear()
    if torch.cuda.mem_get_info(cuda)[0] < ROOM:
        pytest.skip(f"needs a GPU with {ROOM // GIB} GiB free")
    wanted = train()
    clear()
    filler = torch.empty(torch.cuda.mem_get_info(cuda)[0] - ROOM, dtype=torch.uint8, device=cuda)
    other, plans = [], []

    def change(step: int, model: ShardedModel) -> None:
        plans.append(model.plan)
        if step == 0:
            torch.cuda.empty_cache()  # of wrapping; what the next step takes stays cached, so that step 2 finds room
        if step == 1:
            command = [sys.executable, "-c", OTHER, str(cuda.index)]
            other.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert other[0].stdout is not None
            assert other[0].stdout.readline().strip().isdigit(), "it holds all the rest by now"
        elif step == 4:
            other[0].communicate("\n", timeout=60)
            assert other[0].returncode == 0

    try:
        got = train(change)
    finally:
        for process in other:
            process.kill()
            process.wait()
        del filler
    assert got == wanted
    assert plans[2].host_bytes == 0
    assert plans[4].host_bytes > 0, "while the other process is there"
    assert plans[7].host_bytes == 0, "and they come back when it has ended"


LARGE = 3  # the step whose batch is large


def rows_of(step: int) -> int:
    """16 layers keep 4096 fp32 numbers a row: 7 GiB for the large batch."""
    return 28 * 1024 if step == LARGE else 64


def train_again(**options: object) -> tuple[list[float], int, int]:
    """Losses, the hash of the state, and how often a step failed; it is made again then."""
    model = ShardedModel(build(), **options)  # type: ignore[arg-type]
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-4))
    losses, failures = [], 0
    for step in range(5):
        x = torch.randn(rows_of(step), 4096, generator=torch.Generator().manual_seed(step)).to("cuda")
        for _ in range(6):
            try:
                loss = (model(x) - x).square().mean()
                optimizer.backward(loss)
                optimizer.step()
            except torch.OutOfMemoryError:
                failures += 1
            else:
                losses.append(float(loss.detach()))
                break
            finally:
                loss = None
            clear()
        assert len(losses) == step + 1
    found = losses, state_hash(model, optimizer), failures
    model.close()
    return found


@pytest.mark.filterwarnings("ignore:a backward ended with an exception")
def test_a_batch_that_is_too_large_is_trained_again_on_a_smaller_budget(cuda: torch.device) -> None:
    clear()
    total = torch.cuda.get_device_properties(cuda).total_memory
    if torch.cuda.mem_get_info(cuda)[0] < 20 * GIB:
        pytest.skip("needs a GPU with 20 GiB free")
    wanted = train_again()
    assert wanted[2] == 0
    clear()
    torch.cuda.set_per_process_memory_fraction(11 * GIB / total, cuda)
    try:
        got = train_again(device_memory=11 * GIB)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    assert got[2] > 0, "the batch fitted at once"
    assert got[:2] == wanted[:2]
