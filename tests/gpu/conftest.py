"""Tests of this folder are for a CUDA device.

Without one, those that can run on the emulated device do, so that the tests themselves stay sound: a sample of them in
`make test`, the rest with the long tests. GEMINI_TEST_DEVICE=cpu or =cuda chooses; cuda without a GPU skips all.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.gpu.device import DEVICE

FOLDER = Path(__file__).parent
FIRST = "test_what_rests_on_the_host", "test_the_allocators", "test_nothing_is_reserved", "test_a_budget_that_is"
ON_GPU_ONLY = "gpt2-sdpa-", "gpt2-half", "gpt2-fits", "gpt2-cpu", "gpt2-cuda", "checkpoint-fits", "checkpoint-cuda"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if DEVICE.type == "cuda" and not torch.cuda.is_available():
                item.add_marker(skip)
            if DEVICE.type == "cpu" and any(part in item.name for part in ON_GPU_ONLY):
                item.add_marker(pytest.mark.soak)
    # what takes seconds and says most about a new machine comes first: a run that is cut short has told it
    items.sort(key=lambda item: FOLDER in item.path.parents and not item.name.startswith(FIRST))


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """For what only a real GPU has: pinned memory, an allocator with statistics, streams.

    With its index: some functions of torch.cuda take no device without one.
    """
    if device.type != "cuda":
        pytest.skip("only on a real GPU")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """The promise of equal bits is for deterministic algorithms."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)
