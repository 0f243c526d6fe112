"""Boxes of named tensors: how a flat run of elements is described without chunks, ranks or stages.

A rank holds a flat interval of each parameter. A checkpoint describes it as boxes of the parameter, as
`torch.distributed.checkpoint` does: an offset and a size in every dimension. An interval of an n-dimensional tensor is
at most 2n - 1 boxes: the rest of a row, whole rows, the beginning of a row, in each dimension. Numbers only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """The elements [offset, offset + size) in every dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both boxes have; None if there are none."""
        firsts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - first for first, end in zip(firsts, ends, strict=True))
        return Box(firsts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The same elements as indices into a tensor that holds the box `outer` alone."""
        starts = (mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def _ends(self) -> Iterator[int]:
        return (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements [start, end) of a contiguous tensor, in order; each box is contiguous in it. None if empty."""
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, (end - 1) // row
    if first == last:
        yield from _in_row(shape, first, start - first * row, end - first * row)
        return
    if start % row:
        yield from _in_row(shape, first, start - first * row, row)
        first += 1
    whole_rows = end // row - first
    if whole_rows:
        yield Box((first, *(0 for _ in shape[1:])), (whole_rows, *shape[1:]))
    yield from _in_row(shape, last, 0, end - last * row if end % row else 0)


def _in_row(shape: Sequence[int], index: int, start: int, end: int) -> Iterator[Box]:
    for box in boxes_of(shape[1:], start, end):
        yield Box((index, *box.offsets), (1, *box.sizes))


class Order(NamedTuple):
    """How the dimensions of a tensor follow each other in memory, the slowest first.

    Elements of a chunk lie in the order of their strides: those of a transposed weight are not in the order of its
    dimensions. In a checkpoint they are.
    """

    dims: tuple[int, ...]

    @classmethod
    def of(cls, stride: Sequence[int], shape: Sequence[int]) -> Order:
        """The order of a dense tensor with these strides."""
        # A dimension of one element may have any stride: where it stands makes no difference.
        return cls(tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))))

    def boxes(self, shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """The elements [start, end) in memory, in order: each box of the tensor, with its sizes as they lie."""
        for box in boxes_of([shape[dim] for dim in self.dims], start, end):
            back = self.back
            named = Box(tuple(box.offsets[dim] for dim in back), tuple(box.sizes[dim] for dim in back))
            yield named, box.sizes

    @property
    def back(self) -> tuple[int, ...]:
        """The permutation from memory to the tensor's dimensions."""
        return tuple(sorted(range(len(self.dims)), key=self.dims.__getitem__))
