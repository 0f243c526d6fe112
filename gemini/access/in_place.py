"""Which functions write to the tensors that they are given, told by their names.

writes.py asks the operations that a function is made of instead: that takes a run of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils import _pytree as pytree

OVERWRITES = frozenset(
    (
        *("normal_", "uniform_", "fill_", "zero_", "copy_", "constant_", "random_", "exponential_", "cauchy_"),
        *("log_normal_", "geometric_", "bernoulli_", "kaiming_uniform_", "kaiming_normal_", "zeros_", "ones_"),
    )
)
"""Functions that set every element of their first argument and read none of it: nothing is gathered for them."""


def name_of(func: Callable[..., Any]) -> str:
    """The function's name; "" if it has none."""
    return getattr(func, "__name__", "")


def written_by(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors that `func` may write to, or whose memory it gives away for writing."""
    name = name_of(func)
    in_place = name in ("__setitem__", "__iter__", "numpy", "__array__", "__dlpack__") or kwargs.get("inplace") is True
    in_place = in_place or (name.endswith("_") and not name.endswith("__"))
    # In-place operators are named like `__iadd__`.
    in_place = in_place or (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__"))
    first = (args[0] if args else kwargs) if in_place else ()
    return pytree.tree_leaves((first, kwargs.get("out")))
