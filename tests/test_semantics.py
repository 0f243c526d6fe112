"""The ordinary training loop means what it means in plain PyTorch: gradients, zero_grad, several backwards."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, state_hash
from tests.zoo.mlp import (
    WIDTH,
    Mlp,
    adam,
    assert_same,
    assert_same_models,
    both_dtypes,
    build,
    everywhere,
    inputs,
    loss_of,
    pairs,
    plain,
    sharded,
    train_step,
    weights_of,
    wrap,
)

# ---- gradients and zero_grad -----------------------------------------------------------------------------------


@both_dtypes
@pytest.mark.parametrize("when", ["before_backward", "after_step", "both", "on_the_model", "set_to_zero"])
def test_zero_grad_may_stand_anywhere(when: str, dtype: torch.dtype | None) -> None:
    both = pairs(dtype=dtype)
    for model, optimizer in both:
        for step in range(3):
            if when in ("before_backward", "both"):
                optimizer.zero_grad()
            loss_of(model, step, dtype).backward()
            optimizer.step()
            if when in ("after_step", "both"):
                optimizer.zero_grad()
            elif when == "on_the_model":
                model.zero_grad()
            elif when == "set_to_zero":
                optimizer.zero_grad(set_to_none=False)
    assert_same_models(both)


def test_step_consumes_the_gradients_without_zero_grad() -> None:
    (model, optimizer), (reference, plain_optimizer) = pairs()
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()  # no zero_grad: there is nothing left
        assert all(p.grad is None for p in model.parameters())
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


def test_zero_grad_between_backwards_discards() -> None:
    both = pairs()
    for model, optimizer in both:
        loss_of(model, 0).backward()
        optimizer.zero_grad()
        train_step(model, optimizer, 1)
    assert_same_models(both)


@both_dtypes
@everywhere
def test_optimizer_backward_is_loss_backward(place: str, dtype: torch.dtype | None) -> None:
    hashes = []
    for by_optimizer in (True, False):
        model, optimizer = sharded(place, dtype=dtype)
        for step in range(2):
            loss = loss_of(model, step, dtype)
            if by_optimizer:
                optimizer.backward(loss)
            else:
                loss.backward()
            optimizer.step()
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]


class Idle(Mlp):
    """Owns a layer that it never uses."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(WIDTH, WIDTH)


@pytest.mark.sampled(2)
@everywhere
def test_grad_is_the_plain_gradient_and_reading_it_changes_nothing(place: str) -> None:
    both = pairs(place, make=Idle)
    (model, optimizer), (reference, plain_optimizer) = both
    assert all(p.grad is None for p in model.parameters())
    for step in range(3):
        for micro in range(2):
            loss_of(model, 10 * step + micro).backward()
            loss_of(reference, 10 * step + micro).backward()
            before = state_hash(model, optimizer), optimizer.model.chunk_manager.grads.num_backwards
            for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
                if name.startswith("idle."):
                    assert mine.grad is None
                    assert theirs.grad is None
                    continue
                grad = mine.grad
                assert grad is not None
                assert grad.shape == theirs.grad.shape
                assert grad.dtype == theirs.grad.dtype
                assert torch.equal(grad, theirs.grad)
                assert torch.equal(grad.clone(), theirs.grad)
                assert float(grad.norm()) == float(theirs.grad.norm())
                assert torch.equal(grad * 2, theirs.grad * 2)
                assert torch.equal(grad.data.abs().max(), theirs.grad.abs().max())
                assert torch.equal(torch.zeros_like(theirs.grad).add_(grad), theirs.grad)
            assert (state_hash(model, optimizer), optimizer.model.chunk_manager.grads.num_backwards) == before
        optimizer.step()
        plain_optimizer.step()
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
    assert_same_models(both)


def test_the_true_norm_is_reported_without_clipping_too() -> None:
    model, optimizer = sharded()
    loss_of(model).backward()
    reference = build()
    loss_of(reference).backward()
    wanted = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in reference.parameters()]).double())
    optimizer.step()
    assert optimizer.grad_norm.dim() == 0
    assert abs(float(optimizer.grad_norm) - float(wanted)) < 1e-6 * float(wanted)


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_a_norm_read_through_torch_equals_ours(norm_type: float) -> None:
    model, optimizer = sharded()
    loss_of(model).backward()
    ours = optimizer.clip_grad_norm_(1e9, norm_type)
    theirs = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()], norm_type)
    assert torch.allclose(ours, theirs, rtol=1e-6)


def test_sparse_embedding_gradients_equal_dense_ones() -> None:
    class Embeds(nn.Module):
        def __init__(self, sparse: bool = True) -> None:
            super().__init__()
            self.embed = nn.Embedding(32, WIDTH, sparse=sparse)
            self.body = Mlp(2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = (x[:, :4] * 10).long() % 32
            return self.body(self.embed(tokens)).sum(1)

    model, reference = wrap(make=Embeds), build(lambda: Embeds(sparse=False))
    optimizer, plain_optimizer = ShardedOptimizer(model, adam(model.parameters())), adam(reference.parameters())
    for step in range(3):
        train_step(model, optimizer, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))


# ---- several backwards, and some that fail -----------------------------------------------------------------


@both_dtypes
@everywhere
def test_backward_twice_with_retain_graph(place: str, dtype: torch.dtype | None) -> None:
    both = pairs(place, dtype)
    for model, optimizer in both:
        for step in range(2):
            loss = loss_of(model, step, dtype)
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    if dtype is None:
        assert_same_models(both)
    else:  # plain bf16 rounds the sum to bf16; here it is made in fp32
        (model, _), (reference, _) = both
        for mine, theirs in zip(weights_of(model).values(), weights_of(reference).values()):
            assert torch.allclose(mine.float(), theirs.float(), rtol=2**-6, atol=2e-3)


def test_a_second_backward_without_retain_graph_is_torchs_error() -> None:
    model, optimizer = sharded()
    loss = loss_of(model)
    loss.backward()
    with pytest.raises(RuntimeError, match=r"retain_graph|second time"):
        loss.backward()
    optimizer.zero_grad()
    train_step(model, optimizer)
    reference, plain_optimizer = plain()
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


def test_two_losses_of_one_forward_and_a_forward_without_backward() -> None:
    both = pairs()
    for model, optimizer in both:
        loss_of(model, 5)  # dropped
        output = model(inputs(0))
        output.square().mean().backward(retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        train_step(model, optimizer, 1)
    assert_same_models(both)


def test_autograd_grad_of_inputs_leaves_the_parameters_alone() -> None:
    model, reference = wrap(), build()
    grads = []
    for m in (model, reference):
        x = inputs(0).requires_grad_()
        grads += torch.autograd.grad(m(x).square().sum(), x)
    assert torch.equal(*grads)
    assert all(p.grad is None for p in model.parameters())


def test_a_forward_that_raises_leaves_the_model_usable() -> None:
    both = pairs()
    for model, optimizer in both:
        train_step(model, optimizer, 0)
        with pytest.raises(RuntimeError):
            model(torch.zeros(2, 3))
        train_step(model, optimizer, 1)
    assert_same_models(both)


def test_a_backward_that_raises_leaves_the_model_usable() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            raise ValueError("not today")

    class Failing(Mlp):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            for number, layer in enumerate(self.layers):
                x = x + torch.tanh(layer(x))
                if self.fails and number == 2:
                    x = Fails.apply(x)
            return x

    both = pairs(make=Failing)
    for model, optimizer in both:
        inner = model.module if isinstance(model, ShardedModel) else model
        train_step(model, optimizer, 0)
        inner.fails = True
        with pytest.raises(ValueError, match="not today"):
            loss_of(model, 1).backward()
        inner.fails = False
        optimizer.zero_grad()
        train_step(model, optimizer, 2)
    assert_same_models(both)


@both_dtypes
@everywhere
def test_no_sync_changes_nothing_at_one_rank(place: str, dtype: torch.dtype | None) -> None:
    hashes = []
    for inside in (False, True):
        model, optimizer = sharded(place, dtype=dtype)
        for step in range(2):
            for micro in range(3):
                if inside and micro < 2:
                    with model.no_sync():
                        (loss_of(model, 10 * step + micro, dtype) / 3).backward()
                else:
                    (loss_of(model, 10 * step + micro, dtype) / 3).backward()
            optimizer.step()
        hashes.append(state_hash(model, optimizer))
    assert hashes[0] == hashes[1]
