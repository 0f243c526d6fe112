"""Tests of this folder need a CUDA device and are skipped without one.

GEMINI_TEST_DEVICE=cpu runs those that can on the emulated device instead: to try the tests themselves.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts: before the first product
DEVICE = torch.device(os.environ.get("GEMINI_TEST_DEVICE", "cuda"))
FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if DEVICE.type == "cuda" and not torch.cuda.is_available():
                item.add_marker(skip)


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """For what only a real GPU has: pinned memory, an allocator with statistics, streams."""
    if device.type != "cuda":
        pytest.skip("only on a real GPU")
    return device


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The promise of equal bits is for deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
