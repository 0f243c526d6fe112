"""Gradients of weights that are larger than a chunk are exchanged in tiles where the device has no room for more.

Tiles have half a GiB of scratch, which no model of a test needs: here they have a few KiB.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from gemini import BudgetError, estimate_memory
from gemini.placement import needs as scratch
from gemini.placement.plan import Plan
from gemini.placement.planning import replan
from gemini.placement.policies import next_better, next_worse
from gemini.placement.predict import predict
from gemini.placement.simulate import Exchange
from gemini.runtime import reduce
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.harness.predicted import Case, differences, run
from tests.harness.reference import Recipe, train_plain
from tests.harness.runs import assert_equal_runs, wanted_on
from tests.harness.sharded import train_sharded
from tests.zoo.models import MODELS

BF16 = torch.bfloat16
TRAININGS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("large_embedding", {"stage": 3}, {}),
    ("large_embedding", {"stage": 3, "reuse_fp16_shard": True}, {"dtype": BF16}),
    ("large_embedding", {"stage": 0, "tensor_placement_policy": "cuda"}, {"dtype": BF16, "accumulation": 2}),
    ("odd_shapes", {"stage": 1, "tensor_placement_policy": "cuda"}, {"accumulation": 2}),
    ("odd_shapes", {"stage": 0}, {"dtype": BF16, "accumulate_dtype": torch.float32}),
    ("tied", {"stage": 2, "shard_strategy": "tensor"}, {"dtype": BF16, "reduce_dtype": torch.float32}),
    ("tied", {"stage": 3}, {"dtype": torch.float16, "accumulation": 2, "loss_scale": 8.0}),
]
"""Model, how it is wrapped, and how it is trained."""
PREDICTED = [
    Case("large_embedding", dtype="bf16", reuse=True),
    Case("nested", stage=0, strategy="bucket", reduce="bf16", chunk=None),
    Case("tied", dtype="bf16", policy="cuda", micro=2, accumulate="fp32", chunk=None, prefetch=4),
    Case("llama_checkpoint", stage=2, policy="cpu", micro=2, clip=0.05, chunk=None, prefetch=0),
]


@contextmanager
def tiles_of(kib: int) -> Iterator[None]:
    with mock.patch.object(scratch, "TILED_BYTES", kib * 1024):
        yield


def planned(name: str = "large_embedding", world_size: int = 2, **wrap: Any) -> Plan:
    case = MODELS[name]
    wrap = {"device": "emulated", "host_memory": "4GB", "chunk_size": case.chunk_numel, **wrap}
    return estimate_memory(case.build(), world_size=world_size, **wrap).plan


def num_reductions(plan: Plan) -> int:
    return predict(plan).exchanged[Exchange.REDUCE][0]


@pytest.mark.sampled(3)
@on_ranks_with("place", {2: range(len(TRAININGS))}, soak={3: range(len(TRAININGS))})
def test_tiles_change_no_bit(rank: int, world_size: int, place: int) -> None:
    tiles_change_no_bit(rank, world_size, *TRAININGS[place])


@on_ranks(4)
def test_tiles_change_no_bit_where_there_are_replicas(rank: int, world_size: int) -> None:
    name, wrap, how = TRAININGS[1]
    tiles_change_no_bit(rank, world_size, name, {**wrap, "shard_group_size": 2}, {**how, "shard_group": 2})


def tiles_change_no_bit(rank: int, world_size: int, name: str, wrap: dict[str, Any], how: dict[str, Any]) -> None:
    wanted = wanted_on(rank, train_plain(MODELS[name], world_size=world_size, steps=2, **how))
    given = {key: how[key] for key in ("dtype", "reduce_dtype", "accumulate_dtype") if key in how}
    with tiles_of(4 * world_size):
        least = planned(name, world_size, **wrap, **given).minimum_bytes
        plan = planned(name, world_size, **wrap, **given, model_data_memory=least)
        assert num_reductions(plan) > num_reductions(planned(name, world_size, **wrap, **given))
        recipe = Recipe(steps=2, **how)
        trained, facts = train_sharded(MODELS[name], recipe, rank, **wrap, model_data_memory=least)
    assert least is not None and facts.peak_bytes <= least
    assert_equal_runs(trained, wanted)


@on_ranks_with("training", {2: PREDICTED[:1]}, soak={2: PREDICTED, 3: PREDICTED}, timeout_s=180.0)
def test_every_tile_is_predicted(rank: int, world_size: int, training: Case) -> None:
    with tiles_of(4 * world_size), mock.patch.object(reduce, "reduce_in_tiles", wraps=reduce.reduce_in_tiles) as tiled:
        predicted, measured, said = run(training, rank, world_size)
    assert tiled.called
    assert differences(predicted, measured) == []
    assert not [each for each in said if not each.startswith("step 0")], "a step warned"


def test_tiles_are_for_budgets_that_allow_nothing_else() -> None:
    at_once = planned()
    enough = at_once.minimum_bytes
    assert enough is not None
    with tiles_of(8):
        least = planned().minimum_bytes
        assert num_reductions(planned(model_data_memory=enough)) == num_reductions(at_once)
        below = planned(model_data_memory=enough - 1)
        assert num_reductions(below) > num_reductions(at_once)
        assert least is not None and planned(model_data_memory=least).device_bytes <= least
        assert least == enough - at_once.demand.scratch_bytes + below.demand.scratch_bytes
        with pytest.raises(BudgetError, match=f"needs {least} bytes of model data") as refused:
            planned(model_data_memory=least - 1)
        assert refused.value.needed_bytes == least


def test_ranks_with_other_tiles_have_no_plan_in_common() -> None:
    """They would exchange a gradient in another number of collectives."""
    with tiles_of(16):
        least = planned(tensor_placement_policy="cpu").minimum_bytes
        other = planned(tensor_placement_policy="cpu", model_data_memory=least)
    with tiles_of(12):
        one = planned(tensor_placement_policy="cpu", model_data_memory=least)
    assert one.placement == other.placement
    assert num_reductions(one) > num_reductions(other)
    assert one.hash != other.hash


def test_chunks_of_the_chosen_size_are_exchanged_at_once() -> None:
    """Of a smaller size they need less."""
    at_once = planned("chain", chunk_size=2**20)
    assert not any(chunk.oversize for chunk in at_once.packing.chunks)
    with tiles_of(1):
        assert planned("chain", chunk_size=2**20).minimum_bytes == at_once.minimum_bytes


def test_a_plan_says_when_it_exchanges_in_tiles_and_what_would_end_it() -> None:
    whole_least = planned().packed_minimum_bytes
    with tiles_of(8):
        least = planned().minimum_bytes
        assert least is not None
        plan = planned(model_data_memory=least)
        whole = plan.demand.at_once().scratch_bytes
        assert f"no room for the {whole} bytes" in plan.explain()
        assert "in tiles" not in planned().explain()

        def at(budget_bytes: int) -> Plan:
            return replan(plan, plan.trained, {}, budget=replace(plan.budget, device=budget_bytes))

        # each change on the way up is the next one, until exchanges are made at once
        while plan.demand.whole_scratch_bytes is not None:
            better = next_better(plan.demand, plan.placement, plan.budget_bytes or 0, plan.settings.policy)
            assert better is not None
            plan = at(better.budget_bytes)
            assert (plan.demand, plan.placement) == (better.demand, better.placement)
        assert plan.budget_bytes == whole_least
        worse = next_worse(plan.demand, plan.placement, plan.settings.policy)
        assert worse is not None
        assert at(plan.device_bytes - 1).demand == worse.demand != plan.demand
        assert "With less, " in plan.explain()
        assert "gradients of the largest weights would be exchanged in tiles" in plan.explain()
