"""What a first, recorded step of many chunks costs a rank at stage 3."""

from typing import Any

import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, set_leaf_module
from tests.calls import CHUNK_NUMEL, WIDTH, num_calls
from tests.mlp import adam


class Choice(nn.Module):
    """Each rank uses a branch of its own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        return self.branches[self.rank % 2](x)  # type: ignore[no-any-return]


def costs(rank: int, world_size: int, num_layers: int, chooses: bool) -> dict[str, int]:
    """Of one step: Python calls, and what is sent beyond the second step's, which follows the record of the first."""
    layers = (Choice(rank) if chooses else nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))
    module = nn.Sequential(*layers)
    if chooses:
        set_leaf_module(module, [Choice])
    model = ShardedModel(module, device="emulated", chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    collectives = model.executor.communicator.collectives

    def step() -> None:
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    found: list[tuple[int, int]] = []
    for _ in range(2):
        before = collectives.bytes_sent
        calls = num_calls(step)
        found.append((calls, collectives.bytes_sent - before))
    model.close()
    (calls, sent), (_, followed) = found
    return {"calls": calls, "sent to agree": sent - followed}


def growth(rank: int, world_size: int, num_layers: int, chooses: bool) -> dict[str, Any]:
    """Costs of twice as many layers over those of `num_layers`."""
    costs(rank, world_size, 2, chooses)  # imports, caches
    few, many = (costs(rank, world_size, count, chooses) for count in (num_layers, 2 * num_layers))
    return {what: many[what] / few[what] for what in few}
