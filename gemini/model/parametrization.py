"""Parametrizations and pruning of torch.nn.utils, as the names of parameters show them."""

from __future__ import annotations


def is_parametrized(name: str) -> bool:
    """Another tensor is computed of the parameter: `layer.parametrizations.weight.original`, `layer.weight_orig`."""
    return name.endswith("_orig") or "parametrizations" in name.split(".")
