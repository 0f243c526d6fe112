"""What is left of gradients after a step and zero_grad(), on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import leftovers, mlp

Case = Callable[[int, int, dict[str, Any]], None]


@pytest.mark.parametrize("wrap", leftovers.WRAPS, ids=str)
def test_zeros_that_zero_grad_leaves_move_idle_parameters_by_their_moments(wrap: dict[str, Any]) -> None:
    leftovers.zeros(0, 1, wrap)


@pytest.mark.parametrize("wrap", leftovers.WRAPS, ids=str)
def test_gradients_of_parameters_in_no_group_stay_for_another_optimizer(wrap: dict[str, Any]) -> None:
    leftovers.others(0, 1, wrap)


CASES = [leftovers.nothing, leftovers.bad_others, leftovers.clipped]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
@pytest.mark.parametrize("wrap", leftovers.WRAPS[1:3], ids=str)
def test_a_step_without_a_gradient_and_one_beside_a_bad_gradient(case: Case, wrap: dict[str, Any]) -> None:
    case(0, 1, wrap)


def test_gradients_and_zeros_that_no_step_used_end_when_other_parameters_are_trained() -> None:
    pair = leftovers.Others(0, 1, {})
    pair.backward(0)
    pair.optimizer.step()
    pair.optimizer.zero_grad(set_to_none=False)
    assert all(parameter.grad is not None for parameter in pair.model.parameters())
    pair.model.layers[0].weight.requires_grad_(False)
    mlp.loss_of(pair.model)
    assert all(parameter.grad is None for parameter in pair.model.parameters())


def test_the_same_gradient_moves_no_weight_twice() -> None:
    """Here a step leaves None, where plain PyTorch leaves the gradients that it has used."""
    model, optimizer = mlp.sharded()
    mlp.train_step(model, optimizer)
    mlp.loss_of(model, 1).backward()
    optimizer.step()
    before = mlp.weights_of(model)
    optimizer.step()
    mlp.assert_same(mlp.weights_of(model), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(optimizer.grad_norm, torch.zeros(()))
