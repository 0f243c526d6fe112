"""Gradients of small parameters that autograd adds to their home: the bits and `.grad` of plain PyTorch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, UnsupportedError, safe_get_full_grad
from tests.small_parameters import CHUNK_NUMEL, LAYERS, WIDTH, Chain, attached_grads, loss_of, raw_grads
from tests.zoo import mlp

ALL = 3 + 2 * LAYERS - 1  # parameters of `Chain`


def pairs(**arguments: Any) -> list[tuple[Any, Any]]:
    """A wrapped model and a plain one, each with an optimizer, after one step: from then on chunks are attached."""
    model = ShardedModel(mlp.build(Chain), **{"device": "emulated", "chunk_size": CHUNK_NUMEL, **arguments})
    plain = mlp.build(Chain)
    both: list[tuple[Any, Any]] = [
        (model, ShardedOptimizer(model, mlp.adam(model.parameters()))),
        (plain, mlp.adam(plain.parameters())),
    ]
    train(both, 1)
    return both


def train(both: list[tuple[Any, Any]], step: int, micro_batches: int = 1, used: slice = slice(None)) -> None:
    for model, optimizer in both:
        for number in range(micro_batches):
            loss_of(model, 10 * step + number, used=used).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same_gradients(both: list[tuple[Any, Any]]) -> None:
    """Of all parameters, with the signs of zeros."""
    for (name, one), (_, other) in zip(both[0][0].named_parameters(), both[1][0].named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), name
        if other.grad is not None:
            got = safe_get_full_grad(one)
            assert got is not None and torch.equal(got, other.grad), name
            assert torch.equal(torch.signbit(got), torch.signbit(other.grad)), name


def test_no_gradient_has_memory_of_its_own() -> None:
    (model, optimizer), _ = pairs()
    assert attached_grads(model) == len(list(model.parameters())) == ALL
    found: list[int] = []
    mlp.layer_of(model, 10).register_full_backward_hook(lambda *_: found.append(raw_grads(model)))
    for _ in range(2):
        loss_of(model, 1).backward()
    optimizer.step()
    assert found == [0, 0]


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_are_those_of_plain_pytorch(micro_batches: int) -> None:
    """Unused parameters have none, in the first micro-batch or in all of them."""
    both = pairs()
    for step in range(2, 5):
        for model, _ in both:
            for number in range(micro_batches):
                loss_of(model, 10 * step + number, used=slice(step, LAYERS - step - number)).backward()
        assert_same_gradients(both)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    mlp.assert_same_models(both)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_negative_zeros_keep_their_sign(micro_batches: int) -> None:
    both = pairs()
    for model, _ in both:
        for _ in range(micro_batches):
            add_negative_zeros(model)
    assert torch.signbit(both[1][0].scale.grad).all(), "there is one to keep"
    assert_same_gradients(both)
    train(both, 2)
    mlp.assert_same_models(both)


def test_a_negative_zero_that_comes_in_a_later_micro_batch_keeps_its_sign() -> None:
    both = pairs()
    for model, _ in both:
        mlp.layer_of(model, 3)(torch.ones(4, WIDTH)).sum().backward()
        add_negative_zeros(model)
    assert_same_gradients(both)


def add_negative_zeros(model: nn.Module) -> None:
    """A backward whose gradient of `scale` consists of them."""
    (model(torch.ones(4, WIDTH), used=slice(0)) * torch.tensor(-0.0)).sum().backward()


def discard_some(both: list[tuple[Any, Any]]) -> None:
    """Between two micro-batches: what comes later starts anew, also if it is a negative zero."""
    for model, _ in both:
        loss_of(model, 3).backward()
        for number in (0, 7):
            mlp.weight(model, number).grad = None
        (model.module if isinstance(model, ShardedModel) else model).scale.grad = None
        add_negative_zeros(model)


def write_to_some(both: list[tuple[Any, Any]]) -> None:
    for model, _ in both:
        loss_of(model, 3).backward()
        mlp.weight(model, 5).grad.mul_(0.5)
        loss_of(model, 4, used=slice(9)).backward()


def clip(both: list[tuple[Any, Any]]) -> None:
    for model, _ in both:
        loss_of(model, 3).backward()
        nn.utils.clip_grad_value_(list(model.parameters()), 1e-3)


def read_inside(both: list[tuple[Any, Any]]) -> None:
    """Gradients that came before a read and after it."""
    for model, _ in both:
        last, found = mlp.weight(model, LAYERS - 1), []
        hook = mlp.layer_of(model, 20).register_full_backward_hook(
            lambda *_, last=last, found=found: found.append(last.grad is not None)
        )
        for _ in range(2):
            loss_of(model, 3).backward()
        hook.remove()
        assert found == [True, True]


def leave_zeros(both: list[tuple[Any, Any]]) -> None:
    for model, optimizer in both:
        loss_of(model, 3).backward()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, 4, used=slice(20)).backward()


def leave_zeros_to_a_backward(both: list[tuple[Any, Any]]) -> None:
    """Zeros, of which a backward reaches some."""
    for model, optimizer in both:
        loss_of(model, 3).backward()
        optimizer.zero_grad(set_to_none=False)
        loss_of(model, 4, used=slice(20)).backward()
        loss_of(model, 5, used=slice(10, 30)).backward()


def give_one(both: list[tuple[Any, Any]]) -> None:
    """A gradient that no backward has made, to which one is added."""
    for model, _ in both:
        mlp.weight(model, 5).grad = torch.full((WIDTH, WIDTH), 0.25)
        add_negative_zeros(model)


def come_in_pieces(both: list[tuple[Any, Any]]) -> None:
    """Every layer runs twice, with a backward of its own each time."""
    for model, _ in both:
        for _ in range(2):
            loss_of(model, 3, used=slice(1, 6), again="inside").backward()


def freeze_and_train(both: list[tuple[Any, Any]]) -> None:
    for flag in (False, True):
        for model, _ in both:
            for number in range(5, 15):
                mlp.layer_of(model, number).requires_grad_(flag)
        train(both, 5 + flag, micro_batches=2)


def fail_half_way(both: list[tuple[Any, Any]]) -> None:
    model = both[0][0]

    def fail(*_: Any) -> None:
        raise ValueError("stopped")

    handle = mlp.layer_of(model, 20).register_full_backward_hook(fail)
    with pytest.raises(ValueError, match="stopped"):
        loss_of(model, 5).backward()
    handle.remove()
    with pytest.warns(UserWarning, match="a backward ended with an exception"):
        loss_of(model, 4)


def ask_for_a_graph(both: list[tuple[Any, Any]]) -> None:
    model = both[0][0]
    with pytest.raises(UnsupportedError, match="create_graph=True"):
        loss_of(model, 9).backward(create_graph=True)


def backward_twice(both: list[tuple[Any, Any]]) -> None:
    for model, _ in both:
        loss = loss_of(model, 6)
        loss.backward(retain_graph=True)
        loss.backward()


@pytest.mark.parametrize(
    "between",
    [
        discard_some,
        write_to_some,
        clip,
        read_inside,
        leave_zeros,
        leave_zeros_to_a_backward,
        give_one,
        come_in_pieces,
        freeze_and_train,
        fail_half_way,
        ask_for_a_graph,
        backward_twice,
    ],
    ids=lambda function: function.__name__,
)
def test_whatever_happens_to_gradients_they_train_as_in_plain_pytorch(
    between: Callable[[list[tuple[Any, Any]]], None],
) -> None:
    both = pairs()
    between(both)
    assert_same_gradients(both)
    for _, optimizer in both:
        optimizer.step()
        optimizer.zero_grad()
    for step in (7, 8):
        train(both, step, micro_batches=2)
    mlp.assert_same_models(both)
    assert attached_grads(both[0][0]) == ALL, "attached again"


@pytest.mark.parametrize("registered", ["between steps", "between micro-batches"])
def test_a_hook_that_is_registered_later_sees_the_gradient_of_one_backward(registered: str) -> None:
    both = pairs()
    seen: list[Tensor] = []
    model, reference = both[0][0], both[1][0]
    for step in (2, 3):
        for number in range(2):
            if step == 2 and (registered, number) in (("between steps", 0), ("between micro-batches", 1)):
                mlp.weight(model, 3).register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            for each, _ in both:
                loss_of(each, step + number).backward()
            wanted = torch.autograd.grad(loss_of(reference, step + number), mlp.weight(reference, 3))[0]
            if seen:
                assert torch.equal(seen[-1], wanted)
        assert_same_gradients(both)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    assert len(seen) == (4 if registered == "between steps" else 3)
    mlp.assert_same_models(both)
    assert attached_grads(model) < ALL, "its chunk keeps backwards apart"


def test_rows_that_a_sparse_gradient_does_not_have_are_zeros() -> None:
    model = ShardedModel(mlp.build(Chain), device="emulated", chunk_size=CHUNK_NUMEL)
    model.module.table.sparse = True
    plain = mlp.build(Chain)
    both: list[tuple[Any, Any]] = [
        (model, ShardedOptimizer(model, mlp.adam(model.parameters()))),
        (plain, mlp.adam(plain.parameters())),
    ]
    for step in range(3):
        for each, _ in both:
            loss_of(each, step).backward()
        assert_same_gradients(both)
        for _, optimizer in both:
            optimizer.step()
            optimizer.zero_grad()
    mlp.assert_same_models(both)


def test_homes_that_move_take_their_gradients_with_them() -> None:
    """All gradients leave the device and come back."""
    both = pairs()
    model = both[0][0]
    least = model.plan.packed_minimum_bytes
    for step, budget in enumerate((least, None, least, None), 2):
        model.change_budgets(model_data_memory=budget)
        train(both, step, micro_batches=2)
    mlp.assert_same_models(both)


def test_a_closed_model_leaves_no_gradient_behind() -> None:
    (model, _), _ = pairs()
    parameters = list(model.parameters())
    loss_of(model, 3).backward()
    model.close()
    with torch._C.DisableTorchFunctionSubclass():
        assert all(parameter.grad is None for parameter in parameters)
