"""The budget that the examples train with unless another one is asked for: a third of what training takes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

import gemini


def a_third(module: nn.Module, world_size: int | None = None, **options: Any) -> int:
    """Bytes of a third of what training the module takes on each rank, or the least that trains it.

    world_size: None: the ranks that have met. options: those of `ShardedModel`, such as dtype and stage.
    """
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
    estimate = gemini.estimate_memory(module, world_size=world_size, **options)
    return max(estimate.state_bytes // 3, estimate.plan.minimum_bytes or 0)
