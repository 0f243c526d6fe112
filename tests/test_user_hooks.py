"""The user's post-accumulate hooks on wrapped parameters, on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests import mlp, user_hooks

CASES = [user_hooks.reads_and_changes, user_hooks.steps, user_hooks.removed]


@pytest.mark.filterwarnings("ignore:a backward ended with an exception")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("wrap", user_hooks.WRAPS, ids=str)
def test_hooks_see_and_may_change_or_use_up_gradients(
    case: Callable[[int, int, dict[str, Any]], None], wrap: dict[str, Any]
) -> None:
    case(0, 1, wrap)


def test_a_hook_sees_the_gradient_of_its_own_backward() -> None:
    """In plain PyTorch it sees the sum of all micro-batches so far."""
    seen: list[torch.Tensor] = []
    model = mlp.wrap()
    model.layers[1].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    for step in range(2):
        mlp.loss_of(model, step).backward()
    for step, grad in enumerate(seen):
        reference = mlp.build()
        mlp.loss_of(reference, step).backward()
        assert torch.equal(grad, reference.layers[1].weight.grad)
    torch.testing.assert_close(model.layers[1].weight.grad.clone(), seen[0] + seen[1])


class Shared(mlp.Mlp):
    """One layer in two reentrant checkpoints, whose backwards are graph tasks of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layers[0], x, use_reentrant=True)
        return x


@pytest.mark.parametrize("place", ["cuda", "smallest"])
def test_a_hook_sees_the_pieces_of_a_gradient_that_plain_pytorch_shows_added_up(place: str) -> None:
    def hooked(model: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        seen: list[torch.Tensor] = []
        weight = model.layers[0].weight
        weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
        model(mlp.inputs(0).requires_grad_()).square().mean().backward()
        return seen, weight.grad.clone()

    pieces, gradient = hooked(mlp.wrap(place, make=Shared))
    sums, reference = hooked(mlp.build(Shared))
    assert torch.equal(gradient, reference)
    assert len(pieces) == len(sums) == 2
    assert torch.equal(pieces[0], sums[0])
    assert torch.equal(pieces[0] + pieces[1], sums[1])
    assert torch.equal(sums[1], reference)
