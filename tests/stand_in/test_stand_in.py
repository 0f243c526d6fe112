"""Training on an accelerator, without one. In processes of their own: in them the stand-in is the current device."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = (
    "tests/stand_in/on_device.py",
    "tests/gpu/test_use.py",
    "tests/gpu/test_walks.py",
    "tests/gpu/test_gpu.py",
    "tests/test_docs.py",
    "tests/test_public_names.py",
)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_it_passes_on_the_stand_in(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.stand_in.plugin", "-x"]
    environment = {**os.environ, "GEMINI_TEST_DEVICE": "stand_in:0", "OMP_NUM_THREADS": "1"}
    run = subprocess.run([*command, file], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE)
    assert run.returncode == 0, run.stdout[-10_000:]
