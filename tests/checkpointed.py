"""One model, checkpointed in every way that torch has, around functions that use parameters of every kind.

The parameters of a checkpointed function may be the module's own, an operator's inside the region, and an operator's
whose call is over, so that a weight is a plain parameter in forward and fetches itself in the recomputation, or both.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.zoo.mlp import WIDTH, inputs

aten = torch.ops.aten
SELECTIVE: dict[str, tuple[Any, ...]] = {  # whose results are kept
    "keep products": (aten.mm.default, aten.addmm.default),
    "keep elementwise": (aten.tanh.default, aten.mul.Tensor, aten.add.Tensor),
    "keep copies": (aten.copy_.default, aten.clone.default, aten.empty.memory_format, aten.as_strided.default),
}
WAYS = ["own parameters", "without early stop", "nested", "composable", "composable operator", *SELECTIVE]


def _policy(kept: tuple[Any, ...], context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in kept else CheckpointPolicy.PREFER_RECOMPUTE


def keeping(kept: tuple[Any, ...]) -> Callable[[], Any]:
    """A `context_fn` for a selective checkpoint."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, kept))


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def inner(self, x: Tensor) -> Tensor:
        y = x * self.scale
        for layer in self.layers:
            y = torch.tanh(layer(y))
        for layer in reversed(self.layers):
            y = torch.tanh(F.linear(y, layer.weight))
        if self.way == "nested":
            y = checkpoint(self.product, y, use_reentrant=False)
        else:
            y = self.product(y)
        return x + self.layers[0](y) * self.scale

    def product(self, y: Tensor) -> Tensor:
        return torch.tanh(F.linear(y @ self.weight, self.layers[2].weight))

    def forward(self, x: Tensor) -> Tensor:
        if self.way in ("none", "composable", "composable operator"):
            return self.inner(x)
        if self.way in SELECTIVE:
            return checkpoint(  # type: ignore[no-any-return]
                self.inner, x, use_reentrant=False, context_fn=keeping(SELECTIVE[self.way])
            )
        early_stop = self.way != "without early stop"
        return checkpoint(self.inner, x, use_reentrant=False, early_stop=early_stop)  # type: ignore[no-any-return]


class Net(nn.Module):
    """`way`: how its blocks are checkpointed; "none" for not at all."""

    def __init__(self, way: str, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(blocks))
        if way == "composable":
            self.checkpoint_blocks()
        elif way == "composable operator":
            for block in self.blocks:
                for layer in block.layers:
                    composable_checkpoint(layer)

    def checkpoint_blocks(self) -> None:
        for block in self.blocks:
            composable_checkpoint(block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, step: int = 0, rank: int = 0) -> Tensor:
    x = inputs(step + 10 * rank)
    return (model(x) - x.flip(-1)).square().mean()


def train(model: nn.Module, optimizer: Any, steps: int = 3, rank: int = 0) -> None:
    for step in range(steps):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
