"""A `Trainer` makes a step once more for which a device had no memory, and nothing of it is lost or counted twice.

On an emulated device whose capacity counts activations, one batch is larger than the others.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import EmulatedDevice, RemoteRankError, state_hash
from gemini.engine.trainer import Hook, Trainer
from gemini.memory.memory import EmulatedTier
from tests.features.test_out_of_memory import TOTAL
from tests.harness.on_ranks import gathered, on_ranks
from tests.harness.told import told
from tests.zoo.mlp import CHUNK_NUMEL, WIDTH, Mlp, adam, build, inputs

LARGE = 5  # the micro-batch that is larger than the others
NUM_BATCHES = 8


class Noisy(Mlp):
    """Random numbers and statistics that every forward moves on; its own buffer is made anew each time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(nn.functional.dropout(self.norm(x), 0.2))
        self.mean = 0.5 * self.mean + y.detach().mean(0)
        return y


class Losses(Hook):
    def __init__(self) -> None:
        self.heard: list[float] = []

    def after_micro_batch(self, trainer: Trainer, batch: Any, outcome: Any) -> None:
        self.heard.append(float(outcome.loss.detach()))

    def after_step(self, trainer: Trainer) -> None:
        self.heard.append(-1.0)


def batches(rank: int, copies: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for number in range(NUM_BATCHES):
        x = inputs(10 * number + rank).repeat(copies if number == LARGE else 1, 1)
        found.append((x, x.flip(-1)))
    return found


def engine_on(device: EmulatedDevice, **more: Any) -> Any:
    torch.manual_seed(5)
    config = {"device": device, "chunk_size": CHUNK_NUMEL, **more}
    engine, *_ = gemini.initialize(build(Noisy), lambda its: adam(its), nn.MSELoss(), config=config, verbose=False)
    return engine


def fit(device: EmulatedDevice, data: list[tuple[Tensor, Tensor]], micro_batches: int) -> tuple[Any, ...]:
    engine, losses = engine_on(device, gradient_accumulation_steps=micro_batches), Losses()
    Trainer(engine).fit(data, 1, hooks=[losses])
    buffers = {name: buffer.tolist() for name, buffer in engine.module.named_buffers()}
    found = losses.heard, state_hash(engine.model, engine.optimizer), buffers, engine.global_steps, engine.micro_steps
    engine.close()
    return found


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_step_without_memory_is_made_once_more_with_the_same_bits(
    rank: int, world_size: int, micro_batches: int
) -> None:
    """The last rank alone runs out of memory, with dropout, batch norm and micro-batches before."""
    device, data = EmulatedDevice(TOTAL), batches(rank, 5 if rank == world_size - 1 else 1)
    with told() as lines, device.holding_activations():
        found = fit(device, data, micro_batches)
    assert found == fit(EmulatedDevice(), data, micro_batches)
    assert (len(found[0]), found[-1]) == (NUM_BATCHES + found[-2], NUM_BATCHES)
    said = [line for line in lines if "which is made once more" in line]
    assert any(f"in step {LARGE // micro_batches + 1}," in line for line in said) == (rank == 0), said


class Short(nn.MSELoss):
    """A criterion of the script's, which runs out of memory on one rank."""

    def __init__(self, is_short: bool) -> None:
        super().__init__()
        self.is_short, self.outputs = is_short, []  # weak references
        self.most_alive = 0

    def forward(self, output: Tensor, label: Tensor) -> Tensor:
        self.most_alive = max(self.most_alive, sum(each() is not None for each in self.outputs))
        self.outputs.append(weakref.ref(output))
        if self.is_short and len(self.outputs) == 6:
            raise torch.OutOfMemoryError("no room for the loss")
        return super().forward(output, label)


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_a_criterion_without_memory_repeats_the_window_on_all_ranks(rank: int, world_size: int) -> None:
    found = []
    for is_short in (True, False):
        device = EmulatedDevice(TOTAL)
        engine = engine_on(device, gradient_accumulation_steps=3)
        engine._criterion = criterion = Short(is_short and rank == world_size - 1)
        Trainer(engine).fit(batches(rank, 1), 1)
        assert criterion.most_alive <= 1, "outputs of the micro-batches before take memory"
        found.append((state_hash(engine.model, engine.optimizer), engine.global_steps, engine.micro_steps))
        engine.close()
    assert found[0] == found[1]


@contextmanager
def holding_at_most(device: EmulatedDevice, num_bytes: int) -> Iterator[None]:
    """Inside, the device has no memory for more model data than that, whatever its budget says."""
    allocate = EmulatedTier._allocate

    def _allocate(tier: EmulatedTier, wanted: int, kind: str) -> Tensor:
        if tier.ledger.total_bytes + wanted > num_bytes:
            device._num_ooms += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB")
        return allocate(tier, wanted, kind)

    with mock.patch.object(EmulatedTier, "_allocate", _allocate):
        yield


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_slots_without_memory_repeat_the_window_on_all_ranks(rank: int, world_size: int, micro_batches: int) -> None:
    """Another process has taken the memory that the slots of the last rank were to have."""
    found = []
    for is_short in (True, False):
        device = EmulatedDevice(TOTAL)
        engine = engine_on(device, gradient_accumulation_steps=micro_batches, tensor_placement_policy="cpu")
        at_first = engine.model.plan.device_bytes
        most = at_first - 1 if is_short and rank == world_size - 1 else 10**9
        with told() as lines, holding_at_most(device, most):
            Trainer(engine).fit(batches(rank, 1), 1)
        assert (engine.model.plan.device_bytes < at_first) == is_short
        said = [line for line in lines if "ran out of memory in step 1, which is made once more" in line]
        assert bool(said) == (is_short and rank == 0), lines
        found.append((state_hash(engine.model, engine.optimizer), engine.global_steps, engine.micro_steps))
        engine.close()
    assert found[0] == found[1]


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_a_batch_that_never_fits_is_an_error_after_all_room_was_made(rank: int, world_size: int) -> None:
    device, who = EmulatedDevice(TOTAL), world_size - 1
    engine, data = engine_on(device), batches(rank, 60 if rank == who else 1)
    before = engine.model.plan.device_bytes
    kind = torch.OutOfMemoryError if rank == who else RemoteRankError
    with pytest.raises(kind, match="out of memory"), device.holding_activations():
        Trainer(engine).fit(data, 1)
    assert engine.global_steps == LARGE
    assert engine.model.plan.device_bytes < before
    assert len(set(gathered(engine.model.plan.hash))) == 1
    Trainer(engine).fit(batches(rank, 1), 1)
    assert engine.global_steps == LARGE + NUM_BATCHES
    engine.close()


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:a (forward|backward).* ended with an exception")
def test_other_errors_are_not_repeated(rank: int, world_size: int) -> None:
    engine = engine_on(EmulatedDevice(TOTAL))
    data = batches(rank, 1)
    if rank == world_size - 1:
        data[2] = data[2][0][:, :-1], data[2][1]
    with pytest.raises((RuntimeError, RemoteRankError), match=r"running_mean should contain 15 elements"):
        Trainer(engine).fit(data, 1)
    assert engine.global_steps == 2
    Trainer(engine).fit(batches(rank, 1), 1)  # it can go on
    assert (engine.global_steps, engine.micro_steps) == (2 + NUM_BATCHES,) * 2
    engine.close()
