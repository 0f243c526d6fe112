"""Checks of the arguments of `ShardedOptimizer` and of its clipping, before anything has changed."""

from __future__ import annotations

import math

import torch
from torch import nn

from gemini.errors import UnsupportedError
from gemini.model.compiled import original_of
from gemini.model.sharded_model import ShardedModel


def checked_model(model: nn.Module) -> ShardedModel:
    """The sharded model: `model` itself, or the one inside `torch.compile(model)`. Raises TypeError for others."""
    if not isinstance(model := original_of(model), ShardedModel):
        raise TypeError(f"model must be a ShardedModel, found {type(model).__name__}")
    return model


def check_inner(optimizer: torch.optim.Optimizer, sharded: type[torch.optim.Optimizer], model: ShardedModel) -> None:
    """Check that `optimizer` is a plain torch optimizer that has not stepped, and is the model's first.

    sharded: the type that is not plain. Raises TypeError or UnsupportedError.
    """
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, sharded):
        raise TypeError(f"optimizer must be a plain torch optimizer, found {type(optimizer).__name__}")
    model.chunk_manager.refuse_second()
    # State of a stepped optimizer would be lost. Adagrad has state with step 0 from the start. An entry without a step
    # count, such as that of SGD with momentum, comes from a step.
    if any(int(entry.get("step", 1)) for entry in optimizer.state.values()):
        raise UnsupportedError("the optimizer has stepped before: make a new one for the sharded model")


def check_max_norm(name: str, value: float | None) -> float | None:
    """`value` as a float, None for None. Raises ValueError for anything that is not above 0."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise ValueError(f"{name} must be a number above 0 or None, found {value!r}")
    return float(value)


def check_clipping(max_norm: float, norm_type: float) -> float:
    """`max_norm` as a float. Raises ValueError for one that is not above 0, and for a norm other than 2 or inf."""
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, found {norm_type!r}")
    checked = check_max_norm("max_norm", max_norm)
    if checked is None:
        raise ValueError("max_norm must be a number, found None")
    return checked
