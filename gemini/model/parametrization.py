"""Parametrizations and pruning of `torch.nn.utils`, recognised by the names of parameters."""

from __future__ import annotations


def is_parametrized(name: str) -> bool:
    """Whether a weight is computed from it: `layer.parametrizations.weight.original`, `layer.weight_orig`."""
    return name.endswith("_orig") or "parametrizations" in name.split(".")
