"""A model without an optimizer costs its weights, on any tier. What training needs comes when training begins."""

from typing import Any

import pytest
import torch
from torch import nn

from gemini import BudgetError, ShardedModel, ShardedOptimizer, safe_get_full_fp32_param, safe_set_full_fp32_param
from optim import HALF_DTYPES
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import CHUNK_NUMEL, adam, assert_same, build, inputs, weights_of

LIMIT = 2.05  # bytes a parameter
WIDTH = 256
NUMEL = WIDTH * WIDTH + WIDTH  # of a layer, without padding
CHUNK = 2 * NUMEL
HALVES = [torch.bfloat16, torch.float16]


def stack(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def held_bytes(layers: int, dtype: torch.dtype, **options: Any) -> int:
    """Of model data on both tiers of this rank, and mapped on the host, at most, in two forwards."""
    model = ShardedModel(stack(layers).to(dtype), device="emulated", chunk_size=CHUNK, **options)
    x = torch.ones(2, WIDTH, dtype=dtype)
    with torch.no_grad():
        model(x)
        model(x)
    if options["model_data_memory"] is not None or options["tensor_placement_policy"] == "cuda":
        # Someone forgot no_grad(), so training may begin: its slots fill a budget, and without one follow the size.
        model(x)
    device, host = model.chunk_manager.memory.tiers
    assert host.mapped_bytes <= host.ledger.peak_bytes
    kinds = set(device.ledger.peak_by_kind) | set(host.ledger.peak_by_kind)
    assert kinds <= {"param", "slots"}, "nothing that only training needs"
    model.close()
    return device.ledger.peak_bytes + host.ledger.peak_bytes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(("policy", "budget"), [("cpu", None), ("cpu", 8 * 2 * CHUNK), ("cuda", None)])
@on_ranks(1, 2)
def test_a_model_that_only_infers_costs_two_bytes_a_parameter(
    rank: int, world_size: int, policy: str, budget: int | None, dtype: torch.dtype
) -> None:
    """By the slope over two sizes: slots, of which there are as many at any size, are in the intercept."""
    options: dict[str, Any] = {"tensor_placement_policy": policy, "model_data_memory": budget}
    sizes = 16, 32
    held = [sum(gathered(held_bytes(layers, dtype, **options))) for layers in sizes]
    # 2 ranks and everything on the device: each has all shards gathered in slots besides
    whole = 2 * world_size * NUMEL if policy == "cuda" and world_size > 1 else 0
    assert (held[1] - held[0]) / (sizes[1] - sizes[0]) <= LIMIT * NUMEL + whole


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("is_frozen", [False, True])
def test_weights_given_in_fp32_keep_masters_for_an_optimizer_to_come_unless_they_are_frozen(
    dtype: torch.dtype, is_frozen: bool
) -> None:
    module = stack(4).requires_grad_(not is_frozen)
    where: dict[str, Any] = {"tensor_placement_policy": "cpu", "device": "emulated", "chunk_size": CHUNK}
    model = ShardedModel(module, dtype=dtype, **where)
    masters = {torch.bfloat16: 2, torch.float16: 4}[dtype] * (not is_frozen)  # the rest of fp32, or all of it
    assert model.chunk_manager.memory.host.ledger.total_bytes == (2 + masters) * 4 * NUMEL


def test_a_state_dict_that_needs_masters_for_which_there_is_no_room_changes_nothing() -> None:
    model = mlp.wrap("cpu", make=lambda: build().bfloat16(), host_memory=3 * CHUNK_NUMEL * mlp.LAYERS)
    before = weights_of(model)
    with pytest.raises(BudgetError, match=r"host: .*masters.*host_memory="):
        model.load_state_dict(uneven().state_dict())
    assert_same(weights_of(model), before)
    model.load_state_dict(uneven().bfloat16().state_dict())
    assert_same(weights_of(model), uneven().bfloat16().state_dict())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("place", mlp.PLACES)
def test_a_model_that_inferred_first_trains_with_the_same_bits(place: str, dtype: torch.dtype) -> None:
    """Weights that were given in fp32 keep what 16 bits cannot hold for the optimizer that comes."""
    results = []
    for infers in (False, True):
        model = mlp.wrap(place, dtype=dtype, make=uneven)
        if infers:
            with torch.no_grad():
                model(inputs(0, dtype))
            model.load_state_dict(model.state_dict())
        optimizer = ShardedOptimizer(model, adam(model.parameters()), initial_scale=1.0)
        for step in range(2):
            optimizer.backward(mlp.loss_of(model, step, dtype).float())
            optimizer.step()
        results.append(weights_of(model))
    assert_same(*results)


def uneven() -> nn.Module:
    """Weights that are no 16-bit numbers."""
    torch.manual_seed(1)
    return mlp.Mlp()


@pytest.mark.parametrize("place", mlp.PLACES)
def test_gradients_without_an_optimizer_get_their_memory_with_the_first_backward(place: str) -> None:
    model, reference = mlp.wrap(place), build()
    ledgers = [tier.ledger for tier in model.chunk_manager.memory.tiers]
    assert not any(ledger.bytes_by_kind["grad"] for ledger in ledgers)
    for step in range(2):
        mlp.loss_of(model, step).backward()
        mlp.loss_of(reference, step).backward()
        assert sum(ledger.bytes_by_kind["grad"] for ledger in ledgers) == 4 * CHUNK_NUMEL * mlp.LAYERS
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad.clone(), theirs.grad), name
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    optimizer.step()
    adam(reference.parameters()).step()
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize("dtype", HALF_DTYPES, ids=str)
def test_values_of_more_than_16_bits_that_are_set_before_there_is_an_optimizer_are_kept(dtype: torch.dtype) -> None:
    """Other weights' masters are made of these: of fp16 ones whole, of bf16 ones what the weights do not hold."""
    model = ShardedModel(build().to(dtype), device="emulated", chunk_size=CHUNK_NUMEL)
    wanted = torch.randn(mlp.WIDTH, mlp.WIDTH, generator=torch.Generator().manual_seed(3))
    safe_set_full_fp32_param(mlp.weight(model, 2), wanted)
    ShardedOptimizer(model, adam(model.parameters()))
    assert torch.equal(safe_get_full_fp32_param(mlp.weight(model, 2)), wanted)
    other = mlp.weight(model, 3)
    assert torch.equal(safe_get_full_fp32_param(other), mlp.weight(build().to(dtype), 3).float())


def test_a_host_with_room_for_the_weights_only_is_enough_to_infer_and_training_is_refused() -> None:
    """Before a step has begun; inference goes on."""
    weights_bytes = 4 * CHUNK_NUMEL * mlp.LAYERS
    model = mlp.wrap("cpu", host_memory=2 * weights_bytes - 1)
    wanted = build()(inputs(0))
    with torch.no_grad():
        assert torch.equal(model(inputs(0)), wanted)
    with pytest.raises(BudgetError, match=r"host: .*gradients, masters and optimizer state.*host_memory=") as refused:
        ShardedOptimizer(model, adam(model.parameters()))
    assert refused.value.needed_bytes == 4 * weights_bytes
    with pytest.raises(BudgetError, match=r"host: .*gradients.*host_memory="):
        mlp.loss_of(model).backward()
    with torch.no_grad():
        assert torch.equal(model(inputs(0)), wanted)
    assert model.chunk_manager.memory.host.ledger.total_bytes == weights_bytes
    with pytest.raises(BudgetError, match=f"host: {weights_bytes} bytes of parameters"):
        mlp.wrap("cpu", host_memory=weights_bytes - 1)
