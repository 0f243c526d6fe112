"""Parameters that are unfrozen one after the other, outside of a step: they are planned for together, and train."""

from typing import Any

import pytest
from torch import nn

from gemini import ShardedModel, ShardedOptimizer
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import assert_same, train_step, weights_of

Both = list[tuple[Any, Any]]


def frozen() -> nn.Module:
    return mlp.build().requires_grad_(False)


def both(place: str) -> Both:
    """A sharded and a plain model of which nothing is trained yet, with their optimizers."""
    model = mlp.wrap(place, frozen)
    plain = frozen()
    return [
        (model, ShardedOptimizer(model, mlp.adam(model.parameters()))),
        (plain, mlp.adam(plain.parameters())),
    ]


def train_both(models: Both) -> None:
    for step in range(2):
        for model, optimizer in models:
            train_step(model, optimizer, step)
    assert_same(weights_of(models[0][0]), weights_of(models[1][0]))


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_is_unfrozen_and_given_other_values_in_turns_is_planned_once(
    rank: int, world_size: int, place: str
) -> None:
    """At the next forward: writes to what was detached build no graph that needs memory."""
    models = both(place)
    model: ShardedModel = models[0][0]
    before = model.plan
    for each, _ in models:
        for parameter in each.parameters():
            parameter.requires_grad_(True)
            parameter.data.mul_(0.5)
            assert not parameter.detach().sum().requires_grad
    assert model.plan is before
    train_both(models)
    assert model.plan is not before
    model.close()


@on_ranks(1, 2)
def test_using_a_parameter_plans_for_no_other_one(rank: int, world_size: int) -> None:
    models = both("cpu")
    model: ShardedModel = models[0][0]
    before = model.plan
    first, *others = model.parameters()
    for parameter in others:
        parameter.requires_grad_(True)
        assert not (first * 2).requires_grad
    assert model.plan is before
    for parameter in models[1][0].layers.parameters():
        parameter.requires_grad_(parameter is not models[1][0].layers[0].weight)
    train_both(models)
    model.close()
