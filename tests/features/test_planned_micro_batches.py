"""Micro-batches of a step: their sums are in the plan, and its bytes, where their number is told or was learnt."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import gemini
from gemini import Kind, Plan, Settings, ShardedModel, ShardedOptimizer, Tier, estimate_memory, state_hash
from tests.harness.on_ranks import on_ranks
from tests.harness.told import told
from tests.zoo.mlp import CHUNK_NUMEL, LAYERS, adam, build, loss_of, minimum_bytes, train_while

OPTIONS: dict[str, dict[str, Any]] = {
    "auto": {},
    "cpu": {"tensor_placement_policy": "cpu"},
    "stage 1": {"stage": 1},
    "stage 1 by tensor": {"stage": 1, "shard_strategy": "tensor"},
    "stage 0": {"stage": 0},
    "tight": {"model_data_memory": "tight"},
    "fp16 that is reused": {"dtype": torch.float16, "reuse_fp16_shard": True},
}


def wrap(options: str, world_size: int, **more: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    its = {"dtype": torch.bfloat16, "chunk_size": CHUNK_NUMEL, "device": "emulated", **OPTIONS[options], **more}
    if its.get("model_data_memory") == "tight":
        del its["model_data_memory"]
        its["model_data_memory"] = minimum_bytes(build(), **its) + 6 * CHUNK_NUMEL
    model = ShardedModel(build(), **its)
    return model, ShardedOptimizer(model, adam(model.parameters()))


def train_step(
    model: ShardedModel, optimizer: ShardedOptimizer, seed: int, micro_batches: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[float], Plan]:
    """The losses, and the plan that was in force."""
    losses = []
    for micro in range(micro_batches):
        loss = loss_of(model, seed + 2 * micro, dtype)
        optimizer.backward(loss)
        losses.append(float(loss.detach()))
    optimizer.step()
    return losses, model.plan


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:step .* skipped", "ignore:reuse_fp16_shard=True")
@pytest.mark.parametrize("options", OPTIONS)
def test_a_plan_that_knows_of_micro_batches_holds_their_sums(rank: int, world_size: int, options: str) -> None:
    """No memory is taken beside the plan, which says where all of it is; and no bit differs."""
    found = []
    for micro_batches in (1, 2):
        model, optimizer = wrap(options, world_size, gradient_accumulation_steps=micro_batches)
        tiers = model.chunk_manager.memory.tiers
        dtype = OPTIONS[options].get("dtype", torch.bfloat16)
        held = []

        def between(step: int, model: ShardedModel, tiers: Any = tiers, held: list[tuple[int, ...]] = held) -> None:
            held.append(tuple(tier.ledger.peak_by_kind[Kind.GRAD] for tier in tiers))

        found.append(train_while(model, optimizer, rank, between, steps=4, dtype=dtype))
        plan, both = model.plan, (Tier.DEVICE, Tier.HOST)
        planned = [plan.placement.bytes_by_kind(plan.demand, tier)[Kind.GRAD] for tier in both]
        if micro_batches == 2:
            assert held[0] == held[-1] == tuple(planned), "a step with two micro-batches takes none"
        elif options != "fp16 that is reused":
            assert sum(held[-1]) > sum(planned)
    assert found[0] == found[1]


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:step .* skipped", "ignore:reuse_fp16_shard=True")
@pytest.mark.parametrize("options", OPTIONS)
def test_a_plan_learns_how_many_micro_batches_steps_have(rank: int, world_size: int, options: str) -> None:
    """After two steps it is the plan of a model that was told, with the same homes; and no bit differs."""
    found, plans = [], []
    for micro_batches in (None, 2):
        model, optimizer = wrap(options, world_size, gradient_accumulation_steps=micro_batches)
        its = [
            train_step(model, optimizer, 10 * step + rank, 2, OPTIONS[options].get("dtype", torch.bfloat16))
            for step in range(5)
        ]
        found.append(([losses for losses, _ in its], state_hash(model, optimizer)))
        plans.append([plan for _, plan in its])
        model.close()
    assert [plan.demand.micro_batches for plan in plans[0]] == [1, 1, 2, 2, 2]
    learnt, told = plans[0][-1], plans[1][0]
    assert replace(learnt.demand, max_host_bytes=told.demand.max_host_bytes) == told.demand, "but for a live reading"
    assert learnt.placement == told.placement
    assert found[0] == found[1]


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("number", [None, 1])
def test_a_number_that_was_told_is_not_learnt(rank: int, world_size: int, number: int | None) -> None:
    """Nor one that changes with every step."""
    model, optimizer = wrap("auto", world_size, gradient_accumulation_steps=number)
    for step, micro_batches in enumerate([1, 2, 3, 1, 2] if number is None else [3, 3, 3, 3, 3]):
        train_step(model, optimizer, 10 * step + rank, micro_batches)
    assert model.plan.demand.micro_batches == 1
    assert model.plan.is_first, "no other plan came in force"
    model.close()


def test_the_move_is_told_in_one_line() -> None:
    """Once, although fewer micro-batches follow at the end of an epoch."""
    whole = estimate_memory(build(), chunk_size=CHUNK_NUMEL, dtype=torch.bfloat16).state_bytes
    model, optimizer = wrap("auto", 1, model_data_memory=whole * 9 // 10)
    with told() as lines:
        for step, micro_batches in enumerate([3, 3, 3, 1, 3]):
            train_step(model, optimizer, 10 * step, micro_batches)
    assert len(lines) == 1
    assert lines[0].startswith("rank 0: steps have 3 micro-batches, and the plan was for 1: ")
    assert model.plan.demand.micro_batches == 3


@on_ranks(2, 3)
def test_ranks_that_add_up_other_numbers_plan_alike(rank: int, world_size: int) -> None:
    """Under no_sync() with everything at home no backward is collective: of 1, 2 and 3 the mean is 2."""
    model = ShardedModel(build(), stage=1, dtype=torch.bfloat16, chunk_size=CHUNK_NUMEL, tensor_placement_policy="cuda")
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    for step in range(4):
        with model.no_sync():
            for micro in range(1 + rank % world_size):
                optimizer.backward(loss_of(model, 10 * step + micro + rank, torch.bfloat16))
        optimizer.step()
    assert model.plan.demand.micro_batches == 2
    model.close()


def test_the_sums_are_in_estimates_and_moved_by_policies() -> None:
    """4 bytes a parameter, of which "auto" knows that they take the room of states."""
    one, several = (
        estimate_memory(build(), chunk_size=CHUNK_NUMEL, dtype=torch.bfloat16, gradient_accumulation_steps=number)
        for number in (1, 4)
    )
    assert several.state_bytes - one.state_bytes == 4 * LAYERS * CHUNK_NUMEL
    reused = (
        estimate_memory(
            build(),
            chunk_size=CHUNK_NUMEL,
            dtype=torch.float16,
            reuse_fp16_shard=True,
            gradient_accumulation_steps=number,
        ).state_bytes
        for number in (1, 4)
    )
    assert -next(reused) + next(reused) == (2 + 4) * LAYERS * CHUNK_NUMEL, "parameters are needed again, too"
    for dtype, more in ((None, {}), (torch.bfloat16, {"accumulate_dtype": torch.float32})):
        same = (
            estimate_memory(
                build(), chunk_size=CHUNK_NUMEL, dtype=dtype, gradient_accumulation_steps=number, **more
            ).state_bytes
            for number in (1, 4)
        )
        assert len(set(same)) == 1, "these are added up where they rest"


@on_ranks(1, 2)
def test_an_engine_plans_for_the_micro_batches_of_its_config(rank: int, world_size: int) -> None:
    """Given, or computed of the two other batch sizes."""
    common = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "dtype": "bf16", "optimizer": {"type": "HybridAdam"}}
    for sizes in (
        {"gradient_accumulation_steps": 3},
        {"train_batch_size": 24 * world_size, "train_micro_batch_size_per_gpu": 8},
    ):
        engine, *_ = gemini.initialize(build(), config={**common, **sizes})
        assert engine.model.settings.gradient_accumulation_steps == 3
        memory = engine.model.chunk_manager.memory
        takes = []
        for step in range(6):
            engine.backward(loss_of(engine, step, torch.bfloat16))
            engine.step()
            takes.append(sum(tier.ledger.num_allocations for tier in memory.tiers))
        assert takes[0] == takes[-1], "all is taken with the first micro-batch"
        engine.model.close()


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "2"])
def test_a_bad_number_is_named(value: Any) -> None:
    with pytest.raises(ValueError, match="gradient_accumulation_steps must be a number of at least 1, or None, found"):
        Settings(gradient_accumulation_steps=value)
