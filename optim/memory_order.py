"""The order in which the elements of a parameter lie in memory.

A chunk keeps a dense parameter in this order, a channels_last weight too, so that kernels find its strides. The tiles
of the norm (`optim.norm`) are cut from it: in another order they hold other elements, and their sums have other bits.
"""

from __future__ import annotations

from torch import Tensor


def in_memory_order(value: Tensor, like: Tensor) -> Tensor:
    """(numel,) the elements of `value` in the order in which those of `like`, of the same shape, lie in memory.

    A view if those of `value` lie in the same order, else a copy. If `like` has gaps in memory, the order is that of
    indices.
    """
    # Only shape and strides of `like` are read: a parameter that fetches itself knows both without being fetched.
    if not like.is_contiguous() and is_dense(like):
        value = value.permute(sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True))
    return value.contiguous().view(-1)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements lie side by side in memory, in whatever order of the axes. Local."""
    if tensor.is_contiguous():
        return True
    expected = 1
    # The stride of an axis of size 1 may be any number: no element is reached by it.
    for step, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if step != expected:
            return False
        expected *= size
    return True
