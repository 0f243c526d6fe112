"""What users do, on the device: the same bits as plain PyTorch there."""

import tempfile
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gemini
from gemini import ShardedModel, ShardedOptimizer, ZeroInitContext, state_hash
from tests.gpu.device import DEVICE
from tests.gpu.loops import same_bits
from tests.harness.devices import emulated
from tests.zoo import whole
from tests.zoo.mlp import Mlp, adam, build, inputs, minimum_bytes, placed
from tests.zoo.models import MODELS, ModelCase
from tests.zoo.torch_optimizers import make_torch_optimizer

PLACES: dict[str, dict[str, Any]] = {
    "fits": {},
    "cpu": {"tensor_placement_policy": "cpu"},
    "static": {"tensor_placement_policy": "static"},
    "smallest": {"model_data_memory": "smallest"},
    "disk": {"tensor_placement_policy": "disk", "disk_path": tempfile.gettempdir()},
    # A host with room for gradients and a part of the weights.
    "weights on the disk": {
        "tensor_placement_policy": "cpu",
        "disk_path": tempfile.gettempdir(),
        "host_memory": 34_000,
        "max_live_parameters": 1024,
    },
}
everywhere = pytest.mark.parametrize("place", PLACES)
# A plain HybridAdam takes no fp64 weights; on the stand-in torch wants kernels for the others that the CPU lacks.
NOT_HERE = {"mixed_dtypes"} | ({"lstm", "gru", "mixtral", "qwen3_moe"} if DEVICE.type == "stand_in" else set())


def wrap(place: str, **arguments: Any) -> ShardedModel:
    return ShardedModel(build(), **placed(device=emulated(DEVICE), **PLACES[place], **arguments))


def loss_of(model: nn.Module, step: int, dtype: torch.dtype | None = None) -> Tensor:
    x = inputs(step, dtype).to(DEVICE)
    return (model(x) - x.flip(-1)).square().mean()


def assert_same_weights(sharded: nn.Module, plain: nn.Module) -> None:
    mine, theirs = sharded.state_dict(), plain.state_dict()
    assert mine.keys() == theirs.keys()
    assert not [name for name in theirs if not same_bits(mine[name], theirs[name])]


def train(model: nn.Module, optimizer: Any, steps: range = range(3)) -> None:
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [name for name in MODELS if name not in NOT_HERE])
def test_a_model_at_its_smallest_budget_has_the_bits_of_the_plain_one(name: str) -> None:
    case = MODELS[name]
    plain, module = case.build().to(DEVICE), case.build()
    least = minimum_bytes(case.build(), chunk_size=case.chunk_numel, device=emulated(DEVICE))
    model = ShardedModel(module, device=emulated(DEVICE), chunk_size=case.chunk_numel, model_data_memory=least)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    losses = [_losses(case, model, optimizer), _losses(case, plain, adam(plain.parameters()))]
    assert same_bits(*losses)
    assert_same_weights(model, plain)


def _losses(case: ModelCase, model: nn.Module, optimizer: torch.optim.Optimizer) -> Tensor:
    losses = []
    for step in range(2):
        batch = {k: v.to(DEVICE) if isinstance(v, Tensor) else v for k, v in case.batch(step).items()}
        loss = case.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


@everywhere
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad, torch.optim.NAdam])
def test_a_torch_optimizer_updates_where_its_states_are(kind: type[torch.optim.Optimizer], place: str) -> None:
    model, plain = wrap(place), build().to(DEVICE)
    train(model, ShardedOptimizer(model, make_torch_optimizer(kind, model.parameters(), 1)))
    train(plain, make_torch_optimizer(kind, plain.parameters(), 1))
    if DEVICE.type == "cuda" and place != "fits":  # torch's kernels on the CPU and on a GPU round differently
        for name, wanted in plain.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], wanted.cpu(), rtol=1e-4, atol=1e-5)
    else:
        assert_same_weights(model, plain)


@everywhere
def test_windows_clipping_evaluation_and_autocast(place: str) -> None:
    model, plain = wrap(place), build().to(DEVICE)
    optimizer = ShardedOptimizer(model, adam(model.parameters()), clip_grad_norm=0.05)
    plain_optimizer = adam(plain.parameters())
    for window in range(3):
        for each in (model, plain):
            for micro in range(3):
                with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=window == 1):
                    loss = loss_of(each, 3 * window + micro)
                (loss / 3).backward()
        gemini.clip_grad_norm_(plain.parameters(), 0.05)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        with torch.inference_mode():
            assert same_bits(loss_of(model, 9), loss_of(plain, 9))
    assert_same_weights(model, plain)


@everywhere
def test_edits_of_weights_gradients_and_moments(place: str) -> None:
    model, plain = wrap(place), build().to(DEVICE)
    optimizer, plain_optimizer = ShardedOptimizer(model, adam(model.parameters())), adam(plain.parameters())
    for step in range(3):
        for each, layer in ((model, model.module.layers[2]), (plain, plain.layers[2])):
            with torch.no_grad():
                layer.weight.mul_(0.9)
                layer.weight[0, 0] = 1.5
                layer.bias[1] = layer.weight.sum()
            loss_of(each, step).backward()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert mine.device == DEVICE
            gemini.safe_set_full_grad(mine, 2 * gemini.safe_get_full_grad(mine))
            other.grad.mul_(2)
            assert same_bits(mine.grad, other.grad)
        optimizer.step()
        plain_optimizer.step()
        for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bits(gemini.safe_get_full_fp32_param(mine), other)
            moment = gemini.safe_get_full_optimizer_state(mine, "exp_avg")
            gemini.safe_set_full_optimizer_state(mine, moment * 0.5, "exp_avg")
            plain_optimizer.state[other]["exp_avg"].mul_(0.5)
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert_same_weights(model, plain)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
def test_state_dicts_go_on_at_any_other_place(dtype: torch.dtype | None) -> None:
    saved: tuple[Any, Any] | None = None
    ends = set()
    for place in PLACES:
        model = wrap(place, dtype=dtype)
        scale = {"initial_scale": 2.0**10} if dtype is torch.float16 else {}
        optimizer = ShardedOptimizer(model, adam(model.parameters()), **scale)
        if saved is None:
            _train_half(model, optimizer, range(3), dtype)
            saved = model.state_dict(), optimizer.state_dict()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        _train_half(model, optimizer, range(3, 5), dtype)
        ends.add(state_hash(model, optimizer))
    assert len(ends) == 1


def _train_half(model: ShardedModel, optimizer: ShardedOptimizer, steps: range, dtype: torch.dtype | None) -> None:
    for step in steps:
        optimizer.backward(loss_of(model, step, dtype))
        optimizer.step()
        optimizer.zero_grad()


@everywhere
@pytest.mark.parametrize("made_on", ["cpu", DEVICE], ids=["made-on-host", "made-on-device"])
def test_a_model_that_is_built_on_shards(made_on: str | torch.device, place: str) -> None:
    """Random numbers come from the device that the model's code makes its weights on, as without the context."""
    built = []
    for context in (ZeroInitContext(emulated(DEVICE)), nullcontext()):
        torch.manual_seed(3)
        with torch.device(made_on), context:
            module = Mlp()
            with torch.no_grad():
                module.layers[0].weight.mul_(2)
        built.append(module)
    model, plain = ShardedModel(built[0], **placed(device=emulated(DEVICE), **PLACES[place])), built[1].to(DEVICE)
    assert_same_weights(model, plain)
    train(model, ShardedOptimizer(model, adam(model.parameters())))
    train(plain, adam(plain.parameters()))
    assert_same_weights(model, plain)


@everywhere
@pytest.mark.parametrize("make", ["muon", "adafactor", "lamb", "transformers"])
def test_an_optimizer_of_whole_tensors_steps_on_the_device(make: str, place: str) -> None:
    """Wherever states rest; and the average of its weights."""
    model, plain = wrap(place), build().to(DEVICE)
    made, plain_optimizers = whole.MAKES[make](model), whole.MAKES[make](plain)
    optimizer = ShardedOptimizer(model, made, ema=0.9)
    train(model, optimizer)
    for step in range(3):
        loss_of(plain, step).backward()
        for each in plain_optimizers:
            each.step()
            each.zero_grad()
    assert_same_weights(model, plain)
    assert optimizer.ema is not None
    with optimizer.ema.weights():
        assert not same_bits(loss_of(model, 9), loss_of(plain, 9))
    assert_same_weights(model, plain)
