"""Host memory is read again where training needs more of it than was free when the model was wrapped."""

from typing import Any

import pytest

from gemini import BudgetError, ShardedModel, ShardedOptimizer
from tests.harness.machine import host_with
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, Mlp, adam, assert_same, build, train_step, weights_of

ON_HOST: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}
ENOUGH = 10**9


def available_for(num_bytes: int, world_size: int) -> int:
    """On a host of which each of its ranks may take so many bytes, nearly."""
    return num_bytes * world_size * 10 // 9 + 10


def wrapped(world_size: int, **options: Any) -> tuple[ShardedModel, int]:
    """On a host with room for the weights and half of the rest; and the bytes that the rest takes."""
    module = build(Mlp)
    own = sum(parameter.nbytes for parameter in module.parameters())
    with host_with(ENOUGH):
        roomy = ShardedModel(build(Mlp), **ON_HOST)
        rest = roomy.plan.host_bytes - own
        roomy.close()
    with host_with(available_for(rest // 2, world_size)):
        return ShardedModel(module, **ON_HOST, **options), rest


def trained(model: ShardedModel, optimizer: ShardedOptimizer) -> dict[str, Any]:
    for step in range(3):
        train_step(model, optimizer, step)
    weights = weights_of(model)
    model.close()
    return weights


@on_ranks(1, 2, 3)
def test_what_was_freed_since_wrapping_is_there_for_training(rank: int, world_size: int) -> None:
    """A script wraps its model beside the checkpoint that it has loaded, and drops that."""
    model, rest = wrapped(world_size)
    before = model.plan.budget.host
    with host_with(available_for(2 * rest + 1000 * rank, world_size)):  # gradients may be there twice for a while
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
    after = model.plan.budget.host
    assert before is not None and after is not None and before < model.plan.host_bytes <= after
    assert len(set(gathered((after, model.plan.hash)))) == 1, "the least reading of all ranks"
    other = ShardedModel(build(Mlp), **ON_HOST)
    assert_same(trained(model, optimizer), trained(other, ShardedOptimizer(other, adam(other.parameters()))))


@on_ranks(1, 2)
def test_where_nothing_was_freed_training_is_refused_and_the_model_infers(rank: int, world_size: int) -> None:
    """One rank without memory is enough."""
    model, rest = wrapped(world_size)
    with host_with(available_for(rest // 3 if rank == world_size - 1 else ENOUGH, world_size)):
        with pytest.raises(BudgetError, match="host"):
            ShardedOptimizer(model, adam(model.parameters()))
    with host_with(ENOUGH):
        trained(model, ShardedOptimizer(model, adam(model.parameters())))


@on_ranks(1, 2)
def test_a_bound_that_the_user_gave_stays(rank: int, world_size: int) -> None:
    model, _ = wrapped(world_size)
    bound = model.plan.budget.host
    model.close()
    model, _ = wrapped(world_size, host_memory=bound)
    with host_with(ENOUGH), pytest.raises(BudgetError, match="host_memory="):
        ShardedOptimizer(model, adam(model.parameters()))
    assert model.plan.budget.host == bound
