"""What `parameter.grad` is after backward: an object of the true shape whose reads return the reduced gradient.

The reduced gradient exists in pieces, one per rank. Reading gathers it (a collective with several ranks); writing is
refused, since the optimizer would not see it: `torch.nn.utils.clip_grad_norm_` raises instead of doing nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from gemini.chunks.chunk import ManagedParameter
from gemini.errors import UnsupportedError


class ReducedGradient(Tensor):
    """A parameter's gradient, gathered when read."""

    _gather: Callable[[], Tensor]
    _name: str

    @staticmethod
    def of(managed: ManagedParameter, gather: Callable[[], Tensor]) -> ReducedGradient:
        with torch._C.DisableTorchFunctionSubclass():
            gradient: ReducedGradient = Tensor._make_subclass(ReducedGradient, managed.placeholder)
        gradient._gather = gather
        gradient._name = managed.name
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" and func not in _READS_DATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        gradients = [g for g in pytree.tree_leaves((args, kwargs)) if isinstance(g, ReducedGradient)]
        if name.startswith("_foreach") or name == "__set__" or (name.endswith("_") and not name.endswith("__")):
            raise UnsupportedError(
                f"{name} on the gradient of {gradients[0]._name!r} would not reach the sharded optimizer. "
                "Clip with optimizer.clip_grad_norm_(max_norm) or ShardedOptimizer(..., clip_grad_norm=max_norm)"
            )
        args, kwargs = pytree.tree_map_only(ReducedGradient, lambda g: g._gather(), (args, kwargs))
        return func(*args, **kwargs)


_READS_DATA: set[Any] = {getattr(Tensor, name).__get__ for name in ("data", "T", "mT", "H", "mH", "real", "imag")}
