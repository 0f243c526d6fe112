"""What a model may take: the device's and the host's budget on one rank."""

from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from gemini import ShardedModel, ZeroInitContext
from gemini.memory import live
from tests.mlp import build

FREE_BYTES = 10**6


@pytest.fixture
def reading() -> Iterator[None]:
    """A device that has so much free."""
    with mock.patch.object(live, "free_device_bytes", return_value=FREE_BYTES):
        yield


@pytest.mark.parametrize("is_built", [False, True])
def test_memory_that_wrapping_frees_counts_as_free(reading: None, is_built: bool) -> None:
    """The module's own parameters lie on the device that they are about to leave; tied ones count once."""
    with ZeroInitContext(enabled=is_built):
        module = build()
        module.layers[1].weight = module.layers[0].weight
    elements = sum(parameter.numel() for parameter in module.parameters())
    budget = ShardedModel(module, device="emulated").plan.budget_bytes
    assert budget is not None
    padding = 256 * len(list(module.parameters())) if is_built else 0  # of the shards that a build keeps
    assert int((FREE_BYTES + 4 * elements) * 0.7) <= budget <= int((FREE_BYTES + 4 * (elements + padding)) * 0.7)


def test_a_given_budget_is_what_the_user_gave(reading: None) -> None:
    assert ShardedModel(build(), device="emulated", model_data_memory=50_000).plan.budget_bytes == 50_000
    assert ShardedModel(build(), device="emulated", device_memory="1MB").plan.budget_bytes == 700_000


def test_buffers_stay_and_are_not_counted_as_free(reading: None) -> None:
    module = build()
    module.register_buffer("table", torch.zeros(1000))
    elements = sum(parameter.numel() for parameter in module.parameters())
    assert ShardedModel(module, device="emulated").plan.budget_bytes == int((FREE_BYTES + 4 * elements) * 0.7)
