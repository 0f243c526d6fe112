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
    _managed: ManagedParameter

    @staticmethod
    def of(managed: ManagedParameter, gather: Callable[[], Tensor]) -> ReducedGradient:
        with torch._C.DisableTorchFunctionSubclass():
            gradient: ReducedGradient = Tensor._make_subclass(ReducedGradient, managed.placeholder)
        gradient._gather = gather
        gradient._managed = managed
        return gradient

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES:  # a write to `grad.data` would be as lost as one to `grad`
            return ReducedGradient.of(args[0]._managed, args[0]._gather)
        name = getattr(func, "__name__", "")
        if name == "__get__" and func not in _READS_DATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        written = _gradients_in((args[:1], kwargs.get("out"))) if _writes(name, kwargs) else []
        if written:
            raise UnsupportedError(
                f"{name} on the gradient of {written[0]._managed.name!r} would not reach the sharded optimizer. "
                + (_NO_SCALER if name.startswith("_amp") else _CLIP)
            )
        args, kwargs = pytree.tree_map_only(ReducedGradient, lambda g: g._gather(), (args, kwargs))
        return func(*args, **kwargs)


def _gradients_in(values: Any) -> list[ReducedGradient]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, ReducedGradient)]


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a function of this name writes to its first argument or to `out`."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name in ("__set__", "__setitem__") or "out" in kwargs


_CLIP = "Clip with optimizer.clip_grad_norm_(max_norm) or ShardedOptimizer(..., clip_grad_norm=max_norm)"
_NO_SCALER = "Train without torch.amp.GradScaler: dtype=torch.bfloat16 needs no loss scale"
_READS_DATA: set[Any] = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "real", "imag")}
_DATA: Any = Tensor.data
_ALIASES: set[Any] = {_DATA.__get__, Tensor.detach, torch.detach}
