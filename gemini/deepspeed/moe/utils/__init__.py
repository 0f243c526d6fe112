"""`deepspeed.moe.utils`: param groups of a model in which no parameter belongs to a group of experts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from gemini.elsewhere import refusing

__all__ = ["has_moe_layers", "is_moe_param", "split_params_into_different_moe_groups_for_optimizer"]


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether the module `m` has layers of DeepSpeed's experts, and how many experts: (False, 0). Local."""
    return False, 0


def is_moe_param(param: Tensor) -> bool:
    """Whether the parameter belongs to a group of experts: False, as all ranks share every parameter. Local."""
    return False


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """The param groups as they are, in a list: experts are trained in the groups that they are in. Local.

    max_group_size: has no effect: states are divided by chunks, whatever the size of a group.
    """
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


__getattr__ = refusing(__name__)
