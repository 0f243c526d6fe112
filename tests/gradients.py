"""What `.grad` is after backward, on one rank or several, beside a plain model with the mean of all gradients."""

from typing import Any

import torch
from torch import Tensor, nn

import gemini
from gemini import ShardedModel, ShardedOptimizer
from tests import mlp
from tests.mlp import CHUNK_NUMEL, WIDTH, build

STAGES: list[dict[str, Any]] = [
    {"stage": stage, "tensor_placement_policy": policy}
    for stage, policy in ((0, "cuda"), (1, "cpu"), (2, "cuda"), (3, "cuda"), (3, "cpu"))
]
WRAPS: list[dict[str, Any]] = [*STAGES, {"model_data_memory": "smallest"}, {"shard_strategy": "tensor"}]


class Chooses(nn.Module):
    """A leaf: the ranks that `uses` names use its first layer, none uses the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.uses: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return x + torch.tanh(self.first(x)) if rank in self.uses else x + 0


class Branches(mlp.Mlp):
    """Three layers, of which the last is no one's, and a leaf between the first two."""

    def __init__(self) -> None:
        super().__init__(layers=3)
        self.leaf = Chooses()
        gemini.set_leaf_module(self, Chooses)

    def forward(self, x: Tensor) -> Tensor:
        x = self.leaf(x + torch.tanh(self.layers[0](x)))
        return x + torch.tanh(self.layers[1](x))


def wrapped(make: Any, wrap: dict[str, Any]) -> tuple[ShardedModel, ShardedOptimizer]:
    wrap = {"chunk_size": CHUNK_NUMEL, **wrap}
    if wrap.get("model_data_memory") == "smallest":
        del wrap["model_data_memory"]
        wrap["model_data_memory"] = mlp.smallest_budget(make, **wrap)
    model = ShardedModel(build(make), device="emulated", **wrap)
    return model, ShardedOptimizer(model, mlp.adam(model.parameters()))


def names_with_gradient(model: ShardedModel) -> list[str]:
    """Every answer to `.grad is None` is local: ranks that ask in different orders do not meet."""
    names = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
    for name, parameter in model.named_parameters():
        assert (gemini.safe_get_full_grad(parameter) is None) == (name not in names), name
        assert (gemini.safe_get_local_grad(parameter) is None) == (name not in names), name
    return names


def of(*modules: str) -> list[str]:
    return [f"{module}.{name}" for module in modules for name in ("weight", "bias")]


def idle(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    """Who has no gradient on any rank answers None on every rank, whatever its chunk holds."""
    model, optimizer = wrapped(Branches, {"chunk_size": 3 * CHUNK_NUMEL, **wrap})
    net = model.module
    assert names_with_gradient(model) == []
    for step in range(2):
        net.leaf.uses = ()
        mlp.loss_of(model, step).backward()
        assert names_with_gradient(model) == of("layers.0", "layers.1")
        net.leaf.uses = (world_size - 1,)
        mlp.loss_of(model, step).backward()
        assert names_with_gradient(model) == of("layers.0", "layers.1", "leaf.first")
        optimizer.step()
        assert names_with_gradient(model) == []
    net.layers[1].requires_grad_(False)
    mlp.loss_of(model).backward()
    assert names_with_gradient(model) == of("layers.0", "leaf.first")
    net.layers[0].weight.grad = None
    assert names_with_gradient(model) == ["layers.0.bias", *of("leaf.first")]
    optimizer.zero_grad()
    net.layers[1].requires_grad_(True)
    x = mlp.inputs(0).requires_grad_()
    torch.autograd.grad(model(x).square().mean(), x)
    assert names_with_gradient(model) == []
    mlp.loss_of(model).backward()
    assert names_with_gradient(model) == of("layers.0", "layers.1", "leaf.first")
    optimizer.step()
    model.close()
