"""Parameters of no elements, of none or odd dimensions, of several dtypes; and buffers."""

import torch
from torch import Tensor, nn

from tests.zoo.awkward.embedded import VOCAB, Embedded, H, linears, mean_logsumexp


class ZeroSize(Embedded):
    """Parameters of no elements, one of them used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(H, H)
        self.empty = nn.Parameter(torch.empty(0, H))
        self.also_empty = nn.Parameter(torch.empty(3, 0, 2))

    def body(self, h: Tensor, step: int) -> Tensor:
        h = torch.tanh(self.layer(h))
        return h + self.empty.sum() + self.also_empty.sum()


class Scalar(Embedded):
    """0-dimensional parameters: a temperature on the root, a gate on an operator."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.layers = linears(3)
        self.layers[1].gate = nn.Parameter(torch.tensor(1.3))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h * self.temperature * self.layers[1].gate


class OddShapes(nn.Module):
    """No dimension is a multiple of anything; one weight is not contiguous when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(251, 31)
        self.first = nn.Linear(31, 17)
        self.second = nn.Linear(17, 53, bias=False)
        self.cube = nn.Parameter(torch.randn(3, 5, 7) / 5)
        self.third = nn.Linear(53, 29)
        self.turned = nn.Parameter(torch.randn(13, 29).t())

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        h = self.third(torch.tanh(self.second(torch.tanh(self.first(self.embed(tokens % 251))))))
        return mean_logsumexp(torch.tanh(h) @ self.turned) * self.cube.tanh().square().sum()


class MixedDtypes(nn.Module):
    """fp32, bf16 and fp64 parameters side by side; activations are cast on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.low = nn.Linear(H, H, dtype=torch.bfloat16)
        self.middle = nn.Linear(H, H)
        self.high = nn.Linear(H, H, dtype=torch.float64)
        self.low_again = nn.Linear(H, H, dtype=torch.bfloat16)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        h = self.embed(tokens)
        for layer in (self.low, self.middle, self.high, self.low_again):
            h = torch.tanh(layer(h.to(layer.weight.dtype)))
        return mean_logsumexp(h.float())


class BatchNorm(Embedded):
    """Buffers, floating and integer, that change in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.norms = nn.ModuleList(nn.BatchNorm1d(H) for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = torch.tanh(norm(layer(h).transpose(1, 2)).transpose(1, 2))
        return h
