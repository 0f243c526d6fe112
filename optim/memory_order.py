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
    if not like.is_contiguous():
        value = value.permute(_slowest_first(like))
    return value.contiguous().view(-1)


def _slowest_first(like: Tensor) -> list[int]:
    """The axes in descending order of their strides if the elements are dense in memory, else in their own order."""
    stride, shape = like.stride(), like.shape
    axes = sorted(range(like.dim()), key=stride.__getitem__, reverse=True)
    expected = 1
    for axis in reversed(axes):
        # The stride of an axis of size 1 may be any number: no element is reached by it.
        if shape[axis] > 1 and stride[axis] != expected:
            return list(range(like.dim()))
        expected *= shape[axis]
    return axes
