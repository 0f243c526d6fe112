"""The Triton kernels without a GPU: their bits in Triton's interpreter, and their instructions by compiling them.

Each runs in a process of its own: whether kernels are interpreted is settled when triton is imported.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.on_ranks import in_soak

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which torch brings on CUDA machines only"
)


def run(module: str, *arguments: str, cache: Path, interpret: bool) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": str(int(interpret)), "TRITON_CACHE_DIR": str(cache)}
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert result.returncode == 0, result.stdout[-10_000:] + result.stderr[-10_000:]


@pytest.mark.parametrize("every", ["5", *in_soak("1")])
def test_interpreted_kernels_give_the_bits_of_the_written_order(tmp_path: Path, every: str) -> None:
    """Of eight settings a fifth comes to each layout and dtype, in turns; the whole takes 20 s."""
    run("tests.triton_cases", every, cache=tmp_path, interpret=True)


@pytest.mark.soak
def test_compiled_kernels_round_every_operation_on_its_own(tmp_path: Path) -> None:
    run("tests.triton_ptx", cache=tmp_path, interpret=False)
