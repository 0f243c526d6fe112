"""`deepspeed.compression.helper`: modules inside of modules, by dotted names."""

from __future__ import annotations

from functools import reduce
from typing import Any

from torch import nn

from gemini.elsewhere import refusing

__all__ = ["recursive_getattr", "recursive_setattr"]


def recursive_getattr(model: nn.Module, module_name: str) -> Any:
    """What `model` has under the dotted name `module_name`, such as "layers.0.mlp". Local. Raises AttributeError."""
    return reduce(getattr, module_name.split("."), model)


def recursive_setattr(model: nn.Module, module_name: str, module: nn.Module) -> None:
    """Put `module` into `model` under the dotted name `module_name`. Local. Raises AttributeError."""
    owner, _, leaf = module_name.rpartition(".")
    setattr(recursive_getattr(model, owner) if owner else model, leaf, module)


__getattr__ = refusing(__name__)
