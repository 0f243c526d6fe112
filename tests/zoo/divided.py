"""A small transformer-like model that torch's `parallelize_module` divides, and the same training in plain PyTorch.

Tensor parallelism adds the products of a row in another order, so bits are those of no plain training. In fp64 a
different order of sums stays below 1e-9 of a result: a wrong mean, or a norm that counts something twice, does not.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from optim import clip_coefficient
from tests.harness.seed import seed

WIDTH, WORDS, LAYERS, TOKENS = 16, 30, 3, 8
CLOSE = {"rtol": 1e-9, "atol": 1e-10}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """The first block is recomputed in the backward, a part is frozen, and another is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.blocks[1].up.weight.requires_grad_(False)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        for block in self.blocks[1:]:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def build(dtype: torch.dtype = torch.float64) -> Net:
    """The same weights on every call."""
    with torch.random.fork_rng(devices=[]):
        seed(0)
        return Net().to(dtype)


def divided(mesh: DeviceMesh, net: nn.Module | None = None, sequence: bool = False) -> Any:
    """The model with DTensors over `mesh`. sequence: norms work on a part of the sequence, with replicated weights."""
    net = build() if net is None else net
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Replicate()),
        "unused": ColwiseParallel(),
    }
    for number in range(LAYERS):
        block = f"blocks.{number}"
        plan |= {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}
        if sequence:
            plan[f"{block}.norm"] = SequenceParallel()
            plan[f"{block}.up"] = ColwiseParallel(input_layouts=Shard(1))
            plan[f"{block}.down"] = RowwiseParallel(output_layouts=Shard(1))
    if sequence:
        plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
        plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(net, mesh, plan)


def batch(step: int, data_rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + data_rank)
    return torch.randint(0, WORDS, (4, TOKENS), generator=generator)


def loss_of(model: nn.Module, step: int, data_rank: int) -> Tensor:
    words = batch(step, data_rank)
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.roll(-1, 1).flatten())


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.01)


def plain_training(
    data_ranks: int,
    steps: int = 3,
    micro_batches: int = 1,
    clip: float | None = None,
    dtype: torch.dtype = torch.float64,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam,
) -> tuple[list[float], dict[str, Tensor], dict[int, dict[str, Tensor]]]:
    """The norms, the weights and the optimizer's state of plain PyTorch on the data of all ranks."""
    model = build(dtype)
    optimizer = make(model.parameters())
    norms = []
    for step in range(steps):
        for micro in range(micro_batches):
            for data_rank in range(data_ranks):
                (loss_of(model, 10 * step + micro, data_rank) / data_ranks).backward()
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        for gradient in gradients if clip is not None else ():
            gradient.mul_(clip_coefficient(norms[-1], clip))
        optimizer.step()
        optimizer.zero_grad()
    return norms, dict(model.state_dict()), optimizer.state_dict()["state"]
