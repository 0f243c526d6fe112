"""What a first, recorded step of many chunks costs a rank at stage 3."""

from typing import Any

import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, set_leaf_module
from tests.harness import calls
from tests.harness.calls import CHUNK_NUMEL, WIDTH, Lines, growing, growing_phases, lines_of
from tests.zoo.mlp import adam


class Choice(nn.Module):
    """Each rank uses a branch of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[self.rank % 2](x)  # type: ignore[no-any-return]


def costs(rank: int, world_size: int, num_layers: int, chooses: bool) -> tuple[Lines, int]:
    """Of the first step: lines by function, and bytes sent beyond the second step's, which follows its record."""
    layers = (Choice(rank) if chooses else nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
    module = nn.Sequential(*layers)
    if chooses:
        set_leaf_module(module, [Choice])
    model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    collectives = model.chunk_manager.communicator.collectives

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found: list[tuple[Lines, int]] = []
    for _ in range(2):
        before = collectives.bytes_sent
        lines = lines_of(step)
        found.append((lines, collectives.bytes_sent - before))
    model.close()
    (lines, sent), (_, followed) = found
    return lines, sent - followed


def first_step(rank: int, world_size: int, num_layers: int, chooses: bool) -> tuple[dict[str, Any], float]:
    """Functions whose lines grow faster than the layers, and how many times as much is sent for twice of them."""
    costs(rank, world_size, 2, chooses)  # imports, caches
    (few, sent), (many, sent_for_many) = (costs(rank, world_size, n, chooses) for n in (num_layers, 2 * num_layers))
    return growing(few, many), sent_for_many / sent


def phases(rank: int, world_size: int, num_layers: int, uses: list[str], arguments: dict[str, Any]) -> dict[str, Any]:
    return growing_phases(num_layers, uses, **arguments)


def moved_by_states(rank: int, world_size: int, counts: list[int], arguments: dict[str, Any]) -> list[int]:
    return [calls.moved_by_states(count, **arguments) for count in counts]
