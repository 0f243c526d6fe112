"""Operators one after the other, small and large, and a model of convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.awkward.embedded import Embedded, H, linears, mean_logsumexp


class Chain(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(28)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return h


class ChainOutputs(Chain):
    """Returns logits: the loss is computed outside."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        return self.head(self.body(self.embed(tokens), step))


class NormedChain(Embedded):
    """Weights and 1-D weights whose values backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(24)
        self.norms = nn.ModuleList(nn.LayerNorm(H) for _ in range(24))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = h + torch.tanh(layer(norm(h)))
        return h


class InputNeedsGrad(nn.Module):
    """The root's input requires a gradient, and nothing is embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H))

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        x = F.one_hot(tokens % H, H).to(self.scale.dtype).requires_grad_()
        h = x * self.scale
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return mean_logsumexp(h)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.second = nn.Conv2d(16, 16, 3, stride=2, bias=False)
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = F.gelu(self.norm(self.first(images)))
        h = F.gelu(self.second(h)).mean((-1, -2))
        return F.cross_entropy(self.head(h), labels)


class LargeEmbedding(Embedded):
    """An embedding larger than a chunk, and a head tied to nothing of the same size."""

    def __init__(self) -> None:
        super().__init__(vocab=1024)
        self.layers = linears(6)
        self.head = nn.Linear(H, 1024, bias=False)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h
