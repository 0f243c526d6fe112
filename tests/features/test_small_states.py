"""`HybridAdam(state_dtype=)`: moments of 8 and 16 bits under a `ShardedOptimizer`, the same bits wherever they rest."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import HybridAdam, ShardedModel, ShardedOptimizer
from tests.harness.on_ranks import gathered, in_soak, on_ranks

STEPS = 4
KINDS: list[Any] = ["8bit", torch.bfloat16]


class Small(nn.Module):
    """Matrices whose elements fill no whole blocks, tensors too small for 8 bits, an embedding, a stranger order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(90, 67)
        self.first = nn.Linear(67, 81)
        self.norm = nn.LayerNorm(81)
        self.second = nn.Linear(81, 67)
        self.third = nn.Linear(67, 90, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        x = x + self.second(torch.tanh(self.norm(self.first(x))))
        return self.third(x)


def build(dtype: torch.dtype | None = None) -> Small:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Small()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model if dtype is None else model.to(dtype)


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(90, (4, 9), generator=generator)
    # A scaled loss, so that moments of layers differ by orders of magnitude.
    return nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten()) * 3.7


def adam(model: Any, kind: Any, embeddings: bool = False) -> HybridAdam:
    """embeddings: say it, because a plain optimizer sees no module."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [{"params": parameters[:1]}, {"params": parameters[1:]}]
    if embeddings:
        groups[0]["optim_bits"] = 32
    return HybridAdam(groups, lr=1e-2, weight_decay=0.01, state_dtype=kind)


def train(model: Any, optimizer: Any, steps: int = STEPS, start: int = 0) -> list[float]:
    losses = []
    for step in range(start, start + steps):
        loss = loss_of(model, step)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def outcome(model: Any, optimizer: Any) -> dict[str, Any]:
    """Weights and states, by name."""
    found: dict[str, Any] = {f"weight {name}": value.clone() for name, value in model.state_dict().items()}
    saved = optimizer.state_dict()
    for number, entry in saved["state"].items():
        found |= {f"{name} {number}": value for name, value in entry.items() if name != "master"}
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@cache
def expected(kind: Any, dtype: torch.dtype | None, steps: int = STEPS) -> tuple[list[float], dict[str, Any]]:
    model = build(dtype)
    optimizer = adam(model, kind, embeddings=kind == "8bit")
    return train(model, optimizer, steps), outcome(model, optimizer)


PLACES: dict[str, dict[str, Any]] = {
    "device": {"stage": 3},
    "host, stage 1": {"stage": 1, "tensor_placement_policy": "cpu"},
    "host, deferred": {"stage": 3, "tensor_placement_policy": "cpu", "deferred_update": True, "chunk_size": 6144},
    "budget": {"stage": 2, "model_data_memory": "150KB", "chunk_size": 8192},
    "disk": {"stage": 3, "tensor_placement_policy": "disk", "chunk_size": 8192},
    "in backward": {"stage": 3, "update_in_backward": True, "chunk_size": 8192},
}
MORE: dict[str, dict[str, Any]] = {
    f"stage {stage}, {size}, {policy}, {deferred}": {
        "stage": stage,
        "chunk_size": size,
        "tensor_placement_policy": policy,
        "deferred_update": deferred,
    }
    for stage in (0, 1, 2, 3)
    for size in (None, 6144, 30_000)
    for policy in ("cpu", "cuda", "disk")
    for deferred in (False, True)
}


def wrapped(model: nn.Module, place: str, folder: str, **others: Any) -> ShardedModel:
    options = {**PLACES, **MORE}[place] | others
    if options.get("tensor_placement_policy") == "disk":
        options = {**options, "disk_path": folder}
    return ShardedModel(model, device="emulated", **options)


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as path:
        yield path


@on_ranks(1, 2, soak=(3, 4))
@pytest.mark.parametrize("place", [*PLACES, *in_soak(*MORE)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_training_has_the_bits_of_the_plain_optimizer(rank: int, world_size: int, kind: Any, place: str) -> None:
    with tempfile.TemporaryDirectory() as path:
        for dtype in (None, torch.bfloat16) if kind == "8bit" else (torch.bfloat16,):
            model = wrapped(build(dtype), place, path)
            optimizer = ShardedOptimizer(model, adam(model, kind))
            losses, its = expected(kind, dtype)
            assert train(model, optimizer) == losses
            assert_same(outcome(model, optimizer), its)
            model.close()
