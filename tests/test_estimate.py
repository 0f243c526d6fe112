"""The estimator against the textbook's table, and against the ledger, byte for byte."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from gemini import BudgetError, ShardedModel, ShardedOptimizer, Tier, estimate_memory
from tests.harness.ledger import WRAPS, assert_equals_ledger
from tests.zoo import mlp


def seven_billion() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(10_000, 10_000, bias=False) for _ in range(70)))


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 112), (1, 63), (2, 38.5), (3, 14)])
def test_the_table_of_zero(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1, in fp32: 16, 4 + 4 + 8/8, 4 + 12/8 and 16/8 bytes a parameter."""
    found = estimate_memory(seven_billion(), world_size=8, stage=stage)
    assert found.num_parameters == 7 * 10**9
    assert found.state_bytes / 1e9 == pytest.approx(gigabytes, rel=1e-3)  # paddings


@pytest.mark.parametrize("wrap", WRAPS, ids=str)
def test_the_estimate_is_what_one_rank_takes(wrap: dict[str, Any]) -> None:
    assert_equals_ledger(wrap, 1)


def test_the_estimate_knows_budgets_and_strategies() -> None:
    wrap: dict[str, Any] = {"chunk_size": mlp.CHUNK_NUMEL, "shard_strategy": "tensor"}
    wrap["model_data_memory"] = mlp.smallest_budget(**wrap)
    assert_equals_ledger(wrap, 1)
    with pytest.raises(BudgetError, match="needs"):
        estimate_memory(mlp.build(), model_data_memory=wrap.pop("model_data_memory") - 1, **wrap)


def test_a_hugging_face_config_is_enough() -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=256, n_positions=32)
    model = transformers.GPT2LMHeadModel(config)
    for known in (config, transformers.GPT2Config(**config.to_dict() | {"architectures": ["GPT2LMHeadModel"]})):
        found = estimate_memory(known, world_size=4, dtype=torch.bfloat16)
        assert found == estimate_memory(model, world_size=4, dtype=torch.bfloat16)
        assert found.num_parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_are_tied_by_their_memory_count_once(device: str) -> None:
    with torch.device(device):
        by_memory, by_name, apart = (nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(3))
    by_memory[1].weight.data = by_memory[0].weight.data
    by_name[1].weight = by_name[0].weight
    found = estimate_memory(by_memory)
    assert found.num_parameters == 64 + 2 * 8
    assert found == estimate_memory(by_name)
    assert by_memory[1].weight is not by_memory[0].weight
    assert estimate_memory(apart).num_parameters == 2 * 64 + 2 * 8


@pytest.mark.parametrize("policy", ["auto", "cuda"])
@pytest.mark.parametrize("budget", [None, 30000])
@pytest.mark.parametrize(("states", "momentum"), [(0, 0.0), (1, 0.9)])
def test_the_estimate_of_another_optimizer_is_what_one_rank_takes(
    states: int, momentum: float, budget: int | None, policy: str
) -> None:
    """With the policy "cuda" a budget has no room for Adam's states, so the first plan is one for inference."""
    wrap: dict[str, Any] = {"chunk_size": mlp.CHUNK_NUMEL, "tensor_placement_policy": policy}
    if budget is not None and policy == "cuda":
        budget = (2 + states) * 4 * mlp.LAYERS * mlp.CHUNK_NUMEL
    wrap["model_data_memory"] = budget
    found = estimate_memory(mlp.build(), optim_states=states, **wrap)
    model = ShardedModel(mlp.build(), device="emulated", **wrap)
    ShardedOptimizer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum))
    assert (found.device, found.host) == (
        model.plan.placement.bytes_by_kind(model.plan.demand, Tier.DEVICE),
        model.plan.placement.bytes_by_kind(model.plan.demand, Tier.HOST),
    )
    assert found.device["optim"] + found.host["optim"] == states * 4 * mlp.LAYERS * mlp.CHUNK_NUMEL
    model.close()


def test_bad_questions_are_refused() -> None:
    with pytest.raises(TypeError, match="a torch module or a Hugging Face config, found str"):
        estimate_memory("gpt2")
    for bad in (0, True, 2.5):
        with pytest.raises(ValueError, match="world_size must be an integer"):
            estimate_memory(mlp.build(), world_size=bad)  # type: ignore[arg-type]
    for bad in (-1, True, 1.0):
        with pytest.raises(ValueError, match="optim_states must be an integer of at least 0"):
            estimate_memory(mlp.build(), optim_states=bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stage must be 0, 1, 2 or 3"):
        estimate_memory(mlp.build(), stage=4)
