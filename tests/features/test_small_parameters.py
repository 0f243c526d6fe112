"""Chunks of many small parameters, whose gradients wait for one another: the bits and `.grad` of plain PyTorch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import ShardedModel, ShardedOptimizer, UnsupportedError, safe_get_full_grad
from tests.small_parameters import CHUNK_NUMEL, LAYERS, WIDTH, Chain, loss_of, raw_grads
from tests.zoo import mlp


def pairs(dtype: torch.dtype | None = None, **arguments: Any) -> list[tuple[Any, Any]]:
    model = ShardedModel(mlp.build(Chain), device="emulated", chunk_size=CHUNK_NUMEL, dtype=dtype, **arguments)
    assert all(chunk.is_fine for chunk in model.chunk_manager.chunks), "this file is about such chunks"
    assert len(model.chunk_manager.chunks) == 2
    plain = mlp.build(Chain)
    plain = plain if dtype is None else plain.to(dtype)
    return [(model, ShardedOptimizer(model, mlp.adam(model.parameters()))), (plain, mlp.adam(plain.parameters()))]


@pytest.mark.sampled(4)
@mlp.both_dtypes
@pytest.mark.parametrize("again", ["", "inside", "outside"])
@pytest.mark.parametrize("budget", [None, "1GiB"])
def test_any_layers_in_any_micro_batches_train_as_in_plain_pytorch(
    budget: str | None, again: str, dtype: torch.dtype | None
) -> None:
    """Unused ones, pieces that nested backwards bring, and the sums of several backwards of fp32 gradients."""
    both = pairs(dtype, model_data_memory=budget)
    for step in range(5):
        micro_batches = 1 if dtype is not None else 1 + step % 3
        for model, optimizer in both:
            for micro_batch in range(micro_batches):
                used = slice(step % 2 + micro_batch, LAYERS - step)
                loss_of(model, 10 * step + micro_batch, dtype, used=used, again=again).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    mlp.assert_same_models(both)
    assert raw_grads(both[0][0]) == 0


def test_gradients_are_those_of_plain_pytorch_and_none_where_there_was_none() -> None:
    both = pairs()
    both[0][0].module.table.sparse = both[1][0].table.sparse = True
    for step in range(3):
        for model, _ in both:
            loss_of(model, step, used=slice(3, 40 - step)).backward()
        for (name, one), (_, other) in zip(both[0][0].named_parameters(), both[1][0].named_parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            if other.grad is not None:
                got = safe_get_full_grad(one)
                assert got is not None and torch.equal(got, other.grad.to_dense()), name
        for _, optimizer in both:
            optimizer.zero_grad()


def test_a_gradient_of_negative_zero_keeps_its_sign() -> None:
    for model, _ in (both := pairs()):
        (model(torch.ones(4, WIDTH), used=slice(0)) * torch.tensor(-0.0)).sum().backward()
    got, wanted = safe_get_full_grad(both[0][0].module.scale), both[1][0].scale.grad
    assert got is not None and torch.signbit(wanted).all(), "there is one to keep"
    assert torch.equal(torch.signbit(got), torch.signbit(wanted))


def test_under_a_budget_gradients_of_at_most_two_chunks_wait() -> None:
    """The chunks' layers take turns, so that none is complete before the end."""
    module = mlp.build(Chain)
    order = [layer for pair in zip(module.layers[:25], module.layers[25:], strict=True) for layer in pair]
    model = ShardedModel(module, device="emulated", chunk_size=34 * 256, model_data_memory="1GiB")
    names = {parameter: name for name, parameter in model.named_parameters()}
    chunks = {managed.name: chunk.index for chunk in model.chunk_manager.chunks for managed in chunk.parameters}
    most = 0

    def look(grad: Tensor) -> None:
        nonlocal most
        with torch._C.DisableTorchFunctionSubclass():
            waiting = {chunks[names[p]] for p in model.parameters() if p.grad is not None}
        most = max(most, len(waiting))

    def forward(x: Tensor) -> Tensor:
        for layer in order:
            x = x + torch.tanh(layer(x))
            x.register_hook(look)
        return x

    assert sum(chunk.is_fine for chunk in model.chunk_manager.chunks) >= 3
    module.forward = forward
    model(torch.ones(4, WIDTH)).sum().backward()
    assert most == 2


def test_a_refused_graph_of_gradients_leaves_nothing_behind() -> None:
    (model, optimizer), reference = both = pairs()
    with pytest.raises(UnsupportedError, match=r"create_graph=True.*'layers\.49\."):
        loss_of(model, 9).backward(create_graph=True)
    for each, its_optimizer in both:
        loss_of(each, 1).backward()
        its_optimizer.step()
    assert raw_grads(model) == 0
    mlp.assert_same_models([(model, optimizer), reference])


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_backward_that_fails_half_way_leaves_nothing_behind(error: type[BaseException]) -> None:
    (model, optimizer), reference = both = pairs()

    def fail(grad: Tensor) -> None:
        raise error("stopped")

    handle = model.module.layers[20].register_full_backward_hook(lambda *_: fail(torch.ones(1)))
    with pytest.raises(error):
        loss_of(model, 5).backward()
    handle.remove()
    with pytest.warns(UserWarning, match="a backward ended with an exception"):
        loss_of(model, 4)
    for each, its_optimizer in both:
        loss_of(each, 1).backward()
        its_optimizer.step()
    assert raw_grads(model) == 0
    mlp.assert_same_models([(model, optimizer), reference])


def test_hooks_of_users_see_change_and_drop_gradients_that_wait() -> None:
    both = pairs()
    seen: list[list[float]] = [[], []]
    for (model, _), norms in zip(both, seen, strict=True):
        layers = mlp.layer_of(model, 3), mlp.layer_of(model, 4)

        def halve(parameter: Tensor, norms: list[float] = norms) -> None:
            assert parameter.grad is not None
            norms.append(parameter.grad.norm().item())
            parameter.grad.mul_(0.5)

        def drop(parameter: Tensor) -> None:
            parameter.grad = None

        layers[0].weight.register_post_accumulate_grad_hook(halve)
        layers[1].weight.register_post_accumulate_grad_hook(drop)
    for step in range(2):
        for model, optimizer in both:
            loss_of(model, step).backward()
            assert mlp.weight(model, 4).grad is None
            optimizer.step()
            optimizer.zero_grad()
    assert seen[0] == seen[1] and len(seen[0]) == 2
    mlp.assert_same_models(both)


def test_a_gradient_that_is_read_while_others_wait_is_not_missing() -> None:
    (model, _), _ = pairs()
    last = mlp.weight(model, LAYERS - 1)
    found: list[bool] = []
    mlp.layer_of(model, 20).register_full_backward_hook(lambda *_: found.append(last.grad is not None))
    loss_of(model, 0).backward()
    assert found == [True]


def test_gradients_that_wait_after_a_backward_are_added_to_by_a_graph_that_does_not_reach_the_output() -> None:
    """Of such a backward the model hears from its gradients' hooks only."""
    both = pairs()
    for step in range(3):
        for model, optimizer in both:
            inside: list[Tensor] = []
            handle = mlp.layer_of(model, 30).register_forward_hook(lambda *its, inside=inside: inside.append(its[2]))
            loss = loss_of(model, step)
            if step != 1:
                loss.backward(retain_graph=True)
            inside[0].square().sum().backward()
            if step == 2:
                loss_of(model, 5).backward()
            handle.remove()
            optimizer.step()
            optimizer.zero_grad()
    mlp.assert_same_models(both)


def test_zeros_are_left_of_gradients_that_wait() -> None:
    both = pairs()
    for step in range(3):
        for model, optimizer in both:
            loss_of(model, step, used=slice(step, None)).backward()
            if step == 1:
                optimizer.zero_grad(set_to_none=False)
                loss_of(model, step, used=slice(5, None)).backward()
            optimizer.step()
            optimizer.zero_grad()
    mlp.assert_same_models(both)
