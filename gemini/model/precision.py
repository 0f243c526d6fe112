"""Precision: the dtypes of a module's weights in chunks, and casts around modules of another dtype than the rest.

A module for which `ShardedModel(dtype={...})` names a dtype gets its floating-point inputs in that dtype. Outputs of
that dtype are cast back to the dtype of the first floating-point input; without one (an embedding), to the model's
default. Tensors are found in tuples, lists, dicts and dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gemini.model.tensors import map_tensors, tensors_in
from gemini.script import warn_at_script
from gemini.settings import CASTABLE_DTYPES, Settings
from optim import HALF_DTYPES

_DEFAULT = "*"


class ModulePrecision(NamedTuple):
    """The dtypes of one module's parameters, and the casts around its modules that a key of `dtype={...}` matches."""

    parameters: dict[nn.Parameter, torch.dtype]
    casting: dict[nn.Module, Casting]


def weights_of(module: nn.Module, settings: Settings) -> ModulePrecision:
    """The dtype of every parameter of `module` in its chunk.

    Raises ValueError if a key matches no module, or if two keys give a tied parameter different dtypes.
    """
    parameters: dict[nn.Parameter, torch.dtype] = {}
    castings: dict[nn.Module, Casting] = {}
    names: dict[nn.Parameter, str] = {}
    by_key: dict[type[nn.Module] | str, torch.dtype | None] = (
        dict(settings.dtype) if isinstance(settings.dtype, Mapping) else {_DEFAULT: settings.dtype}
    )
    # Each key must match something: a misspelled one would silently leave a module in the default dtype.
    default = by_key.pop(_DEFAULT, None)
    unused = dict.fromkeys(by_key)

    def visit(each: nn.Module, name: str, dtype: torch.dtype | None) -> None:
        # The first matching key counts, also for all modules inside, unless a key matches those.
        key = next((key for key in by_key if _chooses(key, each, name)), None)
        if key is not None:
            unused.pop(key, None)
            dtype = by_key[key]
            # A module that keeps its own dtypes gets its inputs in that of its first parameter of 32 or 16 bits.
            own = dtype or next((p.dtype for p in each.parameters() if p.dtype in CASTABLE_DTYPES), None)
            if own is not None:
                castings.setdefault(each, Casting(own, default))
        for its_name, parameter in each.named_parameters(name, recurse=False):
            target = dtype if dtype is not None and parameter.dtype in CASTABLE_DTYPES else parameter.dtype
            # A module at several places is visited at each of them, since keys may choose different dtypes for its
            # names.
            before = parameters.setdefault(parameter, target)
            known_as = names.setdefault(parameter, its_name)
            if before is not target:
                raise ValueError(f"dtype={{...}} makes {known_as!r} {before}, and tied to it {its_name!r} {target}")
        for child_name, child in each.named_children():
            visit(child, f"{name}.{child_name}" if name else child_name, dtype)

    visit(module, "", default)
    if unused:
        raise ValueError(f"dtype={{...}}: no module is chosen by {', '.join(map(repr, unused))}")
    dtypes = set(parameters.values())
    if settings.reuse_fp16_shard and dtypes and not dtypes.intersection(HALF_DTYPES):
        warn_at_script(
            "reuse_fp16_shard=True does nothing here, as the model has no 16-bit weights, whose memory their "
            "gradients could reuse: give dtype=torch.float16 or torch.bfloat16, or leave it out",
        )
    return ModulePrecision(parameters, castings)


def _chooses(key: type[nn.Module] | str, module: nn.Module, name: str) -> bool:
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)


class Casting:
    """The casts around one module."""

    def __init__(self, dtype: torch.dtype, default: torch.dtype | None) -> None:
        self._dtype = dtype
        self._default = default
        self._outside: list[torch.dtype | None] = []  # dtypes to cast back to, one per running call, innermost last

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        # `always_call`: a call that fails must remove its entry too, or later outputs would be cast to a wrong dtype.
        # `prepend`: the user's hooks on the module see its output in the dtype that the caller gets.
        return [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, prepend=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        dtypes = (tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.dtype in CASTABLE_DTYPES)
        self._outside.append(next(dtypes, self._default))
        return cast_tensors((args, kwargs), CASTABLE_DTYPES, self._dtype)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        # There is no entry if an earlier pre-hook failed: torch calls this hook all the same.
        outside = self._outside.pop() if self._outside else None
        return output if outside is None else cast_tensors(output, (self._dtype,), outside)


def cast_tensors(values: Any, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    """`values` with all tensors of one of `dtypes` cast to `to`."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(to) if tensor.dtype in dtypes else tensor

    return map_tensors(cast, values)
