"""Operators whose outputs are written to in place, or are views, tuples, dataclasses, parameters or nothing."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.zoo.awkward.embedded import Embedded, H, linears


class InplaceOnOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = F.relu_(layer(h).add_(0.1))
        return h


class InplaceOnView(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.layers = linears(4)

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = layer(h)
            view = h.unsqueeze(0).squeeze(0)
            view += 1.0
            h = torch.tanh(view)
        return h


class MatmulView(nn.Module):
    """An operator whose output is a view; autograd saves its weight itself (`x @ w` takes no view of it)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).view(-1, H)


class InplaceOnViewOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.first = MatmulView()
        self.second = MatmulView()

    def body(self, h: Tensor, step: int) -> Tensor:
        h = self.first(h)
        h += 1.0
        return self.second(torch.tanh(h))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return x @ self.weight, {"scaled": [x * self.weight.sum()], "nothing": None}


class TupleAndDictOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TwoOutputs() for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            product, more = block(h)
            h = torch.tanh(product + 0.1 * more["scaled"][0])
        return h


@dataclass
class Hidden:
    value: Tensor
    gate: Tensor | None = None


class GatedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(H, H)
        self.gate = nn.Linear(H, H)

    def forward(self, hidden: Hidden) -> Hidden:
        return Hidden(value=torch.tanh(self.value(hidden.value)), gate=torch.sigmoid(self.gate(hidden.value)))


class DataclassOutput(Embedded):
    """Operators behind blocks that take and return a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GatedBlock() for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        hidden = Hidden(h)
        for block in self.blocks:
            hidden = block(hidden)
            hidden = Hidden(hidden.value * hidden.gate)
        return hidden.value


class AppendTo(nn.Module):
    """Returns None: what it computes goes into the list it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self, x: Tensor, into: list[Tensor]) -> None:
        into.append(torch.tanh(x @ self.weight))


class NoneOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(AppendTo() for _ in range(3))

    def body(self, h: Tensor, step: int) -> Tensor:
        outputs = [h]
        for block in self.blocks:
            block(outputs[-1], outputs)
        return outputs[-1] + outputs[1]


class GiveParameter(nn.Module):
    """Returns its parameter itself, or a view of it."""

    def __init__(self, transposed: bool) -> None:
        super().__init__()
        self.transposed = transposed
        self.weight = nn.Parameter(torch.randn(H, H) / H**0.5)

    def forward(self) -> Tensor:
        return self.weight.t() if self.transposed else self.weight


class ParameterOutput(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.givers = nn.ModuleList(GiveParameter(transposed) for transposed in (False, True, False))

    def body(self, h: Tensor, step: int) -> Tensor:
        for giver in self.givers:
            h = torch.tanh(F.linear(h, giver()))
        return h
