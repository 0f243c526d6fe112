"""What functions do with tensors that fetch themselves: which need no data, which write, which take lists of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.runtime.binding import shares_memory

# -- Functions on lists (`torch._foreach_*`) of tensors that fetch themselves: called for a part of the lists at a time.
#
# A single call would need the chunks of all its parameters at once, which the slots of a small budget cannot hold, or
# all gradients of a model whole. The functions work element by element, so one is called for each run of elements that
# need the same chunk or gradient.


def for_each_run(
    use: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    need_of: Callable[[Any], object],
) -> Any:
    """The result of `use(args, kwargs)`, a call of the function `name`. Raises RuntimeError if list lengths differ.

    need_of: a key for what an element of a list needs; elements in a row with one key are used together. None: nothing.
    """
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    lengths = [len(value) for value in lists]
    # torch would raise this itself, but it is given runs only, which have equal lengths.
    if min(lengths) != max(lengths):
        raise RuntimeError(f"{name} takes lists of the same length, found {lengths}")

    results: list[Any] = []
    # A run ends where one of the lists needs another chunk or gradient.
    for _, run in groupby(range(lengths[0]), lambda position: [need_of(each[position]) for each in lists]):
        positions = list(run)
        part = slice(positions[0], positions[-1] + 1)

        def cut(value: Any, part: slice = part) -> Any:
            return value[part] if isinstance(value, (list, tuple)) else value

        results.append(use(tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}))
    # Functions in place return None, others a list or tuple of tensors.
    return None if results[0] is None else type(results[0])(chain.from_iterable(results))


# -- Functions of a tensor that need none of its data: a placeholder of its shape and dtype answers them.


_TENSOR: Any = torch.Tensor


def _getters(*names: str) -> set[Any]:
    # `__torch_function__` is given this method when an attribute is read.
    return {getattr(_TENSOR, name).__get__ for name in names if hasattr(_TENSOR, name)}


METADATA: set[Any] = _getters(
    *("device", "is_cpu", "is_cuda", "is_hpu", "is_ipu", "is_maia", "is_meta", "is_mps", "is_mtia", "is_vulkan"),
    *("is_xla", "is_xpu"),
    *("shape", "dtype", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "_version", "itemsize", "nbytes"),
    *("is_sparse", "is_sparse_csr", "is_quantized", "is_mkldnn", "is_nested", "names", "output_nr", "retains_grad"),
    *("_backward_hooks", "_post_accumulate_grad_hooks", "name", "_base"),
) | {
    getattr(_TENSOR, name)
    for name in (
        *("size", "dim", "numel", "nelement", "__hash__", "is_floating_point", "is_complex", "element_size", "__len__"),
        *("register_hook", "register_post_accumulate_grad_hook", "is_inference", "ndimension", "retain_grad"),
        *("is_signed", "is_conj", "is_neg", "_is_view", "has_names", "get_device"),
    )
    # Names differ between versions of torch.
    if hasattr(_TENSOR, name)
}
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_signed}


# -- Which functions write to the tensors that they are given, told by their names.
#
# `Writes` asks the operations that a function is made of instead: that takes a run of it.


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


# -- Finds which of some tensors a function writes to, by the schemas of the operations that it is made of.
#
# Version counters do not tell: `torch._foreach_mul_` and similar functions do not raise them where they run as one
# kernel.


class Writes(TorchDispatchMode):
    """While active, notes which of `tensors` operations write to, in whole or through a view."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self.written: set[int] = set()  # by position
        self._tensors = [(i, tensor) for i, tensor in enumerate(tensors) if tensor.numel()]

    def call(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        kind: type[Tensor],
        shown: Sequence[Tensor],
    ) -> Any:
        """The result of `func`, which is given `shown` in place of the tensors of `kind`, in the order of the leaves.

        The first of these is shown by the first of `tensors`, or a view of it. Raises what `func` raises.
        """
        given = iter(shown)
        plain_args, plain_kwargs = pytree.tree_map_only(kind, lambda _: next(given), (args, kwargs))
        try:
            with self:
                result = func(*plain_args, **plain_kwargs)
        finally:
            if name_of(func) in _NO_OPERATIONS and isinstance(args[0], kind):
                self.written.add(0)
        # A NumPy array on what is shown: a write to it would be lost, so it is made read-only.
        if hasattr(result, "setflags"):
            result.setflags(write=False)
        return result

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # Operators of higher order, such as `torch.cond`, have no schema.
        schema = getattr(func, "_schema", None)
        for place, argument in enumerate(() if schema is None else schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            # An argument may be a list of tensors, as in `_foreach_` functions.
            for target in pytree.tree_leaves(given):
                if isinstance(target, Tensor):
                    self.written.update(i for i, tensor in self._tensors if shares_memory(target, tensor))
        return func(*args, **kwargs)


# These functions write to their first argument in a Python loop, which no schema describes.
_NO_OPERATIONS = ("apply_", "map_", "map2_")
