"""fp32 values that come into 16-bit weights in every way there is: the masters are those values, whatever the way."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, state_hash
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp


def _load(model: ShardedModel, values: dict[str, Tensor]) -> None:
    model.load_state_dict(values)


def _load_inside(model: ShardedModel, values: dict[str, Tensor]) -> None:
    model.module.load_state_dict(values)


def _load_a_part(model: ShardedModel, values: dict[str, Tensor]) -> None:
    for number, layer in enumerate(model.module.layers):  # type: ignore[arg-type, union-attr]
        layer.load_state_dict({end: values[f"layers.{number}.{end}"] for end in ("weight", "bias")})


def _load_beside(model: ShardedModel, values: dict[str, Tensor]) -> None:
    whole = nn.ModuleDict({"trunk": model})
    whole.load_state_dict({f"trunk.{name}": value for name, value in values.items()})


@torch.no_grad()
def _copy(model: ShardedModel, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(values[name])


def _copy_data(model: ShardedModel, values: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.data.copy_(values[name], non_blocking=True)


WAYS: list[Callable[[ShardedModel, dict[str, Tensor]], None]] = [
    *(_load, _load_inside, _load_a_part, _load_beside, _copy, _copy_data)
]

AT_STAGES: list[dict[str, Any]] = [{"stage": stage, "dtype": torch.bfloat16} for stage in (0, 2, 3)]
OFFLOADED: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16, "tensor_placement_policy": "cpu"},
    {"dtype": torch.float16, "tensor_placement_policy": "cpu", "reuse_fp16_shard": True},
]


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", [*AT_STAGES, *OFFLOADED], ids=str)
def test_fp32_values_reach_the_masters_unrounded(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """After a step, so that masters and moments are not what they were made as; and the next step goes on from them."""
    hashes = set()
    for way in WAYS:
        model = ShardedModel(mlp.build(), device="emulated", chunk_size=mlp.CHUNK_NUMEL, **wrap)
        optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()), initial_scale=4.0)
        for step in range(2):
            values = {
                name: torch.randn(value.shape, generator=torch.Generator().manual_seed(place))
                for place, (name, value) in enumerate(mlp.build().state_dict().items())
            }
            if step:
                way(model, values)
                masters = optimizer.state_dict()["masters"]
                assert all(torch.equal(masters[n], value) for n, value in enumerate(values.values())), way.__name__
            optimizer.backward(mlp.loss_of(model, step, wrap["dtype"]))
            optimizer.step()
        hashes.add(state_hash(model, optimizer))
        model.close()
    assert len(hashes) == 1
