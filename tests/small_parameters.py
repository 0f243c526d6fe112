"""A chain of many small layers, of whose parameters many share a chunk, and what tests of such models ask."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 8
LAYERS = 50
CHUNK_NUMEL = 64 * 256  # a parameter takes 256 elements


class Chain(nn.Module):
    """Layers of which the caller chooses some; each may run a second time inside reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4, WIDTH))
        self.table = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor, used: slice = slice(None), again: str = "") -> Tensor:
        x = x * self.scale + self.table(torch.arange(x.size(0)) % 7)
        for layer in self.layers[used]:
            x = x + torch.tanh(layer(x))
            if again == "inside":
                x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
            elif again == "outside":
                x = checkpoint(layer, x, use_reentrant=True) + layer(x)
        return x


def loss_of(model: nn.Module, step: int, dtype: torch.dtype | None = None, **how: Any) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype or torch.float32)
    loss: Tensor = model(x, **how).float().square().mean()
    return loss


def raw_grads(model: nn.Module) -> int:
    """Gradients that wait where autograd has put them: with memory of their own, not attached to a home."""
    with torch._C.DisableTorchFunctionSubclass():
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return sum(grad.untyped_storage().nbytes() == grad.nbytes for grad in grads)


def attached_grads(model: nn.Module) -> int:
    """Gradients that are views of a home, where autograd adds to them."""
    with torch._C.DisableTorchFunctionSubclass():
        return sum(parameter.grad is not None for parameter in model.parameters()) - raw_grads(model)
