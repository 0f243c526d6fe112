"""A model that nothing trains has a plan for inference. Training's comes in force with an optimizer, or a graph."""

import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from gemini import (
    BudgetError,
    GatheredParameters,
    GeminiError,
    Kind,
    ShardedModel,
    ShardedOptimizer,
    Tier,
    estimate_memory,
)
from gemini.memory.memory import EmulatedTier
from gemini.placement.plan import Plan
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import (
    CHUNK_NUMEL,
    LAYERS,
    adam,
    assert_same,
    both_dtypes,
    build,
    inputs,
    loss_of,
    minimum_bytes,
    train_while,
    weights_of,
)

SMALL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL}


def infer(model: torch.nn.Module, step: int = 0, dtype: torch.dtype | None = None) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(inputs(step, dtype))
    return result


def on_device(plan: Plan, kind: Kind) -> int:
    """Chunks of which this state rests on the device."""
    return sum(homes.get(kind) is Tier.DEVICE for homes in plan.placement.homes)


def tight(world_size: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """All parameters, the fewest slots and a bit more fit, and little of what training needs."""
    options: dict[str, Any] = {**SMALL, "dtype": dtype}
    demand = estimate_memory(build(), world_size=world_size, **options).plan.demand
    budget = sum(chunk.home_bytes[Kind.PARAM] for chunk in demand.chunks) + CHUNK_NUMEL
    budget += sum(map(math.prod, zip(demand.min_slots, demand.slot_bytes, strict=True))) if world_size > 1 else 0
    return {**options, "model_data_memory": max(budget, minimum_bytes(build(), **options))}


@on_ranks(1, 2)
def test_what_is_too_small_to_train_on_cuda_infers_and_says_so_when_an_optimizer_comes(
    rank: int, world_size: int
) -> None:
    options: dict[str, Any] = {**SMALL, "tensor_placement_policy": "cuda"}
    least = minimum_bytes(build(), **options)
    model, wanted = ShardedModel(build(), model_data_memory=least - 1, **options), infer(build())
    assert model.plan.infers and "for inference" in model.memory_report()
    for _ in range(2):
        assert torch.equal(infer(model), wanted)
        assert torch.equal(model(inputs(0)).detach(), wanted), "torch.no_grad() was forgotten"
        with pytest.raises(BudgetError, match=f"device: .*'cuda' needs {least} bytes.*model_data_memory=") as refused:
            ShardedOptimizer(model, adam(model.parameters()))
        assert (refused.value.tier, refused.value.needed_bytes) == ("device", least)
    with pytest.raises(BudgetError, match=f"device: .*'cuda' needs {least} bytes.*model_data_memory="):
        loss_of(model).backward()
    assert torch.equal(infer(model), wanted)
    assert_same(weights_of(model), weights_of(build()))
    model.change_budgets(model_data_memory=least)
    losses = train_while(model, ShardedOptimizer(model, adam(model.parameters())), rank)
    at_once = ShardedModel(build(), model_data_memory=least, **options)
    assert losses == train_while(at_once, ShardedOptimizer(at_once, adam(at_once.parameters())), rank)


@on_ranks(1, 2)
def test_what_is_too_small_to_train_by_default_says_how_much_of_the_device_is_enough(
    rank: int, world_size: int
) -> None:
    """A part of the device is left to activations, so the bytes that training needs may be there and not be enough."""
    options: dict[str, Any] = {**SMALL, "tensor_placement_policy": "cuda"}
    least = minimum_bytes(build(), **options)
    model = ShardedModel(build(), device_memory=least, **options)
    with pytest.raises(BudgetError, match="until a step has shown its activations") as refused:
        ShardedOptimizer(model, adam(model.parameters()))
    enough = refused.value.enough_bytes
    assert enough is not None and f"{enough} bytes of it are enough" in str(refused.value)
    assert ShardedModel(build(), device_memory=enough - 1, **options).plan.infers
    model = ShardedModel(build(), device_memory=enough, **options)
    assert not model.plan.infers
    train_while(model, ShardedOptimizer(model, adam(model.parameters())), rank)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@both_dtypes
def test_auto_has_all_weights_on_the_device_to_infer_and_then_trains_like_a_model_that_never_inferred(
    rank: int, world_size: int, dtype: torch.dtype | None
) -> None:
    options, runs, plans = tight(world_size, dtype), [], []
    for infers in (True, False):
        model = ShardedModel(build(), **options)
        at_first = model.plan
        assert not at_first.infers and "for training" in model.memory_report()
        assert "plan is for training" in at_first.explain()
        if infers:
            wanted = ShardedModel(build(), **{**options, "model_data_memory": None})
            assert torch.equal(infer(model, dtype=dtype), infer(wanted, dtype=dtype))
            wanted.close()
            assert model.plan.infers and "for inference" in model.memory_report()
            assert "plan is for inference" in model.plan.explain()
            assert on_device(at_first, Kind.PARAM) < on_device(model.plan, Kind.PARAM) == LAYERS
            links = model.chunk_manager.memory.transfer.bytes_by_link
            before = dict(links)
            infer(model, dtype=dtype)
            assert links == before, "nothing moves any more"
            assert model.chunk_manager.memory.device.ledger.peak_bytes <= options["model_data_memory"]
        optimizer = ShardedOptimizer(model, adam(model.parameters()))
        plans.append(model.plan)
        assert model.plan.placement == at_first.placement

        def evaluate(step: int, model: ShardedModel, plan: Plan = model.plan) -> None:
            infer(model, step, dtype)
            assert model.plan is plan, "an evaluation between steps moves nothing"

        runs.append(train_while(model, optimizer, rank, evaluate, dtype=dtype))
    assert runs[0] == runs[1]
    assert plans[0].placement == plans[1].placement and plans[0].hash == plans[1].hash


@on_ranks(1, 2)
def test_a_graph_begins_training_without_an_optimizer(rank: int, world_size: int) -> None:
    """Of the model, and of a part that is called by itself."""
    for outside in (False, True):
        model, reference = ShardedModel(build(), **tight(world_size)), build()
        infer(model)
        assert model.plan.infers
        for its in (model, reference):
            part = its.module if isinstance(its, ShardedModel) else its
            loss = part.layers[2](inputs(rank)).square().mean() if outside else loss_of(its, rank)
            loss.backward()
        assert not model.plan.infers
        infer(model)
        assert not model.plan.infers, "a gradient waits"
        for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None), name
            if theirs.grad is not None:
                grads = gathered(theirs.grad)
                torch.testing.assert_close(ours.grad.clone(), sum(grads) / world_size)
        model.close()


def test_where_everything_fits_the_kinds_of_use_move_and_ask_nothing() -> None:
    """One rank may evaluate by itself, and the traces of passes are kept."""
    model = ShardedModel(build(), **SMALL)
    infer(model)
    assert model.plan.infers
    training = model.plan
    for _ in range(2):
        infer(model)
        assert model.plan is training
    model(inputs(0)).sum().backward()
    assert not model.plan.infers
    infer(model)
    assert not model.plan.infers
    assert not model.chunk_manager.memory.transfer.bytes_by_link
    frozen = ShardedModel(build().requires_grad_(False), **SMALL)
    infer(frozen)
    assert not frozen.plan.demand.gradient_slot_bytes[0]


def test_weights_that_are_gathered_with_gradients_on_begin_training_and_else_their_graph_is_refused() -> None:
    """What is gathered cannot move any more."""
    model = ShardedModel(build(), **tight(1))
    layer = model.module.layers[1]
    infer(model)
    with torch.no_grad(), GatheredParameters(layer):
        with torch.enable_grad():
            loss = torch.nn.functional.linear(inputs(0), layer.weight).sum()
        with pytest.raises(GeminiError, match=r"only inferred so far.*make the optimizer before"):
            loss.backward()
    assert model.plan.infers
    with GatheredParameters(layer):
        torch.nn.functional.linear(inputs(0), layer.weight).sum().backward()
    assert not model.plan.infers
    assert layer.weight.grad is not None


def refusing(number: int) -> Any:
    """The device has no memory for one of the regions that are taken."""
    takes, allocate = [], EmulatedTier._allocate

    def _allocate(tier: EmulatedTier, num_bytes: int, kind: str) -> Tensor:
        takes.append(kind)
        if len(takes) == number:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 KiB")
        return allocate(tier, num_bytes, kind)

    return mock.patch.object(EmulatedTier, "_allocate", _allocate)


@on_ranks(1, 2)
def test_a_model_that_finds_no_memory_for_inference_infers_with_the_plan_that_it_has(
    rank: int, world_size: int
) -> None:
    """The last rank alone: all stay, with the bits that they had."""
    model, wanted = ShardedModel(build(), **tight(world_size)), infer(build())
    at_first = model.plan.placement
    with refusing(2 if rank == world_size - 1 else 1000):
        assert torch.equal(infer(model), wanted)
    assert model.plan.placement == at_first and not model.plan.infers
    for chunk, homes in zip(model.chunk_manager.chunks, at_first.homes, strict=True):
        assert chunk.homes[Kind.PARAM].tier is homes[Kind.PARAM]
    assert torch.equal(infer(model), wanted)
    assert_same(weights_of(model), weights_of(build()))
    losses = train_while(model, ShardedOptimizer(model, adam(model.parameters())), rank, steps=2)
    at_once = ShardedModel(build(), **tight(world_size))
    assert losses == train_while(at_once, ShardedOptimizer(at_once, adam(at_once.parameters())), rank, steps=2)
