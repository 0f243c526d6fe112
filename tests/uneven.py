"""A small model whose operators have very different sizes: the chunk size that wastes least is not the one that needs
least memory."""

import torch
from torch import Tensor, nn

VOCABULARY, WIDTH = 300, 48


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))
        self.wide = nn.Linear(WIDTH, 3 * WIDTH)
        self.narrow = nn.Linear(3 * WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.norm(x + self.narrow(torch.tanh(self.wide(x))))  # type: ignore[no-any-return]


def batch_loss(model: nn.Module, step: int) -> Tensor:
    tokens = torch.randint(VOCABULARY, (4, 7), generator=torch.Generator().manual_seed(step))
    out: Tensor = model(tokens)
    return out.square().mean()
