"""What stays gathered: small parameters by DeepSpeed's persistence thresholds, and a hard bound on what is live."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from gemini import (
    BudgetError,
    Kind,
    Settings,
    ShardedModel,
    ShardedOptimizer,
    Tier,
    estimate_memory,
    plan_model,
    specs_of,
)
from gemini.engine.config import load_config
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, WIDTH, adam, build, layer_of, loss_of, train_while
from tests.zoo.models import MODELS

BIASES = {"param_persistence_threshold": WIDTH + 1}
OPTIONS: dict[str, dict[str, Any]] = {
    "cpu": {"tensor_placement_policy": "cpu"},
    "cpu, 16 bits": {"tensor_placement_policy": "cpu", "dtype": torch.bfloat16, "reuse_fp16_shard": True},
    "stage 2": {"tensor_placement_policy": "cpu", "stage": 2},
    "parameters offloaded": {"tensor_placement_policy": "static", "offload_param_frac": 1.0},
    "by tensor": {"shard_strategy": "tensor", "tensor_placement_policy": "cpu"},
}


def trainer(**options: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(build(), **{"device": "emulated", "chunk_size": CHUNK_NUMEL, **options})
    return model, ShardedOptimizer(model, adam(model.parameters()))


def train(rank: int, **options: Any) -> tuple[list[float], int]:
    return train_while(*trainer(**options), rank, steps=4, dtype=options.get("dtype"))


def names_of(model: ShardedModel, chunks: set[int]) -> set[str]:
    return {managed.name for index in chunks for managed in model.chunk_manager.chunks[index].parameters}


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("options", OPTIONS)
def test_parameters_below_the_threshold_are_never_fetched(rank: int, world_size: int, options: str) -> None:
    """They are whole on the device of every rank, between steps too; all others come from the host. No bit differs."""
    model, optimizer = trainer(**OPTIONS[options], **BIASES)
    fetched: set[int] = set()
    model.observer.listen(lambda move: fetched.add(move.chunk) if move.what in ("fetch", "prefetch") else None)
    shown: list[Tensor] = []

    def between(step: int, model: ShardedModel) -> None:
        home = model.chunk_manager.chunks[small[0]].homes[Kind.PARAM]
        assert (home.tier, home.numel) == (Tier.DEVICE, model.chunk_manager.chunks[small[0]].numel)
        shown.append(layer_of(model, 0).bias.detach().clone())

    small = [index for index, chunk in enumerate(model.plan.packing.chunks) if chunk.persists]
    assert names_of(model, set(small)) == {f"layers.{layer}.bias" for layer in range(LAYERS)}
    dtype = OPTIONS[options].get("dtype")
    found = train_while(model, optimizer, rank, between, steps=4, dtype=dtype)
    assert found == train(rank, **OPTIONS[options])
    assert names_of(model, fetched) == {f"layers.{layer}.weight" for layer in range(LAYERS)}
    assert not torch.equal(shown[0], shown[-1]), "they are trained"


@on_ranks(2)
def test_a_small_parameter_costs_one_gather_an_update_and_no_slot(rank: int, world_size: int) -> None:
    """At stage 3 all parameters travel for forward and backward; those that persist once, after the step."""
    options = {"shard_strategy": "bucket", "tensor_placement_policy": "cpu", "chunk_size": 2 * CHUNK_NUMEL}
    counts = []
    for threshold in (0, WIDTH + 1):
        model, optimizer = trainer(**options, param_persistence_threshold=threshold)
        calls = model.chunk_manager.communicator.collectives.calls
        for step in range(2):
            before = calls["all_gather"]
            loss_of(model, step).backward()
            forward_and_backward = calls["all_gather"] - before
            optimizer.step()
        small = sum(chunk.persists for chunk in model.plan.packing.chunks)
        counts.append((small > 0, calls["all_gather"] - before - forward_and_backward == small))
        model.close()
    assert counts == [(False, True), (True, True)]


@on_ranks(1, 2)
def test_the_threshold_of_the_model_bounds_what_persists(rank: int, world_size: int) -> None:
    """In order of first use: two biases fit, and later ones would pass the bound."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": WIDTH + 1, "offload_param": {"device": "cpu"}}
    settings = load_config(
        {"zero_optimization": {**zero, "stage3_model_persistence_threshold": 3 * WIDTH - 1}}
    ).settings()
    model, optimizer = trainer(settings=settings)
    small = {index for index, chunk in enumerate(model.plan.packing.chunks) if chunk.persists}
    assert names_of(model, small) == {"layers.0.bias", "layers.1.bias"}
    assert train_while(model, optimizer, rank, steps=2) == train_while(*trainer(), rank, steps=2)


def test_all_parameters_may_persist_and_leave_between_steps() -> None:
    """Above all of them: no slot is needed, and `offload_states()` takes them off the device all the same."""
    everything = {"tensor_placement_policy": "cpu", "param_persistence_threshold": 10**6}
    model, optimizer = trainer(**everything)
    assert model.plan.placement.num_slots == (0, 0)

    def between(step: int, model: ShardedModel) -> None:
        if step == 1:
            model.offload_states()
            assert not model.chunk_manager.memory.device.ledger.total_bytes
            layer_of(model, 0).weight.norm().item()  # which takes slots

    assert train_while(model, optimizer, 0, between, steps=4) == train(0, tensor_placement_policy="cpu")


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("policy", ["auto", "cpu"])
def test_no_more_elements_are_live_than_allowed(rank: int, world_size: int, policy: str) -> None:
    """Three chunks' worth, though the budget has room for all: counted over the memory of slots at every move."""
    most = 3 * CHUNK_NUMEL
    model, optimizer = trainer(tensor_placement_policy=policy, max_live_parameters=most)
    live: list[int] = []

    def count(move: object) -> None:
        params = model.chunk_manager.params
        held = [slot.num_bytes for pool in params.slots.pools for slot in pool.slots]
        held += [chunk.payload_bytes for chunk in model.chunk_manager.chunks if chunk.own_slot is not None]
        live.append(sum(held) // 4)

    model.observer.listen(count)
    found = train_while(model, optimizer, rank, steps=4)
    assert max(live, default=0) == (most if policy == "cpu" or world_size > 1 else 0)
    assert found == train(rank, tensor_placement_policy=policy)


@on_ranks(2)
def test_a_bound_below_the_minimum_is_refused_with_the_least_that_works(rank: int, world_size: int) -> None:
    words = r"max_live_parameters=1000 is less than the (\d+) elements, paddings included, that the fewest slots"
    for options in ({"chunk_size": CHUNK_NUMEL}, {"chunk_size": None}):
        with pytest.raises(BudgetError, match=words) as refused:
            trainer(**options, max_live_parameters=1000)
        least = refused.value.needed_numel
        assert least == 2 * CHUNK_NUMEL, "two slots: the search finds no smaller chunk that holds a layer"
        trainer(**options, max_live_parameters=least)[0].close()
        with pytest.raises(BudgetError, match=f"max_live_parameters={least - 1} is less than the {least} elements"):
            trainer(**options, max_live_parameters=least - 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_least_budget_that_a_bounded_plan_tells_is_accepted(world_size: int) -> None:
    """Of chunk sizes whose fewest slots hold more than the bound allows, none is told."""
    numbers = []
    for name in ("frozen", "nested", "gpt2"):
        module = MODELS[name].build(None)
        spec = specs_of(module, Settings(), world_size)
        total = sum(weight.numel for weight in spec.weights)
        for share in (0.2, 0.3, 0.45, 0.9):
            settings = Settings(max_live_parameters=int(total * share))
            try:
                least = plan_model(spec, settings, world_size).minimum_bytes
            except BudgetError:
                continue  # not even with all the memory
            if least is not None:
                numbers.append(plan_model(spec, replace(settings, model_data_memory=least), world_size).device_bytes)
                assert numbers[-1] <= least
    assert len(numbers) >= 4


@pytest.mark.parametrize("name", ["param_persistence_threshold", "model_persistence_threshold", "max_live_parameters"])
@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), (1.5, TypeError), ("many", TypeError)])
def test_a_bad_number_of_elements_is_named(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"^{name} must be a number of elements, of at least 0, found "):
        estimate_memory(build(), **{name: value})
