"""Activation checkpointing on several ranks, against the same sharded model without it."""

from functools import partial
from typing import Any

import torch

from gemini import ShardedModel, ShardedOptimizer
from tests import mlp
from tests.checkpointed import Net, train
from tests.mlp import CHUNK_NUMEL, assert_same, build, weights_of


def trained(rank: int, way: str, **wrap: Any) -> dict[str, torch.Tensor]:
    make = partial(Net, way)
    if wrap.get("model_data_memory") == "smallest":
        del wrap["model_data_memory"]
        wrap["model_data_memory"] = mlp.smallest_budget(make, chunk_size=CHUNK_NUMEL, **wrap)
    model = ShardedModel(build(make), device="emulated", chunk_size=CHUNK_NUMEL, **wrap)
    train(model, ShardedOptimizer(model, mlp.adam(model.parameters())), 3, rank)
    weights = weights_of(model)
    model.close()
    return weights


def same_as_without(rank: int, world_size: int, ways: tuple[str, ...], wrap: dict[str, Any]) -> None:
    """Gradients are equal, and their order over ranks is: so are the weights after three steps."""
    wanted = trained(rank, "none", **wrap)
    for way in ways:
        try:
            assert_same(trained(rank, way, **wrap), wanted)
        except AssertionError as error:
            raise AssertionError(f"{way}: {error}") from error
