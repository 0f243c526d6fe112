"""The model of the GPU's cases: a Llama-like decoder in plain PyTorch with random weights, nothing to download.

Every block recomputes its activations in backward (non-reentrant checkpointing), the same for all systems.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class Size:
    """Widths in elements; `batch` sequences of `length` tokens make one step."""

    layers: int
    width: int
    hidden: int
    heads: int
    vocab: int = 32_000
    length: int = 2048
    batch: int = 4

    @property
    def tokens(self) -> int:
        return self.batch * self.length


SIZES = {
    "tiny": Size(layers=6, width=64, hidden=160, heads=4, vocab=256, length=32, batch=2),
    "1.3B": Size(layers=24, width=2048, hidden=5504, heads=16),
    "3B": Size(layers=26, width=3072, hidden=8192, heads=24),
    "7B": Size(layers=32, width=4096, hidden=11008, heads=32),
    "13B": Size(layers=40, width=5120, hidden=13824, heads=40),
    "17B": Size(layers=53, width=5120, hidden=13824, heads=40),  # 17.2 B parameters
}


class Llama(nn.Module):
    """(batch, length) tokens in, the mean next-token loss out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocab, bias=False)
        angles = _angles(size.length, size.width // size.heads)
        self.register_buffer("cos", angles.cos(), persistent=False)  # (length, head width / 2) fp32
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.cos: Tensor
        self.sin: Tensor

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (batch, length, width)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))[:, :-1]
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


class Block(nn.Module):
    """Attention and a gated feed-forward, each after a norm and around it a residual."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.gradient_checkpointing = True  # tells gemini's bound of the first batch that a block keeps its input alone
        self.attention_norm = nn.RMSNorm(size.width)
        self.query = nn.Linear(size.width, size.width, bias=False)
        self.key = nn.Linear(size.width, size.width, bias=False)
        self.value = nn.Linear(size.width, size.width, bias=False)
        self.out = nn.Linear(size.width, size.width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(size.width)
        self.gate = nn.Linear(size.width, size.hidden, bias=False)
        self.up = nn.Linear(size.width, size.hidden, bias=False)
        self.down = nn.Linear(size.hidden, size.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        result: Tensor = checkpoint(self._forward, x, cos, sin, use_reentrant=False)
        return result

    def _forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (self._split(linear(h)) for linear in (self.query, self.key, self.value))
        h = F.scaled_dot_product_attention(_rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        h = self.feed_forward_norm(x)
        result: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return result

    def _split(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, heads, length, head width)."""
        batch, length, width = x.shape
        return x.view(batch, length, self.heads, width // self.heads).transpose(1, 2)


def _angles(length: int, head_width: int) -> Tensor:
    steps = torch.arange(0, head_width, 2, dtype=torch.float32) / head_width
    return torch.arange(length, dtype=torch.float32)[:, None] * torch.pow(10_000.0, -steps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def build(size: Size, dtype: torch.dtype, device: torch.device) -> Llama:
    """Made where it will live, in its dtype: no copy on the host. Same weights for the same dtype and device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with device:
            model = Llama(size)
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() > 1:
                        parameter.normal_(std=0.02)
    finally:
        torch.set_default_dtype(before)
    return model
