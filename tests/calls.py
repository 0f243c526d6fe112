"""How much Python a model of many parameters costs: calls are counted, as time is noisy."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gemini import ShardedModel, ShardedOptimizer
from tests.mlp import adam

WIDTH = 8
CHUNK_NUMEL = 256  # each parameter is a chunk


def num_calls(function: Callable[[], Any]) -> int:
    """Of Python functions, resumed generators and C functions."""
    count = 0

    def note(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def calls_by_phase(num_layers: int, **arguments: Any) -> dict[str, int]:
    """Of wrapping a chain of linear layers and training it for two steps."""
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)))
    made: list[Any] = []

    def wrap() -> None:
        made.append(ShardedModel(module, device="emulated", **arguments))

    def optimize() -> None:
        made.append(ShardedOptimizer(made[0], adam(made[0].parameters())))

    def train() -> None:
        made[0](torch.ones(2, WIDTH)).square().mean().backward()
        made[1].step()
        made[1].zero_grad()

    phases = {"wrap": wrap, "optimizer": optimize, "first step": train, "second step": train}
    counts = {name: num_calls(phase) for name, phase in phases.items()}
    made[0].close()
    return counts


def growth(num_layers: int, **arguments: Any) -> dict[str, float]:
    """By phase: calls for twice as many layers over those for `num_layers`."""
    calls_by_phase(num_layers, **arguments)  # imports, caches
    few, many = (calls_by_phase(count, **arguments) for count in (num_layers, 2 * num_layers))
    return {phase: many[phase] / few[phase] for phase in few}
