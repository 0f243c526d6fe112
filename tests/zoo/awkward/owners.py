"""Parameters that a parent, a container, an attention or a recurrent module owns."""

import torch
from torch import Tensor, nn

from tests.zoo.awkward.chains import Chain
from tests.zoo.awkward.embedded import Embedded, H


class ScaledBlock(nn.Module):
    """Owns `scale` and `shift`, used before, between and after its children, which have children too."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, H))
        self.layer = nn.Linear(H, H)
        self.inner = ScaledBlock(depth - 1) if depth else nn.Linear(H, H)
        self.shift = nn.Parameter(torch.linspace(-0.1, 0.1, H))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x * self.scale))
        h = self.inner(h + self.shift) * self.scale
        return torch.tanh(h) + self.shift


class Nested(Embedded):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ScaledBlock(depth=3) for _ in range(5))

    def body(self, h: Tensor, step: int) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class RootParameter(Chain):
    """The root's own parameter is used around every child."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.9, 1.1, H))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h)) * self.scale + h
        return h


class ParameterContainers(Embedded):
    """`ParameterList` and `ParameterDict`: containers own the parameters, but never run."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.randn(H, H) / H**0.5 for _ in range(4))
        self.vectors = nn.ParameterDict({"scale": torch.ones(H), "shift": torch.zeros(H)})

    def body(self, h: Tensor, step: int) -> Tensor:
        for matrix in self.matrices:
            h = torch.tanh(h @ matrix) * self.vectors["scale"] + self.vectors["shift"]
        return h


class Attention(Embedded):
    """`nn.MultiheadAttention` reads its child's weight without calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.MultiheadAttention(H, 4, batch_first=True) for _ in range(2))

    def body(self, h: Tensor, step: int) -> Tensor:
        for layer in self.layers:
            h = h + layer(h, h, h, need_weights=False)[0]
        return h


class Encoder(Embedded):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(H, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4)

    def body(self, h: Tensor, step: int) -> Tensor:
        return self.encoder(h)


class Recurrent(Embedded):
    """Recurrent modules hand a list of their weights to one function."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.recurrent = kind(H, H // 2, num_layers=2, bidirectional=True, batch_first=True)

    def body(self, h: Tensor, step: int) -> Tensor:
        return self.recurrent(h)[0]
