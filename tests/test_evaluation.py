"""Frozen parameters, evaluation between steps, and several models in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import ShardedOptimizer
from tests.zoo.mlp import (
    LAYERS,
    Mlp,
    adam,
    assert_same,
    assert_same_models,
    both_dtypes,
    build,
    everywhere,
    inputs,
    layer_of,
    loss_of,
    pairs,
    train_step,
    weights_of,
    wrap,
)


@everywhere
def test_frozen_parameters_stay_and_have_no_state(place: str) -> None:
    class Partly(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.layers[0].requires_grad_(False)
            self.layers[3].weight.requires_grad_(False)

    model, reference = wrap(place, make=Partly), build(Partly)
    optimizer, plain_optimizer = (adam(p for p in m.parameters() if p.requires_grad) for m in (model, reference))
    wrapped = ShardedOptimizer(model, optimizer)
    for step in range(3):
        train_step(model, wrapped, step)
        train_step(reference, plain_optimizer, step)
    assert_same(weights_of(model), weights_of(reference))
    assert torch.equal(model.state_dict()["layers.0.weight"], build().layers[0].weight)
    assert len(wrapped.state_dict()["state"]) == 2 * LAYERS - 3
    assert layer_of(model, 3).weight.grad is None


@everywhere
def test_freezing_after_wrapping_stops_a_parameter_and_unfreezing_goes_on_with_its_moments(place: str) -> None:
    both = pairs(place)
    for model, optimizer in both:
        for step, trains in enumerate([True, False, True]):
            weight = layer_of(model, 1).weight
            weight.requires_grad_(trains)
            train_step(model, optimizer, step)
    assert_same_models(both)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@both_dtypes
@everywhere
def test_evaluation_first_and_between_steps(place: str, mode: Any, dtype: torch.dtype | None) -> None:
    both = pairs(place, dtype)
    outputs: list[list[Tensor]] = []
    for model, optimizer in both:
        its = []
        for step in range(3):
            model.eval()
            with mode():
                its += [model(inputs(50 + step, dtype)).clone(), layer_of(model, 2).weight.sum().clone()]
            model.train()
            train_step(model, optimizer, step, dtype)
        outputs.append(its)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*outputs))
    assert_same_models(both)


def test_evaluation_between_forward_and_backward() -> None:
    both = pairs()
    for model, optimizer in both:
        for step in range(2):
            loss = loss_of(model, step)
            with torch.no_grad():
                model(inputs(9))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_same_models(both)


@pytest.mark.parametrize("order", ["one_after_the_other", "interleaved", "chained"])
def test_several_models_in_one_process(order: str) -> None:
    def run(kinds: list[list[tuple[Any, Any]]], which: int) -> list[Any]:
        (first, first_optimizer), (second, second_optimizer) = (kinds[i][which] for i in (0, 1))
        for step in range(3):
            if order == "one_after_the_other":
                train_step(first, first_optimizer, step)
                train_step(second, second_optimizer, step + 10)
            elif order == "interleaved":
                losses = loss_of(first, step), loss_of(second, step + 10)
                for loss in losses:
                    loss.backward()
                first_optimizer.step()
                second_optimizer.step()
                first_optimizer.zero_grad()
                second_optimizer.zero_grad()
            else:
                second(first(inputs(step))).square().mean().backward()
                for optimizer in (first_optimizer, second_optimizer):
                    optimizer.step()
                    optimizer.zero_grad()
        return [weights_of(first), weights_of(second)]

    kinds = [pairs("smallest"), pairs("auto")]
    for mine, theirs in zip(run(kinds, 0), run(kinds, 1)):
        assert_same(mine, theirs)
