"""A model that is made from a config trains as one that is made by hand, on one rank and on two."""

from pathlib import Path
from typing import Any

import pytest
import torch

from gemini import HybridAdam, ShardedModel, ShardedOptimizer, TensorShardStrategy, state_hash
from gemini.engine.config import Config, load_config
from gemini.engine.config.read import parse_json
from gemini.placement.policies import OptimizerOnHostPolicy
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import CHUNK_NUMEL, build, loss_of

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
BY_HAND: dict[str, dict[str, Any]] = {
    "zero3": {"dtype": torch.float16},
    "zero3_offload_optimizer": {"tensor_placement_policy": OptimizerOnHostPolicy()},
    "colossal": {
        "shard_strategy": TensorShardStrategy(),
        "tensor_placement_policy": "cuda",
        "dtype": torch.float16,
        "reuse_fp16_shard": True,
    },
}


def config_of(name: str) -> Config:
    """A config of a library's documentation, without the dots that stand for the user's own keys."""
    if name == "colossal":
        return load_config(CONFIGS / "colossal.py")
    text = (CONFIGS / f"{name}.json").read_text().replace("    ...\n", "")
    return load_config(parse_json(text))


def trained(model: ShardedModel, optimizer: ShardedOptimizer, dtype: torch.dtype | None) -> tuple[list[float], str]:
    losses = []
    for step in range(6):
        loss = loss_of(model, step, dtype)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, state_hash(model, optimizer)


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("ignore:step . skipped")
@pytest.mark.parametrize("name", BY_HAND)
def test_a_config_trains_as_the_same_settings_by_hand(rank: int, world_size: int, name: str) -> None:
    config = config_of(name)
    model = ShardedModel(build(), settings=config.settings(), chunk_size=CHUNK_NUMEL, device="emulated")
    inner = config.optimizer.make(model.parameters()) if config.optimizer else HybridAdam(model.parameters(), lr=0.01)
    losses, digest = trained(model, ShardedOptimizer(model, inner, **config.optimizer_options()), config.dtype)

    arguments: dict[str, Any] = {"stage": 3, "chunk_size": CHUNK_NUMEL, "device": "emulated", **BY_HAND[name]}
    by_hand = ShardedModel(build(), **arguments)
    adam: dict[str, Any] = {"lr": 0.01}
    if name == "zero3":
        adam = {"lr": 0.001, "betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 3e-7}
    scaling: dict[str, Any] = {"initial_scale": 2**5, "clip_grad_norm": 1.0} if name == "colossal" else {}
    optimizer = ShardedOptimizer(by_hand, HybridAdam(by_hand.parameters(), **adam), **scaling)
    assert (losses, digest) == trained(by_hand, optimizer, arguments.get("dtype"))
    assert losses[-1] < losses[0], "it was trained"
