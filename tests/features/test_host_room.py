"""Host memory is read again where training needs more of it than was free when the model was wrapped."""

from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize(("device_bytes", "chunk_size"), [(8192, 512), (8192, None), (12_000, 512), (12_000, None)])
def test_the_host_memory_that_a_refusal_names_is_enough_to_wrap(device_bytes: int, chunk_size: int | None) -> None:
    """A model that cannot be trained is wrapped for inference, which needs less of the host."""
    options: dict[str, Any] = {"device": "emulated", "chunk_size": chunk_size, "model_data_memory": device_bytes}
    with pytest.raises(BudgetError, match="enough for inference; to train it, host: ") as refused:
        ShardedModel(build(), host_memory=0, **options)
    needed = refused.value.needed_bytes
    assert refused.value.tier == "host" and needed is not None
    assert ShardedModel(build(), host_memory=needed, **options).plan.infers
    with pytest.raises(BudgetError, match="host: "):
        ShardedModel(build(), host_memory=needed - 1, **options)


class Experts(torch.nn.Module):
    """Two weights that are each larger than a chunk, in one operator: their gradients are open at the same time."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.up = torch.nn.Parameter(torch.randn(8, 16, 32, generator=generator) * 0.1)
        self.down = torch.nn.Parameter(torch.randn(8, 32, 16, generator=generator) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(torch.einsum("bn,enh->ebh", x, self.up))
        return x + torch.einsum("ebh,ehn->bn", hidden, self.down)


def four_experts() -> torch.nn.Sequential:
    return torch.nn.Sequential(*map(Experts, range(4)))


@on_ranks(2)
def test_gradients_that_pass_through_the_host_are_counted_before_a_step(rank: int, world_size: int) -> None:
    """A rank that has one gradient slot for two gradients moves one of them to the host until it is reduced."""

    def wrapped(host_memory: int | None) -> ShardedModel:
        return ShardedModel(four_experts(), device="emulated", model_data_memory=budget, host_memory=host_memory)

    budget = None
    budget = wrapped(None).plan.minimum_bytes
    roomy = wrapped(None)
    needed, at_rest = roomy.plan.predicted.host_peak, roomy.plan.host_bytes
    assert needed > at_rest, "a gradient passes through the host"
    tight = wrapped(needed - 1)
    with pytest.raises(BudgetError, match="find no gradient slot") as refused:
        ShardedOptimizer(tight, adam(tight.parameters()))
    assert refused.value.tier == "host" and refused.value.needed_bytes == needed
    model = wrapped(needed)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    for _ in range(3):
        model(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
    assert model.chunk_manager.memory.host.ledger.peak_bytes == needed
