"""Host memory is read again where training needs more of it than was free when the model was wrapped."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import BudgetError, ShardedModel, ShardedOptimizer, state_hash
from tests.harness.machine import host_with
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, Mlp, adam, assert_same, build, loss_of, placed, train_step, weights_of

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


# -- A host that is bounded to the byte: what steps may need beside the plan is there, or refused before the first one.

NUMEL = CHUNK_NUMEL * LAYERS
HALF = torch.bfloat16


def trained_in(model: ShardedModel, optimizer: ShardedOptimizer, rank: int, micro_batches: tuple[int, ...]) -> str:
    for step, number in enumerate(micro_batches):
        for micro in range(number):
            optimizer.backward(loss_of(model, 20 * step + 2 * micro + rank, HALF))
        optimizer.step()
    found = state_hash(model, optimizer)
    bound = model.settings.budget_bytes("host_memory")
    assert bound is None or model.chunk_manager.memory.host.ledger.peak_bytes <= bound
    model.close()
    return found


@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:reuse_fp16_shard=True")
@pytest.mark.parametrize("options", [{}, {"tensor_placement_policy": "cpu", "reuse_fp16_shard": True}], ids=["", "cpu"])
def test_a_backward_that_nobody_has_announced_has_room_on_a_host_as_small_as_the_plan(
    rank: int, world_size: int, options: dict[str, Any]
) -> None:
    """Or training is refused before its first step, with the bytes that are enough."""
    device = {} if options else {"model_data_memory": 10 * NUMEL // world_size}

    def made(**more: Any) -> tuple[ShardedModel, ShardedOptimizer]:
        model = ShardedModel(build(), **placed(dtype=HALF, **device, **options, **more))
        return model, ShardedOptimizer(model, adam(model.parameters()))

    model, optimizer = made()
    at_rest, wanted = model.plan.host_bytes, trained_in(model, optimizer, rank, (2, 1, 2, 2, 1, 3))
    words = "a second backward in a step takes .*: gradient_accumulation_steps=1 says that there is none"
    with pytest.raises(BudgetError, match=words) as refused:
        made(host_memory=at_rest)
    needed = refused.value.needed_bytes
    assert refused.value.tier == "host" and needed is not None
    assert trained_in(*made(host_memory=needed), rank, (2, 1, 2, 2, 1, 3)) == wanted
    alone = trained_in(*made(host_memory=at_rest, gradient_accumulation_steps=1), rank, (1, 1))
    assert alone == trained_in(*made(), rank, (1, 1))


@on_ranks(1, 2)
@pytest.mark.parametrize("factor", [4, 6])
def test_a_disk_leaves_room_for_a_backward_that_nobody_has_announced(
    rank: int, world_size: int, factor: int, tmp_path: Path
) -> None:
    device = {"model_data_memory": 8 * NUMEL // world_size}
    found = []
    for disk in ({}, {"disk_path": tmp_path, "host_memory": factor * NUMEL // world_size}):
        model = ShardedModel(build(), **placed(dtype=HALF, **device, **disk))
        found.append(trained_in(model, ShardedOptimizer(model, adam(model.parameters())), rank, (1, 2, 1, 1, 2)))
    assert found[0] == found[1]


@pytest.mark.parametrize("has_disk", [False, True])
def test_layers_are_frozen_in_turns_while_the_host_is_full(has_disk: bool, tmp_path: Path) -> None:
    """States that change places with others on a full device take turns."""
    found = []
    for host_memory in (None, 4 * NUMEL):
        disk = {"disk_path": tmp_path} if has_disk else {}
        model = ShardedModel(build(), **placed(model_data_memory=12 * NUMEL, host_memory=host_memory, **disk))
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        for step in range(6):
            model.module.layers[step // 2].requires_grad_(step % 2 == 0)
            train_step(model, optimizer, step)
        found.append(state_hash(model, optimizer))
        model.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("in_backward", [False, True])
def test_parameters_that_join_a_group_later_keep_their_gradients_on_a_full_device(in_backward: bool) -> None:
    """Also where the backward uses the others up, and has no homes for any in its plan."""
    found = []
    for factor in (None, *range(10, 20)):
        budget = None if factor is None else factor * NUMEL
        model = ShardedModel(build(), **placed(model_data_memory=budget, update_in_backward=in_backward))
        parameters = list(model.parameters())
        optimizer = ShardedOptimizer(model, adam(parameters[:-4]))
        for step in range(4):
            if step == 2:
                optimizer.add_param_group({"params": parameters[-4:]})
            loss_of(model, step).backward()
            optimizer.step()
        found.append(state_hash(model, optimizer))
        model.close()
    assert len(set(found)) == 1


def test_a_host_without_room_for_gradients_of_parameters_in_no_group_is_refused_at_once() -> None:
    def made(host_memory: int) -> tuple[ShardedModel, ShardedOptimizer]:
        where = {"tensor_placement_policy": "cpu", "host_memory": host_memory}
        model = ShardedModel(build(), **placed(update_in_backward=True, **where))
        return model, ShardedOptimizer(model, adam(list(model.parameters())[:-4]))

    at_rest = 4 * NUMEL + 8 * CHUNK_NUMEL * (LAYERS - 2)
    with pytest.raises(BudgetError, match="of parameters in no param group, which update_in_backward=True") as refused:
        made(at_rest)
    needed = refused.value.needed_bytes
    assert needed == at_rest + 2 * 4 * CHUNK_NUMEL
    model, optimizer = made(needed)
    for step in range(3):
        train_step(model, optimizer, step)
    assert model.chunk_manager.memory.host.ledger.peak_bytes == needed
    model.close()
