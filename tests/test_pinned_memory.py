"""Registered host memory on a runtime that behaves as CUDA's does: overlaps are refused, errors wait for a launch."""

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import ShardedModel, ShardedOptimizer
from gemini.memory.emulated import EmulatedTier
from gemini.memory.host import HostTier
from gemini.model import sharded_model
from tests import mlp

ALREADY_REGISTERED, NOT_REGISTERED, NO_MEMORY = 712, 713, 2


class Runtime:
    """Knows address ranges, as the driver does, and the last error, which the next launch raises and clears."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.ranges: dict[int, int] = {}
        self.limit_bytes = limit_bytes
        self.last_error = self.num_registered = self.num_refused = 0

    def register(self, address: int, num_bytes: int) -> int:
        error = 0
        if any(address < start + size and start < address + num_bytes for start, size in self.ranges.items()):
            error = ALREADY_REGISTERED
        elif self.limit_bytes is not None and sum(self.ranges.values()) + num_bytes > self.limit_bytes:
            error = NO_MEMORY
        if error:
            self.last_error, self.num_refused = error, self.num_refused + 1
            return error
        self.ranges[address] = num_bytes
        self.num_registered += 1
        return 0

    def unregister(self, address: int) -> int:
        if self.ranges.pop(address, None) is None:
            self.last_error = NOT_REGISTERED
            return NOT_REGISTERED
        return 0

    def launch(self) -> None:
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def holds(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(a <= start and start + tensor.nbytes <= a + size for a, size in self.ranges.items())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Every model's host memory is pinned with it."""
    found = Runtime()
    monkeypatch.setattr(sharded_model, "choose_tiers", lambda device: (EmulatedTier(), HostTier(runtime=found)))
    yield found
    gc.collect()


def trained(step: int = 0) -> tuple[ShardedModel, ShardedOptimizer]:
    model, optimizer = mlp.sharded("cpu")
    mlp.train_step(model, optimizer, step)
    return model, optimizer


def test_models_of_one_process_one_after_the_other_pin_the_same_addresses(runtime: Runtime) -> None:
    reference, its = mlp.plain()
    mlp.train_step(reference, its, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            model, optimizer = trained()
            assert runtime.ranges
            mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))
            del model, optimizer
            gc.collect()
            assert not runtime.ranges, "memory was freed, or kept, while it was registered"
    runtime.launch()


def test_memory_stays_registered_for_as_long_as_a_tensor_of_it_lives(runtime: Runtime) -> None:
    model, optimizer = trained()
    homes: list[Any] = [home.flat for chunk in model.executor.chunks for home in chunk.homes.values()]
    assert all(runtime.holds(flat) for flat in homes)
    model.close()
    del model, optimizer
    gc.collect()
    assert all(runtime.holds(flat) for flat in homes)
    kept = homes.pop()
    homes.clear()
    gc.collect()
    assert runtime.holds(kept)
    del kept
    assert not runtime.ranges


def test_a_machine_that_cannot_lock_memory_is_said_once_and_training_goes_on(runtime: Runtime) -> None:
    runtime.limit_bytes = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model, optimizer = trained()
        runtime.launch()  # whatever is launched next, by anyone
        for step in (1, 2):
            mlp.train_step(model, optimizer, step)
    said = [str(warning.message) for warning in caught if "could not be pinned" in str(warning.message)]
    assert len(said) == 1
    assert "ulimit -l" in said[0]
    assert runtime.num_refused == 1, "memory that cannot be pinned was tried again"
    reference, its = mlp.plain()
    for step in range(3):
        mlp.train_step(reference, its, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(reference))


def test_an_error_that_a_launch_does_not_clear_is_not_swallowed(runtime: Runtime, monkeypatch: Any) -> None:
    runtime.limit_bytes = 0
    monkeypatch.setattr(runtime, "launch", lambda: (_ for _ in ()).throw(RuntimeError("device-side assert")))
    with pytest.raises(RuntimeError, match="device-side assert"):
        mlp.wrap("cpu")


def test_host_memory_starts_as_zeros() -> None:
    tier = HostTier(runtime=Runtime())
    for _ in range(3):
        buffer = tier.take(1000, "param")
        assert not torch.count_nonzero(buffer)
        buffer.fill_(7)
        tier.give(buffer, "param")
        del buffer
    assert tier.ledger.total_bytes == 0
