"""Casts around modules whose weights have another dtype than the rest (`ShardedModel(dtype={...})`).

Such a module gets its floating-point inputs in its own dtype, and what it returns in that is cast back to the dtype of
its first floating-point input; where it has none (an embedding), to the model's default. Tensors are found in tuples,
lists, dicts and dataclasses. Of a dataclass that holds one to be cast the module gets a copy, as it gets of a list.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

_CASTABLE = (torch.float32, torch.bfloat16, torch.float16)


class Casting:
    """The casts around one module."""

    def __init__(self, dtype: torch.dtype, default: torch.dtype | None) -> None:
        self._dtype = dtype
        self._default = default
        self._outside: list[torch.dtype | None] = []  # of running calls, the innermost last

    def install(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(self._before, with_kwargs=True),
            module.register_forward_hook(self._after, prepend=True, always_call=True),
        ]

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = (leaf for leaf in _leaves((args, kwargs)) if _is_castable(leaf))
        first = next(inputs, None)
        self._outside.append(self._default if first is None else first.dtype)
        return _cast((args, kwargs), self._dtype)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        outside = self._outside.pop() if self._outside else None
        return output if outside is None else _cast(output, outside, self._dtype)


def _is_castable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in _CASTABLE


def _cast(values: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """All floating-point tensors in `values`, or those of dtype `only`, in `dtype`."""

    def cast(tensor: Tensor) -> Tensor:
        chosen = tensor.dtype is only if only is not None else _is_castable(tensor)
        return tensor.to(dtype) if chosen else tensor

    return _map_tensors(cast, values)


def _map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """`function` of every tensor in containers and dataclasses, to any depth."""

    def each(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return _map_fields(function, leaf) if _is_dataclass(leaf) else leaf

    return pytree.tree_map(each, values)


def _map_fields(function: Callable[[Tensor], Tensor], instance: Any) -> Any:
    """The dataclass instance itself where no tensor in it changes, else a copy, made without its constructor."""
    changed = {}
    for name, value in _fields(instance):
        new = _map_tensors(function, value)
        if any(a is not b for a, b in zip(_leaves(value), _leaves(new), strict=True)):
            changed[name] = new
    if not changed:
        return instance
    result = copy.copy(instance)
    is_frozen = instance.__dataclass_params__.frozen
    for name, value in changed.items():
        if is_frozen:
            object.__setattr__(result, name, value)
        else:
            setattr(result, name, value)  # one that is a mapping too (Hugging Face's outputs) keeps both in step
    return result


def _leaves(values: Any) -> Iterator[Any]:
    """What is in containers and dataclasses, to any depth."""
    for leaf in pytree.tree_leaves(values):
        if _is_dataclass(leaf):
            for _, value in _fields(leaf):
                yield from _leaves(value)
        else:
            yield leaf


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(instance: Any) -> Iterator[tuple[str, Any]]:
    """Those that have a value: a field that the constructor does not set may have none."""
    for field in dataclasses.fields(instance):
        if hasattr(instance, field.name):
            yield field.name, getattr(instance, field.name)
