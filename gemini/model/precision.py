"""Precision: the dtypes of weights in chunks, and of gradients between ranks and at rest."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn

from optim import HALF_DTYPES

_CASTABLE = (torch.float32, *HALF_DTYPES)
_DTYPES = (*_CASTABLE, torch.float64)
_DEFAULT = "*"

Weights = torch.dtype | Mapping[type[nn.Module] | str, torch.dtype | None] | None


@dataclass(frozen=True)
class Precision:
    """What `ShardedModel`'s arguments of these names say. Raises TypeError or ValueError for what they cannot be.

    Only fp32, fp16 and bf16 weights are cast, and only their gradients travel and rest in other dtypes than their own.
    """

    dtype: Weights = None
    reduce_dtype: torch.dtype | None = None
    accumulate_dtype: torch.dtype | None = None
    reuse_fp16_shard: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.dtype, Mapping):
            for key, value in self.dtype.items():
                if not isinstance(key, str) and not (isinstance(key, type) and issubclass(key, nn.Module)):
                    raise TypeError(f"dtype={{...}} has module classes and names of modules as keys, found {key!r}")
                check_dtype(f"dtype of {key!r}", value, _DTYPES)
        else:
            check_dtype("dtype", self.dtype, _DTYPES)
        check_dtype("reduce_dtype", self.reduce_dtype, _CASTABLE)
        check_dtype("accumulate_dtype", self.accumulate_dtype, _CASTABLE)
        if not isinstance(self.reuse_fp16_shard, bool):
            raise TypeError(f"reuse_fp16_shard must be True or False, found {self.reuse_fp16_shard!r}")
        if self.reuse_fp16_shard and self.accumulate_dtype is torch.float32:
            raise ValueError(
                "reuse_fp16_shard=True keeps 16-bit gradients where 16-bit parameters were; with "
                "accumulate_dtype=torch.float32 they do not fit there: leave one of the two out"
            )

    def of_gradients(self, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype, bool]:
        """Of weights of `dtype`: what travels, what rests, and whether that becomes fp32 with a second micro-batch."""
        if dtype not in _CASTABLE:
            return dtype, dtype, False
        widens = self.accumulate_dtype is None and dtype in HALF_DTYPES
        return self.reduce_dtype or dtype, self.accumulate_dtype or dtype, widens

    def of_sums(self, dtype: torch.dtype) -> torch.dtype:
        """What travels of several gradients of weights of `dtype`, which a rank has added up in fp32."""
        return (self.reduce_dtype or torch.float32) if dtype in _CASTABLE else dtype

    def of_weights(self, module: nn.Module) -> ModulePrecision:
        """What every parameter of `module` becomes. Raises ValueError for keys that choose nothing, or two dtypes."""
        found = ModulePrecision()
        by_key: dict[type[nn.Module] | str, torch.dtype | None] = {}
        default = self.dtype if isinstance(self.dtype, torch.dtype) else None
        if isinstance(self.dtype, Mapping):
            by_key = {key: value for key, value in self.dtype.items() if key != _DEFAULT}
            default = self.dtype.get(_DEFAULT)
        found.default = default
        unused = dict.fromkeys(by_key)

        def visit(each: nn.Module, name: str, dtype: torch.dtype | None) -> None:
            key = next((key for key in by_key if _chooses(key, each, name)), None)
            if key is not None:
                unused.pop(key, None)
                dtype = by_key[key]
                own = dtype or next((p.dtype for p in each.parameters() if p.dtype in _CASTABLE), None)
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
        if self.reuse_fp16_shard and dtypes and not dtypes.intersection(HALF_DTYPES):
            warnings.warn(
                "reuse_fp16_shard=True does nothing here, as the model has no 16-bit weights, whose memory their "
                "gradients could reuse: give dtype=torch.float16 or torch.bfloat16, or leave it out",
                stacklevel=3,
            )
        return found


@dataclass
class ModulePrecision:
    """The dtypes of one module's parameters, and of those of its modules whose dtype was chosen by a key."""

    default: torch.dtype | None = None
    parameters: dict[nn.Parameter, torch.dtype] = field(default_factory=dict)
    casting: dict[nn.Module, torch.dtype] = field(default_factory=dict)
    _names: dict[nn.Parameter, str] = field(default_factory=dict)

    def add(self, parameter: nn.Parameter, name: str, dtype: torch.dtype | None) -> None:
        """`parameter` under one of its names. Raises ValueError if another of them gave it another dtype."""
        target = dtype if dtype is not None and parameter.dtype in _CASTABLE else parameter.dtype
        before = self.parameters.setdefault(parameter, target)
        known_as = self._names.setdefault(parameter, name)
        if before is not target:
            raise ValueError(f"dtype={{...}} makes {known_as!r} {before}, and tied to it {name!r} {target}")


def _chooses(key: type[nn.Module] | str, module: nn.Module, name: str) -> bool:
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)


def check_dtype(name: str, dtype: torch.dtype | None, valid: tuple[torch.dtype, ...] = _DTYPES) -> None:
    """Raises ValueError unless weights can be of this dtype."""
    if dtype is not None and dtype not in valid:
        raise ValueError(f"{name} must be None or one of {', '.join(map(str, valid))}, found {dtype!r}")
