"""Ranks that freeze, unfreeze or group other parameters than the others do, each in a short-lived group."""

from collections.abc import Callable
from typing import Any

import torch

from gemini import DivergenceError, RemoteRankError, state_hash
from tests import parts
from tests.zoo.mlp import CHUNK_NUMEL


def diverges(rank: int, world_size: int, what: str, wrap: dict[str, Any]) -> str:
    """Rank 1 does something else after a common step, or before the first one. What every rank is told."""
    pair = parts.Pair(rank, world_size, wrap)
    if what != "first":
        pair.steps(0, 1)
    try:
        if rank == 1 or what == "other":
            pair.model.layers[2 if rank == 1 else 3].weight.requires_grad_(True)
        if what == "group":
            pair.model.layers[2].weight.requires_grad_(False)
            if rank == 1:
                pair.optimizer.param_groups[0]["params"].clear()
                pair.optimizer.add_param_group({"params": [pair.model.layers[5].weight]})
        loss = pair.loss(pair.model, 2, rank)
        loss.backward()
        pair.optimizer.step()
    except (DivergenceError, RemoteRankError) as error:
        return str(error)
    return ""


def unused_on_some(rank: int, world_size: int, stage: int) -> None:
    """What one rank has a gradient of is used."""
    pair = parts.Pair(rank, world_size, {"stage": stage, "ignore_unused_parameters": False}, parts.Sometimes)
    pair.model.module.uses = (0, 1) if rank == world_size - 1 else ()
    pair.loss(pair.model, 0, rank).backward()
    pair.optimizer.step()
    pair.model.close()


WRAPS: list[dict[str, Any]] = [{"model_data_memory": "half"}, {"stage": 1, "tensor_placement_policy": "cuda"}]
WRAPS += [{"dtype": torch.bfloat16, "tensor_placement_policy": "cpu"}, {"stage": 0, "tensor_placement_policy": "cpu"}]
WRAPS += [{"dtype": torch.bfloat16, "reuse_fp16_shard": True, "stage": stage} for stage in (2, 3)]
WRAPS += [{"stage": 2, "tensor_placement_policy": "cpu"}, {"shard_strategy": "tensor"}]
WRAPS += [{"dtype": torch.bfloat16, "chunk_size": 4 * CHUNK_NUMEL, "stage": 1}, {"tensor_placement_policy": "cuda"}]


def several(
    rank: int, world_size: int, case: Callable[[int, int, dict[str, Any]], None], wraps: list[dict[str, Any]]
) -> None:
    """A case at several wraps."""
    for wrap in wraps:
        try:
            case(rank, world_size, wrap)
        except AssertionError as error:
            raise AssertionError(f"{wrap}: {error}") from error


def settings_differ(rank: int, world_size: int, stage: int) -> list[str]:
    """Rank 1 sets its optimizer otherwise: what every rank is told, at the step and nothing has changed by then."""
    pair = parts.Pair(rank, world_size, {"stage": stage})
    pair.steps(0)
    group = pair.optimizer.param_groups[0]
    told = []
    for name, value, clips in (("lr", 0.5, False), ("weight_decay", 0.5, False), ("lr", 0.25, True)):
        before, alike = state_hash(pair.model, pair.optimizer), group[name]
        pair.loss(pair.model, 1, rank).backward()
        if clips:
            pair.optimizer.clip_grad_norm_(1.0)
        if rank == 1:
            group[name] = value
        try:
            pair.optimizer.step()
        except DivergenceError as error:
            told.append(str(error))
        group[name] = alike
        assert state_hash(pair.model, pair.optimizer) == before
    pair.steps(2)
    pair.model.close()
    return told
