"""For pytest with `-p tests.stand_in.plugin`: the stand-in is the accelerator of all tests, and its copies are late."""

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.stand_in.device import set_late, take_counts


@pytest.fixture(autouse=True)
def late_copies() -> Iterator[None]:
    """Fails the test if the host wrote or freed memory from or to which a copy was still to come."""
    set_late(True)
    take_counts()
    yield
    gc.collect()  # a model that the test has dropped is in cycles: its device memory would pass for memory in use
    torch.accelerator.synchronize()
    set_late(False)
    early = {what: number for what, number in take_counts().items() if "too early" in what}
    assert not early, early
