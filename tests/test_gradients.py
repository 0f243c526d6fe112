"""What a user does with `.grad`, on one rank."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import access, gradient_writes, gradients


@pytest.mark.parametrize("wrap", gradients.WRAPS, ids=str)
def test_a_parameter_without_a_gradient_has_none(wrap: dict[str, Any]) -> None:
    gradients.idle(0, 1, wrap)


def test_one_may_ask_what_a_gradient_is_without_reading_it() -> None:
    gradients.asked_on_one_rank(0, 1)


EVERYWHERE = pytest.mark.parametrize("wrap", [*gradients.WRAPS[2:], {"chunk_size": 2048}], ids=str)


@EVERYWHERE
def test_writes_reach_the_step(wrap: dict[str, Any]) -> None:
    gradient_writes.writes(0, 1, wrap)


@EVERYWHERE
def test_writes_between_micro_batches_and_gradients_that_no_backward_made(wrap: dict[str, Any]) -> None:
    gradient_writes.micro_batches(0, 1, wrap)


@EVERYWHERE
@pytest.mark.parametrize("case", [gradient_writes.clips, gradient_writes.after_our_clip, gradients.reads])
def test_clipping_and_reading(case: Callable[[int, int, dict[str, Any]], None], wrap: dict[str, Any]) -> None:
    case(0, 1, wrap)


def test_torchs_clipping_holds_one_gradient_at_a_time() -> None:
    gradient_writes.one_at_a_time(0, 1)


def test_what_cannot_be_written_is_refused_and_changes_nothing() -> None:
    gradients.refused(0, 1)


@pytest.mark.parametrize("wrap", gradients.FP16, ids=str)
def test_fp16_gradients_are_seen_and_set_without_the_loss_scale(wrap: dict[str, Any]) -> None:
    gradients.unscaled(0, 1, wrap)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_writes_in_every_grad_mode(mode: Any) -> None:
    pair = access.Pair(1, {})
    pair.backward(0)
    factor = torch.tensor(2.0, requires_grad=True)
    with mode():
        for parameter, wanted in pair.both():
            parameter.grad.mul_(factor)
            parameter.grad.unsqueeze(-1)[:1].zero_()
            wanted.grad = wanted.grad * 2
            wanted.grad.unsqueeze(-1)[:1].zero_()
    gradient_writes.same_gradients(pair, mode.__name__)
    pair.step()


def test_a_function_may_return_the_parameter_beside_its_gradient() -> None:
    pair = access.Pair(1, {})
    pair.backward(0)
    parameter, wanted = pair.both()[0]
    both = torch.broadcast_tensors(parameter.grad, parameter)
    for found, its in zip(both, torch.broadcast_tensors(wanted.grad, wanted), strict=True):
        assert torch.equal(found, its)


def test_the_gradient_of_a_parameter_without_elements() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.none, self.layer = nn.Parameter(torch.zeros(0, 3)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + self.none.sum()

    model, optimizer = gradients.wrapped(Empty, {})
    model(torch.ones(1, 4)).sum().backward()
    assert model.none.grad.shape == (0, 3)
    assert model.none.grad.mul_(2).sum() == 0
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    assert norm == torch.tensor(20.0).sqrt(), "16 weights and 4 biases, each with a gradient of 1"
    optimizer.step()
