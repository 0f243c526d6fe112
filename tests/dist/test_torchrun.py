"""Scripts under a real `torchrun`: README's first example as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.harness.ranks import RankPool

ROOT = Path(__file__).resolve().parents[2]
FIRST = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
TELLS = """
print(f"rank {model.rank} of {model.world_size}: {float(loss):.9f}, {model.memory_report().count('device')} lines")
print("home", model.chunk_manager.chunks[0].optim_numel * 2 == model.chunk_manager.chunks[0].numel)
"""


KILLED = """
import os, signal, sys
from pathlib import Path

import torch
import gemini
from optim import HybridAdam

folder, victim = Path(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16))
model = gemini.ShardedModel(module, dtype=torch.bfloat16)
optimizer = gemini.ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2))
first = 0
if (folder / "latest").exists():
    first = gemini.load_checkpoint(folder, model, optimizer).step


def die(*_):
    # In the middle of a backward, the first time only: torchrun starts all ranks again.
    if step == 5 and model.rank == victim and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


for step in range(first, 8):
    hidden = model.module[0](torch.full((2, 16), step + 1.0 + model.rank, dtype=torch.bfloat16))
    hidden.register_hook(die)
    loss = model.module[1](hidden).float().square().mean()
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    gemini.save_checkpoint(folder, model, optimizer, keep=2, asynchronous=step % 2 == 0)
    (folder / f"loss-{model.rank}-{step}").write_text(loss.detach().numpy().tobytes().hex())
model.close()
"""


def run(script: Path, *arguments: str, restarts: int = 0, **variables: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [f"--max-restarts={restarts}", str(script), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


def test_the_first_example_shares_its_model_over_the_ranks_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(f"import torch\ntorch.manual_seed(0)\n{FIRST}{TELLS}")
    out = run(script)
    assert out.count("2 ranks, gloo, on cpu; joined by themselves (GEMINI_NO_LAUNCH=1 leaves them apart)") == 1
    losses = re.findall(r"rank [01] of 2: (\S+),", out)
    # Each rank is seeded alike, so it draws the same batches.
    assert len(losses) == 2 and losses[0] == losses[1]
    assert out.count("home True") == 2


def train_undisturbed(rank: int, world_size: int, folder: str) -> None:
    """The script on the ranks of the tests, where starting them costs nothing."""
    with mock.patch.object(sys, "argv", ["killed.py", folder, "-1"]):
        exec(KILLED, {"__name__": "killed"})


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.soak)])
def test_ranks_that_torchrun_starts_again_go_on_from_the_last_checkpoint(
    tmp_path: Path, ranks: RankPool, victim: int
) -> None:
    """A rank is killed in the middle of a step: the losses are those of a run that nobody disturbed."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    run(script, str(tmp_path / "killed"), str(victim), restarts=1)
    ranks(2).run(train_undisturbed, str(tmp_path / "whole"))
    losses = [
        {path.name: path.read_text() for path in (tmp_path / name).glob("loss-*")} for name in ("killed", "whole")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 16


@pytest.mark.soak
def test_ranks_that_are_left_apart_train_a_model_each(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(f"{FIRST}{TELLS}")
    out = run(script, GEMINI_NO_LAUNCH="1")
    assert out.count("rank 0 of 1:") == 2 and "joined" not in out
