"""Several ranks: the bits of plain PyTorch's sum in rank order, and of every other way to place and shard.

FEATURES' "Equal" allows a tolerance at several ranks; we compare bits, as each rank's plain gradients are added here
in the order that the ranks' exchange has. Only sums that a reentrant checkpoint brings in several pieces differ.
"""

import dataclasses
from typing import Any

import pytest
import torch

from tests.dist.parity_cases import train, train_many
from tests.harness.on_ranks import in_soak
from tests.harness.pairwise import all_pairs
from tests.harness.ranks import RankPool
from tests.harness.reference import Recipe, train_plain
from tests.harness.runs import Run, assert_equal_runs, wanted_on
from tests.harness.sharded import smallest_budget
from tests.zoo.models import MODELS, ModelCase

LATE = "checkpoint_shared_reentrant"  # its gradients arrive in four pieces, each reduced by itself
NAMES = [name for name in MODELS if name != "mixed_dtypes"]


def check(case: ModelCase, results: list[tuple[Run, dict[str, Any]]], bits: bool, steps: int, **options: Any) -> None:
    wanted = train_plain(case, steps, len(results), **options)
    for rank, (run, facts) in enumerate(results):
        assert_equal_runs(run, wanted_on(rank, wanted), bits=bits)
        assert facts["budget_bytes"] is None or facts["peak_bytes"] <= facts["budget_bytes"]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_at_the_smallest_slots_equal_plain(ranks: RankPool, name: str) -> None:
    case = MODELS[name]
    results = ranks(2).run(train, name, {"steps": 3}, {"model_data_memory": "smallest"})
    check(case, results, bits=name != LATE, steps=3)
    if "big" in case.tags:
        assert results[0][1]["num_evictions"] > 0


ON_MORE_RANKS = {
    3: ["llama_checkpoint", "odd_shapes"],
    4: ["gpt2", "t5", "nested", "experts", "odd_shapes", "zero_size"],
}


@pytest.mark.parametrize("world_size", [3, *in_soak(4)])
def test_three_and_four_ranks_equal_plain(ranks: RankPool, world_size: int) -> None:
    equal_plain(ranks, world_size, ON_MORE_RANKS[world_size])


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [3, 4])
def test_more_ranks_equal_plain_with_every_model(ranks: RankPool, world_size: int) -> None:
    equal_plain(ranks, world_size, [name for name in NAMES if name != LATE])


def equal_plain(ranks: RankPool, world_size: int, names: list[str]) -> None:
    jobs = [(name, {"steps": 3}, {"model_data_memory": "smallest"}) for name in names]
    results = ranks(world_size).run(train_many, jobs, timeout_s=60 + 15 * len(names))
    for place, name in enumerate(names):
        check(MODELS[name], [of_rank[place] for of_rank in results], bits=True, steps=3)


COMBINATIONS = all_pairs(
    {
        "name": ["gpt2", "bert", "vit", "mixtral", "nested", "borrowed", "sometimes_unused", "experts"],
        "policy": ["auto", "cpu", "cuda"],
        "strategy": ["tensor", "bucket", "chunk"],
        "stage": [0, 1, 2, 3],
        "dtype": [None, torch.bfloat16],
        "accumulation": [1, 2],
        "clip": [None, 0.05],
    }
)


def check_pairs(ranks: RankPool, world_size: int, chosen: list[dict[str, Any]], timeout_s: float) -> None:
    """fp32: in bits. bf16: each rank's gradients are bits, their sum is rounded once here and in the reference too."""
    jobs = []
    for c in chosen:
        recipe = {"steps": 3, "dtype": c["dtype"], "accumulation": c["accumulation"], "clip": c["clip"]}
        wrap = {"tensor_placement_policy": c["policy"], "shard_strategy": c["strategy"], "stage": c["stage"]}
        if c["policy"] == "auto":
            wrap["model_data_memory"] = "smallest"
        jobs.append((c["name"], recipe, wrap))
    results = ranks(world_size).run(train_many, jobs, timeout_s=timeout_s)
    for place, (name, recipe, wrap) in enumerate(jobs):
        half = recipe["dtype"] is not None
        options = {k: v for k, v in recipe.items() if k != "steps"}
        if half:
            options["reduce_dtype"] = torch.float32
        try:
            check(MODELS[name], [of_rank[place] for of_rank in results], bits=True, steps=3, **options)
        except AssertionError as error:
            raise AssertionError(f"{name} {recipe} {wrap}: {error}") from None


@pytest.mark.parametrize("world_size", [2, *in_soak(3)])
def test_a_sample_of_options_equals_plain(ranks: RankPool, world_size: int) -> None:
    check_pairs(ranks, world_size, COMBINATIONS[::10] if world_size == 2 else COMBINATIONS[:2], timeout_s=240)


def test_experts_that_only_some_ranks_use_are_added_up_in_rank_order(ranks: RankPool) -> None:
    """With stages that gather nothing in backward, a rank's gradient may come after the others' sum."""
    common = {"name": "experts", "policy": "auto", "strategy": "tensor", "clip": None}
    check_pairs(ranks, 4, [{**common, "stage": 1, "dtype": None, "accumulation": 2}], timeout_s=120)


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_every_pair_of_options_equals_plain(ranks: RankPool, world_size: int) -> None:
    check_pairs(ranks, world_size, COMBINATIONS, timeout_s=1800)


def test_the_smallest_budget_of_a_rank_is_below_that_of_one_rank() -> None:
    """A shard is smaller than the whole: two ranks fit where one does not."""
    case, recipe = MODELS["gpt2"], Recipe()
    assert smallest_budget(case, recipe, tensor_placement_policy="cuda") > smallest_budget(case, recipe)


@pytest.mark.parametrize("world_size", [2, *in_soak(4)])
@pytest.mark.parametrize("name", ["nested", *in_soak("gpt2")])
def test_fp16_on_ranks_equals_plain(ranks: RankPool, world_size: int, name: str) -> None:
    """Each rank's scaled gradients are bits, their fp32 sum is rounded once to fp16, here and in the reference."""
    options: dict[str, Any] = {"dtype": torch.float16, "loss_scale": 2.0**8, "accumulation": 2, "clip": 0.05}
    wrap = {"model_data_memory": "smallest", "read_grads": False}
    results = ranks(world_size).run(train, name, {"steps": 3, **options}, wrap, timeout_s=120)
    plain = train_plain(MODELS[name], 3, world_size, reduce_dtype=torch.float32, **options)
    for rank, (run, _) in enumerate(results):
        wanted = wanted_on(rank, plain)
        assert_equal_runs(run, dataclasses.replace(wanted, grads=None), bits=True)
