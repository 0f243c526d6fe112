"""The user's post-accumulate hooks on wrapped parameters, on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

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
