"""The placeholder that a parameter shows while its chunk is released: its true shape over a single NaN.

[Note: Guarded placeholders] A released parameter's `__torch_function__` fetches it before a function reads it. But
torch does not call it everywhere: `torch.tensor(released)`, a function that takes a released scalar for a number, or
`plain.weight.data = released` would go on with the NaN. A placeholder therefore carries a dispatch key that torch
reserves for wrappers in its own tests. Any operation that meets the key goes to `access/unasked.py` before any kernel
or autograd. Assigning `.data` transfers the dispatch keys with the memory: a parameter has this key exactly while it
shows a placeholder, and a parameter that is bound to its payload costs what a plain one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gemini.memory.modes import untracked
from optim import is_dense

GUARD = "TESTING_ONLY_GenericWrapper"
_KEY = torch._C._dispatch_key_parse(GUARD)
_KEYS = torch._C.DispatchKeySet(_KEY)

# Entering and leaving `unguarded()` as plain calls, in a seventh of its time: for loops over a chunk's parameters.
lift_guard: Callable[[], None] = partial(torch._C._dispatch_tls_set_dispatch_key_excluded, _KEY, True)
set_guard: Callable[[], None] = partial(torch._C._dispatch_tls_set_dispatch_key_excluded, _KEY, False)

# torch's own setter. Inside a forward `parameter.data = value` is a write of the user's, see access/plain_data.py.
set_own_data: Callable[[Tensor, Tensor], None] = cast(Any, Tensor).data.__set__


class _Keyed(Tensor):
    """A wrapper class. torch lets Python add dispatch keys only to tensors whose class has a `__torch_dispatch__`."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Torch asks a vendor's device (PrivateUse1) whether `.data =` is possible by an operation, which comes here.
        if func is torch.ops.aten._has_compatible_shallow_copy_type.default:
            return True
        raise AssertionError("a placeholder keeps none of these")


def unguarded() -> Any:
    """A context in which this thread's operations on placeholders are torch's own; for shapes and `.data =` only."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def set_data(parameter: Tensor, value: Tensor) -> None:
    """Assign `parameter.data = value`, where one of the two is, or shows, a placeholder."""
    with unguarded():
        set_own_data(parameter, value)


def placeholder(dtype: torch.dtype, device: torch.device, shape: torch.Size) -> Tensor:
    """A tensor of `shape` with one element everywhere: NaN, or 0 for integers.

    Parameters with the same dtype, device and shape may share it.
    """
    nothing = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    # Without `untracked`, wrapping in inference mode fails: torch then calls the wrapper's `__torch_dispatch__`.
    with untracked(), unguarded():
        memory = torch.full((), nothing, dtype=dtype, device=device)
        keyed = torch.Tensor._make_wrapper_subclass(_Keyed, (), dtype=dtype, device=device, _extra_dispatch_keys=_KEYS)
        empty = torch.empty((), dtype=dtype, device=device)
        # Assigning `.data` transfers the guard key to a plain tensor, without the keys of the wrapper class.
        empty.data = keyed
        # The wrapper has brought no memory. `set_` changes the storage and leaves the key.
        return empty.set_(memory.untyped_storage(), 0, (), ()).expand(shape)


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """The strides of `tensor` in a payload: its own if its elements are dense in memory, else contiguous ones."""
    return tensor.stride() if is_dense(tensor) else torch.empty(tensor.shape, device="meta").stride()


def have_one_order(one: Sequence[int], other: Sequence[int], shape: torch.Size) -> bool:
    """Whether the elements of `shape` come in the same order in memory with either strides."""
    # A stride along one element reaches none, and a tensor without elements has no order.
    return not shape.numel() or all(a == b for a, b, size in zip(one, other, shape, strict=True) if size > 1)
