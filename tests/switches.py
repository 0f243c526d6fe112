"""Modules that choose among their children by data: every rank uses others of them, or none."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.zoo.mlp import WIDTH

NUM_BRANCHES = 4
IDLE = "idle"  # one of the ways: rank 1 uses no branch at all
INSIDE = "inside"  # one of the ways: what each branch does is checkpointed, inside the leaf


class Switch(nn.Module):
    """Whose turn it is follows from rank and step. `in_place`: what it returns is written to by who called it."""

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BRANCHES))
        self.rank = self.step = 0
        self.idles = self.checkpoints = False

    def forward(self, x: Tensor) -> dict[str, Any]:
        if self.idles and self.rank == 1:
            return {"out": torch.zeros_like(x), "aux": (torch.zeros(()),)}
        first = self.branch((self.rank + self.step) % NUM_BRANCHES, x)
        second = self.branch((2 * self.rank + 1) % NUM_BRANCHES, first)
        return {"out": 2 * second, "aux": (second.square().mean(),)}

    def branch(self, number: int, x: Tensor) -> Tensor:
        run = self.branches[number]
        return checkpoint(run, x, use_reentrant=False) if self.checkpoints else run(x)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.before, self.switch, self.after = nn.Linear(WIDTH, WIDTH), Switch(), nn.Linear(WIDTH, WIDTH)
        self.switch.idles, self.switch.checkpoints = way == IDLE, way == INSIDE
        self.way = way

    def inner(self, x: Tensor) -> tuple[Tensor, Tensor]:
        found = self.switch(torch.tanh(self.before(x)))
        out = found["out"]
        out += x  # in place, on what the leaf returned
        return self.after(out), found["aux"][0]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.way in ("reentrant", "not reentrant"):
            return checkpoint(self.inner, x, use_reentrant=self.way == "reentrant")  # type: ignore[no-any-return]
        return self.inner(x)


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        extra = torch.zeros(())
        for block in self.blocks:
            x, aux = block(x)
            extra = extra + aux
        return x.square().mean() + extra


def turn(module: nn.Module, rank: int, step: int) -> None:
    for each in module.modules():
        if isinstance(each, Switch):
            each.rank, each.step = rank, step


def inputs(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def loss_of(module: nn.Module, rank: int, step: int) -> Tensor:
    turn(module, rank, step)
    return module(inputs(rank, step))  # type: ignore[no-any-return]
