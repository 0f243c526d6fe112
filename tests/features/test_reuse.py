"""Gradients in the memory of the weights that they are of: `reuse_fp16_shard=True`."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import ShardedModel, ShardedOptimizer, safe_get_full_fp32_param
from tests.zoo import half, mlp
from tests.zoo.half import PLACES, Trained


def test_no_weights_are_left_between_backward_and_step_and_reading_them_brings_them_back() -> None:
    trained = Trained(0, 1, True, PLACES["cuda"])
    trained.step(0)
    before = mlp.weights_of(trained.model)
    trained.backward(1)
    assert half.state_bytes(trained.model)["grad"] == 0
    gradient = trained.weight.grad
    assert gradient is not None
    home = trained.model.chunk_manager.chunks[2].homes["param"].flat  # type: ignore[index]
    assert torch.equal(home[: gradient.numel()], gradient.flatten()), "the gradient is where the weights were"
    assert torch.equal(trained.weight, before["layers.2.weight"])
    numel = trained.model.chunk_manager.chunks[2].numel
    assert half.state_bytes(trained.model)["grad"] == 2 * numel, "one chunk's gradient has memory of its own now"
    mlp.assert_same(mlp.weights_of(trained.model), before)


def test_micro_batches_are_said_to_take_the_memory_once() -> None:
    trained = Trained(0, 1, True, PLACES["cuda"])
    trained.backward(0)
    with pytest.warns(UserWarning, match=r"used again between backward and step.*2 bytes a parameter"):
        trained.backward(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained.optimizer.step()
        trained.backward(2)
        trained.backward(3)
        trained.optimizer.step()
    kinds, numel = half.state_bytes(trained.model), sum(chunk.numel for chunk in trained.model.chunk_manager.chunks)
    assert kinds["grad"] == (2 + 4) * numel, "a shard, and the fp32 sum"


def test_a_backward_that_runs_again_finds_the_weights() -> None:
    runs = []
    for reuse in (False, True):
        trained = Trained(0, 1, reuse, PLACES["cuda"])
        loss = mlp.loss_of(trained.model, 0, trained.dtype).float()
        loss.backward(retain_graph=True)
        loss.backward()
        trained.optimizer.step()
        runs.append(mlp.weights_of(trained.model))
    mlp.assert_same(runs[1], runs[0])


def test_a_backward_that_fails_leaves_the_weights() -> None:
    trained = Trained(0, 1, True, PLACES["cuda"])
    trained.step(0)
    before = mlp.weights_of(trained.model)

    def fail(grad: Tensor) -> None:
        raise ZeroDivisionError

    x = mlp.inputs(1, trained.dtype).requires_grad_()
    x.register_hook(fail)
    with pytest.raises(ZeroDivisionError):
        trained.model(x).float().sum().backward()
    assert any(chunk.holds_grad for chunk in trained.model.chunk_manager.chunks), "gradients were there already"
    with torch.no_grad():
        trained.model(x)
    mlp.assert_same(mlp.weights_of(trained.model), before)
    trained.step(1)


@pytest.mark.parametrize("given", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_loaded_weights_are_those_that_are_made_anew_of_their_masters(place: str, given: torch.dtype) -> None:
    trained = Trained(0, 1, True, PLACES[place])
    generator = torch.Generator().manual_seed(0)
    shapes = {name: value.shape for name, value in trained.model.state_dict().items()}
    state = {name: torch.randn(shape, generator=generator).half().to(given) for name, shape in shapes.items()}
    state["layers.0.weight"] = state["layers.0.weight"].t().contiguous().t()
    trained.model.load_state_dict(state)
    for name, parameter in trained.model.named_parameters():
        assert torch.equal(safe_get_full_fp32_param(parameter), state[name].float()), "masters are what was given"
    before = mlp.weights_of(trained.model)
    trained.backward(0)
    assert all(chunk.holds_grad for chunk in trained.model.chunk_manager.chunks)
    trained.optimizer.zero_grad()
    mlp.assert_same(mlp.weights_of(trained.model), before)


OTHERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_optimizers_work_on_whole_masters(name: str, place: str) -> None:
    runs = []
    for reuse in (False, True):
        wrap = mlp.placed(reuse_fp16_shard=reuse, dtype=torch.bfloat16, **PLACES[place])
        model = ShardedModel(mlp.build(), **wrap)
        optimizer = ShardedOptimizer(model, OTHERS[name](model.parameters()))
        for step in range(3):
            mlp.train_step(model, optimizer, step, torch.bfloat16)
        runs.append((mlp.weights_of(model), optimizer.state_dict()["masters"]))
    mlp.assert_same(runs[0][0], runs[1][0])
    masters = runs[0][1]
    assert all(torch.equal(masters[number], runs[1][1][number]) for number in masters)
    assert any((master != master.bfloat16()).any() for master in masters.values())


def test_fp32_models_have_nothing_to_share() -> None:
    model = ShardedModel(mlp.build(), device="emulated", reuse_fp16_shard=True)
    ShardedOptimizer(model, mlp.adam(model.parameters()))
    assert half.state_bytes(model)["grad"] == half.state_bytes(model)["param"]
