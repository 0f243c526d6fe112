"""Trains a small mixture of experts on the bytes of Python's own standard library; every rank wakes other experts.

    python examples/moe.py                                        # one rank
    torchrun --nproc-per-node 2 examples/moe.py                   # each rank routes its own text
    torchrun --nproc-per-node 2 examples/moe.py --model-data-memory 4MiB

`Switch` is an ordinary module with a list called `experts`. gemini sees from that name that ranks may use different
ones; a module that calls its list otherwise is marked with `gemini.set_leaf_module(model, TheClass)`.
"""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from budget import a_third
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import gemini
from gemini import ShardedModel, ShardedOptimizer
from optim import HybridAdam

VOCABULARY = 256  # bytes


class Switch(nn.Module):
    """Every position goes to the one expert that its router prefers (Fedus et al. 2021)."""

    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(num_experts)
        )
        self.last_used: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        """x: (positions, width)."""
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        self.last_used = tuple(chosen.unique().tolist())
        for number in self.last_used:
            rows = (chosen == number).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[number](x[rows]) * weight[rows, None])
        return out


class Block(nn.Module):
    def __init__(self, width: int, num_experts: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, num_heads=4, batch_first=True)
        self.switch = Switch(width, num_experts)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: (batch, length, width). mask: (length, length), True where attention may not look."""
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        return x + self.switch(self.norms[1](x).flatten(0, 1)).view_as(x)


class ByteModel(nn.Module):
    def __init__(self, layers: int, width: int, num_experts: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, num_experts) for _ in range(layers))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, text: Tensor) -> Tensor:
        """text: (batch, length + 1) bytes. The mean loss of predicting each from those before it."""
        given, wanted = text[:, :-1], text[:, 1:]
        length = given.shape[1]
        mask = torch.ones(length, length, dtype=torch.bool, device=text.device).triu(1)
        x = self.bytes(given) + self.places(torch.arange(length, device=text.device))
        for block in self.blocks:
            x = block(x, mask)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), wanted.flatten())


def corpus(num_bytes: int) -> Tensor:
    """The first bytes of the standard library's modules, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8).long()


def main(
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 100,
    layers: Annotated[int, typer.Option(min=1, help="Blocks, each with its own experts.")] = 4,
    width: Annotated[int, typer.Option(min=8, help="Model width, a multiple of 4.")] = 64,
    experts: Annotated[int, typer.Option(min=2, help="Experts a block.")] = 8,
    length: Annotated[int, typer.Option(min=2, help="Bytes of context.")] = 64,
    batch: Annotated[int, typer.Option(min=1, help="Pieces of text a rank and step.")] = 4,
    lr: Annotated[float, typer.Option(help="Adam's learning rate.")] = 2e-3,
    corpus_bytes: Annotated[int, typer.Option(min=4096, help="Bytes of source to train on.")] = 2_000_000,
    model_data_memory: Annotated[
        str | None, typer.Option(help="Model data on the device, such as 4MiB. Default: a third of it.")
    ] = None,
) -> None:
    """Train a mixture of experts whose experts are chosen by each rank's own text."""
    gemini.launch_from_torch(seed=0, verbose=False)
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    console = Console(quiet=rank != 0, soft_wrap=True)
    torch.manual_seed(0)
    module = ByteModel(layers, width, experts, length)
    model = ShardedModel(module, model_data_memory=model_data_memory or a_third(module))
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=lr), clip_grad_norm=1.0)
    text, device = corpus(corpus_bytes), gemini.current_device()
    generator = torch.Generator().manual_seed(1 + rank)  # each rank reads elsewhere
    started, losses = time.perf_counter(), []
    for _ in track(range(steps), "training", console=console):
        starts = torch.randint(0, len(text) - length, (batch,), generator=generator).tolist()
        pieces = torch.stack([text[start : start + length + 1] for start in starts]).to(device)
        loss = model(pieces)
        optimizer.backward(loss)
        optimizer.step()
        mean = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(mean)
        losses.append(float(mean) / world_size)
    seconds = time.perf_counter() - started
    used = [block.switch.last_used for block in module.blocks]
    everyone: list[list[tuple[int, ...]]] = [used] * world_size
    if world_size > 1:
        dist.all_gather_object(everyone, used)
    console.print(f"loss: {losses[0]:.3f} at first, {losses[-1]:.3f} after {steps} steps")
    console.print(f"speed: {steps * batch * length * world_size / seconds:.0f} bytes/s")
    for number, of_rank in enumerate(everyone):
        console.print(f"rank {number} used in its last step: {'; '.join(map(str, of_rank))}", markup=False)
    console.print(model.memory_report(), markup=False)
    model.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
