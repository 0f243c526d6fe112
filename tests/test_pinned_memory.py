"""Registered host memory on a runtime that behaves as CUDA's does: overlaps are refused, errors wait for a launch."""

import gc
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measured_bytes import storage_bytes
from gemini import BudgetError, ShardedModel, ShardedOptimizer
from gemini.memory.arena import HostTier
from gemini.memory.memory import EmulatedTier
from gemini.model import wrap
from tests.zoo import mlp
from tests.zoo.registrar import Runtime


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    """Every model's host memory is pinned with it."""
    found = Runtime()
    monkeypatch.setattr(wrap, "choose_tiers", lambda device: (EmulatedTier(), HostTier(runtime=found)))
    yield found
    gc.collect()
    assert not found.ranges, "memory was kept after its model"
    assert not found.num_unmapped, "memory was freed while it was registered"


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
    homes: list[Any] = [home.flat for chunk in model.chunk_manager.chunks for home in chunk.homes.values()]
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


def test_memory_is_registered_once_when_a_model_is_wrapped_and_once_for_its_optimizer(runtime: Runtime) -> None:
    model = mlp.wrap("cpu", dtype=torch.bfloat16)
    assert runtime.num_registered == 1
    assert sum(runtime.ranges.values()) == model.chunk_manager.memory.tiers[1].ledger.total_bytes
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    for step in range(2):
        mlp.train_step(model, optimizer, step, torch.bfloat16)
        mlp.loss_of(model, step, torch.bfloat16).backward()  # two micro-batches: fp32 sums, which no plan knows of
        mlp.train_step(model, optimizer, step, torch.bfloat16)
    assert runtime.num_registered == 2
    registered, total = sum(runtime.ranges.values()), model.chunk_manager.memory.tiers[1].ledger.total_bytes
    assert registered == total - 4 * mlp.CHUNK_NUMEL * mlp.LAYERS, "all but the sums"
    del model, optimizer


def test_what_is_unfrozen_later_is_registered_beside_what_there_is(runtime: Runtime) -> None:
    module = mlp.build()
    module.layers[:3].requires_grad_(False)
    where: dict[str, Any] = {"tensor_placement_policy": "cpu", "chunk_size": mlp.CHUNK_NUMEL}
    model = ShardedModel(module, device="emulated", **where)
    optimizer = ShardedOptimizer(model, mlp.adam(module.parameters()))
    mlp.train_step(model, optimizer, 0)
    before = dict(runtime.ranges)
    module.requires_grad_(True)
    mlp.train_step(model, optimizer, 1)
    assert before.items() < runtime.ranges.items(), "nothing was registered again"
    host = model.chunk_manager.memory.tiers[1]
    assert sum(runtime.ranges.values()) == host.mapped_bytes == host.ledger.total_bytes
    for turn in range(4):  # room that is given up is found again
        module.layers[: 2 + turn].requires_grad_(turn % 2 == 1)
        mlp.train_step(model, optimizer, turn)
    assert host.mapped_bytes == sum(runtime.ranges.values())
    assert runtime.num_registered == 3
    del model, optimizer, module, host


@pytest.mark.parametrize("limit_bytes", [None, 100_000], ids=["", "the second is not pinned"])
def test_two_models_one_after_the_other_leave_nothing(runtime: Runtime, limit_bytes: int | None) -> None:
    def train(width: int) -> int:
        model, optimizer = mlp.sharded("cpu", make=lambda: mlp.Mlp(width))
        for step in range(2):
            mlp.train_step(model, optimizer, step)
        return sum(runtime.ranges.values())

    train(2)
    gc.collect()
    before = storage_bytes(), threading.active_count(), len(os.listdir("/proc/self/task"))
    runtime.limit_bytes = limit_bytes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        registered = []
        for layers in (4, 40):
            registered.append(train(layers))
            gc.collect()
    said = [warning for warning in caught if "could not be pinned" in str(warning.message)]
    assert len(said) == (limit_bytes is not None)
    assert registered[0] < registered[1] <= (limit_bytes or registered[1])
    assert not runtime.ranges
    assert (storage_bytes(), threading.active_count(), len(os.listdir("/proc/self/task"))) == before
    runtime.launch()


def test_an_optimizer_whose_state_does_not_fit_registers_nothing(runtime: Runtime) -> None:
    state_bytes = 4 * mlp.CHUNK_NUMEL * mlp.LAYERS
    model = mlp.wrap("cpu", host_memory=4 * state_bytes - 1)
    with pytest.raises(BudgetError, match="host_memory="):
        ShardedOptimizer(model, mlp.adam(model.parameters()))
    assert sum(runtime.ranges.values()) == state_bytes, "the parameters"
    optimizer = ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    mlp.train_step(model, optimizer)
    assert sum(runtime.ranges.values()) <= 4 * state_bytes - 1
    del model, optimizer


_FORKS = """
import gc, os, sys
from gemini.memory.memory import EmulatedTier
from gemini.memory.arena import HostTier
from gemini.model import wrap
from tests.zoo import mlp
from tests.zoo.registrar import Runtime

runtime = Runtime()
wrap.choose_tiers = lambda device: (EmulatedTier(), HostTier(runtime=runtime))
model, optimizer = mlp.sharded("cpu")
mlp.train_step(model, optimizer)
wanted, ranges = mlp.weights_of(model), dict(runtime.ranges)
child = os.fork()
if child == 0:
    mlp.assert_same(mlp.weights_of(model), wanted)
    runtime.unregister = lambda address: os._exit(3)
    del model, optimizer
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, "the child unregistered memory"
assert runtime.ranges == ranges
mlp.assert_same(mlp.weights_of(model), wanted)
mlp.train_step(model, optimizer, 1)
runtime.unregister = lambda address: sys.stderr.write("unregistered at the end of the process")
"""


@pytest.mark.soak
def test_a_forked_child_and_the_end_of_the_process_leave_registrations_alone() -> None:
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", _FORKS], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
