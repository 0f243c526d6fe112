"""Parameters that are reused, tied, borrowed, frozen, or used in some steps or never."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.awkward.chains import Chain
from tests.zoo.awkward.embedded import VOCAB, Embedded, H, linears, mean_logsumexp
from tests.zoo.awkward.outputs import MatmulView


class Reused(Embedded):
    """Operators that run several times in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(20)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in [*self.layers, *self.layers]:
            h = h + torch.tanh(layer(torch.tanh(layer(h))))
        return h


class Tied(Embedded):
    """The head is the embedding, and two layers share one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.layers[2].bias = self.layers[0].bias
        self.head = nn.Linear(H, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


class Borrowed(nn.Module):
    """The root, which owns no parameter, multiplies by children's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, H)
        self.layers = linears(24)

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        h = self.embed(tokens)
        for layer in self.layers:
            h = torch.tanh(layer(h))
        h = h @ self.layers[0].weight + F.linear(h, self.layers[-1].weight[:H])
        return mean_logsumexp(F.linear(h, self.embed.weight))


class NormPenalty(Borrowed):
    """A penalty on released weights, inside the root's forward."""

    def forward(self, tokens: Tensor, step: int = 0) -> Tensor:
        penalty = sum(layer.weight.norm() + (layer.bias * layer.bias).sum() for layer in self.layers)
        return super().forward(tokens, step) + 0.01 * penalty


class TwiceInOneOperation(Embedded):
    """One parameter on both sides of one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MatmulView()
        self.second = MatmulView()

    def body(self, h: Tensor, step: int) -> Tensor:
        w, u = self.first.weight, self.second.weight
        h = torch.tanh(h @ (w @ w))
        h = torch.tanh(torch.einsum("...i,ij,jk->...k", h, u, u))
        return h * (w * w).sum() / H


class Unused(Embedded):
    """`idle` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.idle = nn.Linear(H, H)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


class SometimesUnused(Embedded):
    """`odd` runs at odd steps only, `even` at even ones, on all ranks alike."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(H, H)
        self.odd = nn.Linear(H, H)

    def body(self, h: Tensor, step: int) -> Tensor:
        return torch.tanh(self.odd(h) if step % 2 else self.even(h))


class DeadBranch(Embedded):
    """`dead` runs in forward, but its output goes nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(3)
        self.dead = nn.Linear(H, H)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
            self.dead(h)
        return h


class Frozen(Embedded):
    """A frozen operator between trainable ones, and a frozen bias beside a trainable weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)
        self.layers[1].requires_grad_(False)
        self.layers[2].bias.requires_grad_(False)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


class FrozenBody(Chain):
    """Only the head learns, with low-rank adapters on the last layers: most of the model is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.head.requires_grad_(True)
        self.down = nn.Linear(H, 4, bias=False)
        self.up = nn.Linear(4, H, bias=False)

    def body(self, h: Tensor, step: int) -> Tensor:
        return super().body(h + self.up(self.down(h)), step)
