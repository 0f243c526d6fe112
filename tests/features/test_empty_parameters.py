"""Parameters without elements, alone in their chunks: every rank trains beside them, saves and loads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, state_hash
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import adam, assert_same, weights_of

OPTIONS: list[dict[str, Any]] = [
    {},
    {"tensor_placement_policy": "cpu"},
    {"chunk_size": 256},
    {"shard_strategy": "tensor", "chunk_size": 256, "tensor_placement_policy": "cpu"},
    {"stage": 1, "shard_strategy": "bucket"},
    {"stage": 0},
    {"dtype": torch.bfloat16},
]


class Table(nn.Module):
    """A table that has no rows yet, beside a layer that is trained or not."""

    def __init__(self, trains_layer: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.rows = nn.Parameter(torch.empty(0, 4))
        self.layer.requires_grad_(trains_layer)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() + self.rows.sum()


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("trains_layer", [True, False])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_ranks_train_beside_parameters_without_elements(
    rank: int, world_size: int, options: dict[str, Any], trains_layer: bool
) -> None:
    plain = Table(trains_layer).to(options.get("dtype"))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    model = ShardedModel(Table(trains_layer), device="emulated", **options)
    optimizer, reference = ShardedOptimizer(model, adam(model.parameters())), adam(plain.parameters())
    for _ in range(2):
        for each, its in ((model, optimizer), (plain, reference)):
            each(torch.ones(2, 4, dtype=options.get("dtype"))).backward()
            its.step()
            its.zero_grad()
    if "dtype" not in options:
        assert_same(weights_of(model), weights_of(plain))
    assert model.state_dict()["rows"].shape == (0, 4)
    hash_ = state_hash(model)
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())
    assert state_hash(model) == hash_
    model.load_state_dict(before)
    assert_same(weights_of(model), before)
    model.close()


@pytest.mark.parametrize("chunk_size", [None, 512])
def test_a_model_without_parameters_is_wrapped(chunk_size: int | None) -> None:
    model = ShardedModel(nn.ReLU(), device="emulated", chunk_size=chunk_size)
    assert torch.equal(model(torch.tensor([-1.0, 1.0])), torch.tensor([0.0, 1.0]))
    assert not model.state_dict()
