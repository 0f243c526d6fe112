"""Scripts under a real `torchrun`: README's first example as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIRST = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)[0]
TELLS = """
print(f"rank {model.rank} of {model.world_size}: {float(loss):.9f}, {model.memory_report().count('device')} lines")
print("home", model.chunk_manager.chunks[0].optim_numel * 2 == model.chunk_manager.chunks[0].numel)
"""


def run(script: Path, **variables: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
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


@pytest.mark.soak
def test_ranks_that_are_left_apart_train_a_model_each(tmp_path: Path) -> None:
    script = tmp_path / "first.py"
    script.write_text(f"{FIRST}{TELLS}")
    out = run(script, GEMINI_NO_LAUNCH="1")
    assert out.count("rank 0 of 1:") == 2 and "joined" not in out
