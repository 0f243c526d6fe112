"""Activation checkpointing around operators, blocks and the whole model, reentrant or not."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.zoo.awkward.embedded import Embedded, linears, mean_logsumexp


class Checkpointed(Embedded):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.layers = linears(4)

    def again(self, function: Any, *inputs: Tensor) -> Tensor:
        return checkpoint(function, *inputs, use_reentrant=self.reentrant)


class CheckpointOperator(Checkpointed):
    """Each operator in a region of its own."""

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = self.again(lambda x, layer=layer: torch.tanh(layer(x)), h)
        return h


class CheckpointBlock(Checkpointed):
    """Several operators in one region, between operators outside it."""

    def body(self, h: Tensor, step: int) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.layers[2](torch.tanh(self.layers[1](x)))

        return torch.tanh(self.layers[3](self.again(block, self.layers[0](h))))


class CheckpointAll(Checkpointed):
    """The whole model after the embedding, loss included, in one region."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        def rest(h: Tensor) -> Tensor:
            for layer in self.layers:
                h = torch.tanh(layer(h))
            return mean_logsumexp(self.head(h))

        return self.again(rest, self.embed(tokens))


class CheckpointShared(Checkpointed):
    """One block in four regions: under reentrant checkpointing its parameters get gradients four times."""

    def body(self, h: Tensor, step: int) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return self.layers[1](F.gelu(self.layers[0](x)))

        for _ in range(4):
            h = h + self.again(block, h)
        return self.layers[3](torch.tanh(self.layers[2](h)))
