"""The user's post-accumulate hooks on wrapped parameters, beside the plain module's."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gemini import ShardedModel, ShardedOptimizer, UnsupportedError
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, assert_same, build, loss_of, weights_of

WRAPS: list[dict[str, Any]] = [
    {"stage": 0},
    {"model_data_memory": "smallest", "chunk_size": 2 * CHUNK_NUMEL},
    {"tensor_placement_policy": "cpu", "stage": 2, "chunk_size": 100 * CHUNK_NUMEL},
]
everywhere = pytest.mark.parametrize("wrap", WRAPS, ids=str)
WAYS = ("before", "after", "both")


def wrapped(module: nn.Module, wrap: dict[str, Any]) -> ShardedModel:
    return ShardedModel(module, **mlp.placed(**wrap))


def hooked(way: str, wrap: dict[str, Any], hook: Any, dtype: torch.dtype | None = None) -> ShardedModel:
    """A wrapped model with a hook on all parameters, registered before wrapping or after it."""
    module = build()
    for parameter in module.parameters() if way in ("before", "both") else ():
        parameter.register_post_accumulate_grad_hook(hook)
    model = wrapped(module, wrap)
    for parameter in model.parameters() if way in ("after", "both") else ():
        parameter.register_post_accumulate_grad_hook(hook)
    return model


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@everywhere
def test_hooks_see_and_may_change_this_ranks_gradients(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """A hook sees this rank's own gradient, and what it makes of it is reduced and stepped with."""
    for way in WAYS:
        seen: dict[str, Tensor] = {}

        def hook(parameter: Tensor) -> None:
            assert parameter.grad is not None and type(parameter.grad) is Tensor
            seen[names[parameter]] = parameter.grad.clone()
            parameter.grad.mul_(0.5)

        model = hooked(way, wrap, hook)
        halves = 2 if way == "both" else 1
        names = {parameter: name for name, parameter in model.named_parameters()}
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        reference = build()
        plain = mlp.adam(reference.parameters())
        for step in range(2):
            totals: dict[str, Tensor] = {}
            for number in range(world_size):
                reference.zero_grad()
                loss_of(reference, step * world_size + number).backward()
                for name, parameter in reference.named_parameters():
                    grad = parameter.grad * 0.5**halves  # type: ignore[operator]
                    totals[name] = totals[name] + grad if name in totals else grad
                    if number == rank:
                        parameter.wanted = grad * 2  # type: ignore[attr-defined]
            seen.clear()
            loss_of(model, step * world_size + rank).backward()
            for name, parameter in reference.named_parameters():
                assert torch.equal(seen[name], parameter.wanted), (way, name)  # type: ignore[attr-defined]
                parameter.grad = totals[name] / world_size
            optimizer.step()
            plain.step()
            assert_same(weights_of(model), weights_of(reference))
        model.close()


@on_ranks(1)
@everywhere
def test_an_optimizer_may_step_in_a_hook_and_drop_its_gradient(
    rank: int, world_size: int, wrap: dict[str, Any]
) -> None:
    """An optimizer per parameter that steps in the hook and drops the gradient: the plain module's weights."""
    for way in ("before", "after"):
        module, reference = build(), build()
        model = wrapped(module, wrap) if way == "after" else None
        for each in (model or module, reference):
            _step_in_hooks(each)
        model = model or wrapped(module, wrap)
        for step in range(3):
            for trained in (model, reference):
                loss_of(trained, step).backward()
            assert all(parameter.grad is None for parameter in model.parameters())
            assert_same(weights_of(model), weights_of(reference))
        model.close()


def _step_in_hooks(model: nn.Module) -> None:
    optimizers = {p: torch.optim.AdamW([p], lr=0.01, foreach=False) for p in model.parameters()}

    def hook(parameter: Any) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)


@on_ranks(2)
@pytest.mark.parametrize("wrap", WRAPS[:2], ids=str)
def test_hooks_that_would_train_ranks_apart_are_refused(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """On several ranks a hook that updates weights, or drops gradients, is refused by name."""

    def writes(parameter: Any) -> None:
        with torch.no_grad():
            parameter.sub_(parameter.grad)

    def drops(parameter: Any) -> None:
        parameter.grad = None

    for hook, said in ((writes, "writes to the weights"), (drops, "drops the gradient")):
        model = wrapped(build(), wrap)
        handle = model.layers[2].weight.register_post_accumulate_grad_hook(hook)
        with pytest.raises(UnsupportedError, match=rf"{said} of 'layers\.2\.weight', and there are 2 ranks"):
            loss_of(model).backward()
        handle.remove()
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
        loss_of(model).backward()  # it goes on without the hook
        optimizer.step()
        model.close()


@pytest.mark.filterwarnings("ignore:a backward ended with an exception")
@on_ranks(1)
@everywhere
def test_hooks_are_removed_by_their_handles_and_may_raise(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Handles remove hooks from before and after wrapping; a hook that raises leaves no gradient behind."""
    calls: list[str] = []
    module = build()
    handles = [module.layers[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("before"))]
    model = wrapped(module, wrap)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    handles.append(model.layers[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append("after")))
    for remaining in (["before", "after"], ["after"], []):
        calls.clear()
        loss_of(model).backward()
        optimizer.zero_grad()
        assert calls == remaining
        if handles:
            handles.pop(0).remove()

    def fails(parameter: Any) -> None:
        raise ValueError("not today")

    handle = model.layers[0].weight.register_post_accumulate_grad_hook(fails)
    with pytest.raises(ValueError, match="not today"):
        loss_of(model, 3).backward()
    handle.remove()
    reference = build()
    loss_of(reference, 4).backward()
    loss_of(model, 4).backward()
    assert torch.equal(model.layers[0].weight.grad, reference.layers[0].weight.grad)
    model.close()


def test_a_hook_sees_the_gradient_of_its_own_backward() -> None:
    """In plain PyTorch it sees the sum of all micro-batches so far."""
    seen: list[Tensor] = []
    model = mlp.wrap()
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for step in range(2):
        loss_of(model, step).backward()
    for step, grad in enumerate(seen):
        reference = build()
        loss_of(reference, step).backward()
        assert torch.equal(grad, reference.layers[1].weight.grad)
    torch.testing.assert_close(model.layers[1].weight.grad.clone(), seen[0] + seen[1])


class Shared(mlp.Mlp):
    """One layer in two reentrant checkpoints, whose backwards are graph tasks of their own."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return x


@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_a_hook_sees_the_pieces_of_a_gradient_that_plain_pytorch_shows_added_up(place: str) -> None:
    def hooked(model: Any) -> tuple[list[Tensor], Tensor]:
        seen: list[Tensor] = []
        weight = model.layers[0].weight
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        model(mlp.inputs(0).requires_grad_()).square().mean().backward()
        return seen, weight.grad.clone()

    pieces, gradient = hooked(mlp.wrap(place, make=Shared))
    sums, reference = hooked(build(Shared))
    assert torch.equal(gradient, reference)
    assert len(pieces) == len(sums) == 2
    assert torch.equal(pieces[0], sums[0])
    assert torch.equal(pieces[0] + pieces[1], sums[1])
    assert torch.equal(sums[1], reference)
