"""Torch optimizers update tiles: no bit depends on their size, and a step finds room for their temporaries."""

from collections.abc import Iterable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemini import EmulatedDevice, RemoteRankError, ShardedModel, ShardedOptimizer, estimate_memory, state_hash
from gemini.monitor.device import BoundedMeter
from gemini.optimizer import elementwise
from gemini.optimizer.elementwise import TESTED, TorchUpdate
from gemini.optimizer.shards import GradientFactors, Run, RunUpdate
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, loss_of, weights_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"maximize": True, "weight_decay": 0.1},
    {"amsgrad": True, "maximize": True, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.9, "centered": True, "weight_decay": 0.1},
    {"decoupled_weight_decay": True, "weight_decay": 0.1},
]
AT = 10_000, torch.float32, torch.device("cpu")
OFTEN = [torch.optim.AdamW, torch.optim.SGD, torch.optim.RAdam, torch.optim.Adagrad]


def tiles_of(numel: int) -> Any:
    return mock.patch.dict(elementwise.TILE_NUMEL, {"cpu": numel})


def make(kind: type[torch.optim.Optimizer], weights: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return kind(weights, **options)


class Weights:
    """Of a chunk; what an update needs of a `ShardView`."""

    def __init__(self, numel: int) -> None:
        self._flat = torch.randn(numel)

    def load(self) -> Tensor:
        return self._flat


def most_temporaries(optimizer: torch.optim.Optimizer, numel: int, steps: int = 8) -> int:
    """Bytes that updates of 16-bit gradients, scaled and clipped, have at once besides their arguments."""
    update, most = TorchUpdate(optimizer), 0
    group = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    room = {name: torch.zeros(numel) for name in update.flat_names(group)}
    weights: Any = Weights(numel)
    each = RunUpdate(Run(0, numel, (0,), 0), weights, torch.ones(numel).bfloat16(), {}, {}, is_new=True, room=room)
    for _ in range(steps):  # RAdam has another rule from the sixth step on
        with BoundedMeter(lambda live: None) as meter:
            update.update([each], [group], GradientFactors(0.5, 0.5))
            most = max(most, meter.peak_bytes)
        each = RunUpdate(each.run, weights, each.grad, {**each.flat, **each.made}, each.scalars, is_new=False)
    return most


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", TESTED)
def test_an_update_takes_no_more_than_it_says(kind: type[torch.optim.Optimizer]) -> None:
    found = []
    for options in OPTIONS:
        try:
            optimizer = make(kind, [nn.Parameter(torch.zeros(1))], **options)
        except TypeError:  # not an option of this one
            continue
        says = TorchUpdate(optimizer).temporary_bytes(*AT)
        found.append(most_temporaries(optimizer, 10_000) / says)
        with tiles_of(1000):
            tiled = TorchUpdate(optimizer).temporary_bytes(*AT)
            assert most_temporaries(optimizer, 10_000) <= tiled < says / 5
    assert found and max(found) <= 1


class Scalars(TorchDispatchMode):
    """Counts uses of tensors of one number on the meta device, which stands for a GPU here."""

    num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_seen += sum(isinstance(each, Tensor) and each.is_meta and not each.dim() for each in args)
        return func(*args, **(kwargs or {}))


def test_an_update_makes_no_tensor_on_the_device_of_a_number_of_the_hosts() -> None:
    """On a GPU it would be a copy for which the host waits, for each tile."""
    optimizer, weights = make(torch.optim.SGD, [nn.Parameter(torch.zeros(1))]), mock.Mock()
    weights.load.return_value = torch.zeros(100, device="meta")
    grad = torch.ones(100, dtype=torch.bfloat16, device="meta")
    each = RunUpdate(Run(0, 100, (0,), 0), weights, grad, {}, {}, is_new=True)
    with Scalars() as scalars:
        TorchUpdate(optimizer).update([each], [optimizer.defaults], GradientFactors(0.5, 0.3))
    assert scalars.num_seen == 0


def train(steps: int, kind: type[torch.optim.Optimizer], dtype: torch.dtype | None, rank: int) -> int:
    model = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL, dtype=dtype)
    list(model.parameters())[1].requires_grad_(False)
    optimizer = ShardedOptimizer(model, make(kind, model.parameters()))
    for step in range(steps):
        loss = loss_of(model, 10 * step + rank, dtype)
        if step == 2:  # parameters without gradients make several runs of a chunk
            loss = next(model.parameters()).float().square().sum()
        optimizer.backward(loss)
        optimizer.step()
    found = state_hash(model, optimizer)
    model.close()
    return found


@pytest.mark.sampled(3)
@on_ranks_with("kind", {1: list(TESTED), 2: OFTEN[:2]}, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_no_bit_depends_on_the_size_of_tiles(
    rank: int, world_size: int, kind: type[torch.optim.Optimizer], dtype: torch.dtype | None
) -> None:
    found = []
    for numel in (2**22, 100, 256 * 3 + 1):
        with tiles_of(numel):
            found.append(train(4, kind, dtype, rank))
    assert len(set(found)) == 1


@pytest.mark.parametrize("kind", OFTEN)
def test_tiles_give_the_bits_of_plain_training(kind: type[torch.optim.Optimizer]) -> None:
    model, plain = ShardedModel(build(), device="emulated", chunk_size=CHUNK_NUMEL), build()
    optimizers = [make(kind, model.parameters()), make(kind, plain.parameters(), foreach=False)]
    optimizers[0] = ShardedOptimizer(model, optimizers[0])
    with tiles_of(100):
        for step in range(4):
            for module, optimizer in zip((model, plain), optimizers, strict=True):
                loss_of(module, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_same(weights_of(model), dict(plain.named_parameters()))


@pytest.mark.parametrize("kind", OFTEN)
def test_what_a_torch_optimizer_is_lent_leaves_its_slot_with_the_step(kind: type[torch.optim.Optimizer]) -> None:
    """On one rank weights are staged in slots of payloads, of which the least budget has none to spare."""
    options: dict[str, Any] = {"tensor_placement_policy": "static", "offload_param_frac": 1.0, "device": "emulated"}
    least = estimate_memory(build(), optim_states=0 if kind is torch.optim.SGD else 2, **options).plan.minimum_bytes
    model = ShardedModel(build(), model_data_memory=least, **options)
    optimizer = ShardedOptimizer(model, make(kind, model.parameters()))
    for step in range(3):
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        assert model.chunk_manager.memory.device.ledger.total_bytes <= (least or 0)
    model.close()


@pytest.mark.sampled(2)
@on_ranks(1, soak=(2,))
@pytest.mark.filterwarnings("ignore:a forward, backward or step ended with an exception")
@pytest.mark.parametrize("kind", OFTEN[:2])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_step_without_room_for_temporaries_changes_nothing(
    rank: int, world_size: int, dtype: torch.dtype | None, kind: type[torch.optim.Optimizer]
) -> None:
    """The last rank lacks it, with every number of bytes that its device may have left."""
    device = EmulatedDevice(10**6)
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL, dtype=dtype, model_data_memory=90_000)
    optimizer = ShardedOptimizer(model, make(kind, model.parameters()))
    is_short, num_refused = rank == world_size - 1, 0
    for spare in range(0, 40_000, 4000):
        before = state_hash(model, optimizer)
        optimizer.backward(loss_of(model, spare + rank, dtype))
        held = model.chunk_manager.memory.device.ledger.total_bytes
        device.total_bytes = held + spare if is_short else 10**6
        try:
            with device.holding_activations():
                optimizer.step()
        except (torch.OutOfMemoryError, RemoteRankError):
            num_refused += 1
            optimizer.zero_grad()
            assert state_hash(model, optimizer) == before, spare
        else:
            assert state_hash(model, optimizer) != before, spare
        device.total_bytes = 10**6
    assert 0 < num_refused < 10
    model.close()
