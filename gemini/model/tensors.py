"""Finds and replaces tensors in inputs and outputs of modules: in containers and dataclasses, to any depth."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


def tensors_in(values: Any) -> Iterator[Tensor]:
    """All tensors in containers that torch knows, in any other mappings and sets, and in dataclasses."""
    # What pytree does not know, such as a tokenizer's batch or a set, is a leaf to it.
    for leaf in pytree.tree_leaves(values):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_in(list(leaf.values()))
        elif isinstance(leaf, (set, frozenset)):
            yield from tensors_in(list(leaf))
        elif _is_dataclass(leaf):
            for _, value in _fields(leaf):
                yield from tensors_in(value)


def map_tensors(function: Callable[[Tensor], Tensor], values: Any) -> Any:
    """Apply `function` to every tensor that `tensors_in` finds, but for those in mappings that cannot be written to.

    Containers that torch knows are copied. All others are copied only if one of their tensors changes.
    """

    def each(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if isinstance(leaf, MutableMapping):
            return _map_items(function, leaf)
        if isinstance(leaf, (set, frozenset)):
            return _map_members(function, leaf)
        return _map_fields(function, leaf) if _is_dataclass(leaf) else leaf

    return pytree.tree_map(each, values)


def _map_items(function: Callable[[Tensor], Tensor], mapping: MutableMapping[Any, Any]) -> Any:
    """The mapping itself if none of its tensors changes, else a copy, such as of a tokenizer's `BatchEncoding`."""
    changed = {}
    for key, value in mapping.items():
        new = map_tensors(function, value)
        if _differ(value, new):
            changed[key] = new
    if not changed:
        return mapping
    result = copy.copy(mapping)
    for key, value in changed.items():
        result[key] = value
    return result


def _map_members(function: Callable[[Tensor], Tensor], members: Any) -> Any:
    """The set itself if none of its tensors changes, else another one."""
    mapped = [(member, map_tensors(function, member)) for member in members]
    return type(members)(new for _, new in mapped) if any(_differ(*pair) for pair in mapped) else members


def _differ(before: Any, after: Any) -> bool:
    """Whether a tensor in `after` is not the one that `before` has in its place."""
    return any(a is not b for a, b in zip(tensors_in(before), tensors_in(after), strict=True))


def _map_fields(function: Callable[[Tensor], Tensor], instance: Any) -> Any:
    """The dataclass instance itself if none of its tensors changes, else a copy that skips the constructor."""
    changed = {}
    for name, value in _fields(instance):
        new = map_tensors(function, value)
        if _differ(value, new):
            changed[name] = new
    if not changed:
        return instance
    # A copy, because the caller may hold the instance. Frozen dataclasses refuse assignments.
    result = copy.copy(instance)
    is_frozen = instance.__dataclass_params__.frozen
    for name, value in changed.items():
        if is_frozen:
            object.__setattr__(result, name, value)
        else:
            # Outputs of Hugging Face are mappings too. Their `__setattr__` keeps attribute and key in step.
            setattr(result, name, value)
    return result


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(instance: Any) -> Iterator[tuple[str, Any]]:
    """The fields that have a value. A field that the constructor does not set may have none."""
    for field in dataclasses.fields(instance):
        if hasattr(instance, field.name):
            yield field.name, getattr(instance, field.name)
