"""Precision: the dtypes of a module's weights in chunks, and the modules that are given inputs of their own dtype."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from gemini.settings import CASTABLE_DTYPES, Settings
from optim import HALF_DTYPES

_DEFAULT = "*"


@dataclass
class ModulePrecision:
    """The dtypes of one module's parameters, and of those of its modules whose dtype was chosen by a key."""

    default: torch.dtype | None = None
    parameters: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    casting: dict[nn.Module, torch.dtype] = field(default_factory=dict)
    _names: dict[nn.Parameter, str] = field(default_factory=dict)

    def add(self, parameter: nn.Parameter, name: str, dtype: torch.dtype | None) -> None:
        """`parameter` under one of its names. Raises ValueError if another of them gave it another dtype."""
        target = dtype if dtype is not None and parameter.dtype in CASTABLE_DTYPES else parameter.dtype
        before = self.parameters.setdefault(parameter, target)
        known_as = self._names.setdefault(parameter, name)
        if before is not target:
            raise ValueError(f"dtype={{...}} makes {known_as!r} {before}, and tied to it {name!r} {target}")


def weights_of(module: nn.Module, settings: Settings) -> ModulePrecision:
    """What every parameter of `module` becomes. Raises ValueError for keys that choose nothing, or two dtypes."""
    found = ModulePrecision()
    by_key: dict[type[nn.Module] | str, torch.dtype | None] = {}
    default = settings.dtype if isinstance(settings.dtype, torch.dtype) else None
    if isinstance(settings.dtype, Mapping):
        by_key = {key: value for key, value in settings.dtype.items() if key != _DEFAULT}
        default = settings.dtype.get(_DEFAULT)
    found.default = default
    unused = dict.fromkeys(by_key)

    def visit(each: nn.Module, name: str, dtype: torch.dtype | None) -> None:
        key = next((key for key in by_key if _chooses(key, each, name)), None)
        if key is not None:
            unused.pop(key, None)
            dtype = by_key[key]
            own = dtype or next((p.dtype for p in each.parameters() if p.dtype in CASTABLE_DTYPES), None)
            if own is not None:
                found.casting.setdefault(each, own)
        for parameter_name, parameter in each.named_parameters(recurse=False):
            found.add(parameter, f"{name}.{parameter_name}" if name else parameter_name, dtype)
        for child_name, child in each.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, dtype)

    visit(module, "", default)
    if unused:
        raise ValueError(f"dtype={{...}}: no module is chosen by {', '.join(map(repr, unused))}")
    dtypes = set(found.parameters.values())
    if settings.reuse_fp16_shard and dtypes and not dtypes.intersection(HALF_DTYPES):
        warnings.warn(
            "reuse_fp16_shard=True does nothing here, as the model has no 16-bit weights, whose memory their "
            "gradients could reuse: give dtype=torch.float16 or torch.bfloat16, or leave it out",
            stacklevel=4,  # beyond estimate_memory, or the constructor and what it is decorated with
        )
    return found


def _chooses(key: type[nn.Module] | str, module: nn.Module, name: str) -> bool:
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)
