"""Which optimizers may be wrapped, stepped and scaled, and which are refused with a reason."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GeminiError, ShardedModel, ShardedOptimizer, UnsupportedError, state_hash
from optim import HybridAdam
from tests.zoo import mlp
from tests.zoo.mlp import (
    adam,
    assert_same,
    both_dtypes,
    build,
    everywhere,
    loss_of,
    plain,
    sharded,
    train_step,
    weight,
    weights_of,
    wrap,
)


def test_the_optimizer_of_another_model_or_of_a_plain_one_is_refused() -> None:
    model, other, unwrapped = wrap(), wrap(), build()
    for parameters in (other.parameters(), unwrapped.parameters(), [nn.Parameter(torch.zeros(3))]):
        with pytest.raises(ValueError, match=r"param group 0 of HybridAdam .* not this model's"):
            ShardedOptimizer(model, adam(parameters))


def test_an_optimizer_made_before_wrapping_trains_the_wrapped_model() -> None:
    """Its parameters are the model's own: nothing is wrong with it."""
    module, (reference, plain_optimizer) = build(), plain()
    optimizer = adam(module.parameters())
    model = ShardedModel(module, device="emulated", chunk_size=mlp.CHUNK_NUMEL)
    wrapped = ShardedOptimizer(model, optimizer)
    for step in range(2):
        train_step(model, wrapped, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


def test_an_optimizer_that_has_stepped_or_is_wrapped_and_a_second_one_are_refused() -> None:
    module = build()
    stepped = adam(module.parameters())
    train_step(module, stepped)
    model = ShardedModel(module, device="emulated")
    with pytest.raises(UnsupportedError, match="has stepped before"):
        ShardedOptimizer(model, stepped)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    with pytest.raises(UnsupportedError, match="has a ShardedOptimizer already"):
        ShardedOptimizer(model, adam(model.parameters()))
    with pytest.raises(TypeError, match="found ShardedOptimizer"):
        ShardedOptimizer(wrap(), optimizer)


@pytest.mark.parametrize("what", ["model", "module", "child", "parameter", "parent"])
def test_wrapping_twice_is_refused(what: str) -> None:
    model = wrap()

    class Borrower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight(model)

    twice = {
        "model": model,
        "module": model.module,
        "child": model.module.layers[1],
        "parameter": Borrower(),
        "parent": nn.Sequential(nn.Linear(2, 2), model.module),
    }[what]
    with pytest.raises(UnsupportedError, match="already"):
        ShardedModel(twice, device="emulated")
    assert_same(weights_of(model), weights_of(build()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("plain_kind", ["hybrid_adam", "adamw", "sgd", "foreach"])
@everywhere
def test_stepping_the_plain_optimizer_by_mistake_works_or_raises(place: str, plain_kind: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if plain_kind == "hybrid_adam":
            return adam(parameters)
        if plain_kind == "adamw":
            return torch.optim.AdamW(parameters, lr=1e-2, foreach=False)
        return torch.optim.SGD(parameters, lr=1e-2, foreach=plain_kind == "foreach")

    model, reference = wrap(place), build()
    optimizer, plain_optimizer = make(model.parameters()), make(reference.parameters())
    try:
        for step in range(3):
            train_step(model, optimizer, step)
    except GeminiError:
        return
    for step in range(3):
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize(
    "make",
    [
        lambda p: type("Lion", (torch.optim.SGD,), {})(p, lr=1e-2),
        lambda p: type("MyAdam", (HybridAdam,), {})(p),
    ],
    ids=["subclass", "subclass_of_ours"],
)
def test_an_optimizer_that_is_not_known_is_refused(make: Callable[..., Any]) -> None:
    model = wrap()
    with pytest.raises(UnsupportedError, match=r"elementwise=True, or gemini\.per_tensor"):
        ShardedOptimizer(model, make(model.parameters()))


def test_a_user_optimizer_is_taken_at_its_word() -> None:
    class Sign(torch.optim.Optimizer):
        """Signed momentum."""

        def __init__(self, params: Any, lr: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                        momentum.mul_(0.9).add_(p.grad)
                        p.sub_(momentum.sign() * group["lr"])

    model, reference = wrap(), build()
    optimizer = ShardedOptimizer(model, Sign(model.parameters()), elementwise=True)
    plain_optimizer = Sign(reference.parameters())
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


@both_dtypes
def test_a_grad_scaler_is_refused(dtype: torch.dtype | None) -> None:
    model, optimizer = sharded(dtype=dtype)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, dtype=dtype)).backward()
    before = state_hash(model, optimizer)
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.step(optimizer)
    with pytest.raises(UnsupportedError, match="GradScaler"):
        scaler.unscale_(optimizer)
    assert state_hash(model, optimizer) == before
    optimizer.zero_grad()
    off = torch.amp.GradScaler("cpu", enabled=False)
    off.scale(loss_of(model, dtype=dtype)).backward()
    off.step(optimizer)
    off.update()
    reference, plain_optimizer = plain(dtype)
    train_step(reference, plain_optimizer, dtype=dtype)
    assert_same(weights_of(model), weights_of(reference))
