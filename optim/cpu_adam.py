"""Adam on the CPU in one pass over memory, which reads the gradient and updates moments, master and 16-bit copy."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch

from optim import cpu_extension
from optim.cpu_extension import extension, levels
from optim.piece import BLOCK, AdamPiece, AdamScalars
from optim.reference import dynamic_map

_GRAD_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the numbers in csrc/adam.h
_LAYOUTS = ("whole", "whole, bf16", "whole, fp16", "split")  # in the order of csrc/adam.h
_MOMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}  # likewise
_DRAWN_MOMENTS = 3  # bf16 that is rounded stochastically


def is_available() -> bool:
    """Whether the extension was built."""
    return extension() is not None


def update(
    pieces: Sequence[AdamPiece], scalars: AdamScalars, *, num_threads: int | None = None, level: str | None = None
) -> None:
    """One update, in place, of checked pieces in host memory.

    num_threads: None means `cpu_extension.num_threads()`. level: one of `levels()`; None means the best one. Neither
    changes a bit. Releases the GIL. Raises RuntimeError without the extension, ValueError for a level that this machine
    does not have.
    """
    module = extension()
    if module is None:
        raise RuntimeError("gemini was installed without its CPU kernels")
    # All pieces go to the kernel in one call, which divides their elements over its threads as one range.
    raw = [row for piece in pieces if piece.weight.numel() for row in _rows(piece)]
    if raw:
        module.adam(raw, tuple(scalars), _maps(), num_threads or cpu_extension.num_threads(), level or levels()[0])


def prepare() -> None:
    """Make the tables that updates read. Raises nothing of its own."""
    _maps()


@cache
def _maps() -> tuple[tuple[int, tuple[float, ...]], ...]:
    """The maps of 8-bit moments, whose entries are kept for ever."""
    maps = [dynamic_map(is_signed) for is_signed in (True, False)]
    return tuple(
        (its.entries.data_ptr(), (*its.borders, *its.powers, *its.sizes, float(its.first), float(its.top)))
        for its in maps
    )


def _rows(piece: AdamPiece) -> list[tuple[int, ...]]:
    if piece.weight.device.type != "cpu":
        raise ValueError(f"weight must be in host memory, found {piece.weight.device}")
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in piece[:6]]
    moments = _MOMENTS[piece.exp_avg.dtype] if piece.draws is None else _DRAWN_MOMENTS
    kinds = _GRAD_TYPES[piece.grad.dtype], _LAYOUTS.index(piece.layout), moments
    key, first = piece.draws or (0, 0)
    scales = [0 if tensor is None else tensor.data_ptr() for tensor in (piece.exp_avg_scale, piece.exp_avg_sq_scale)]
    whole, spans = (*addresses, piece.weight.numel(), *kinds, *scales, key, first), piece.spans
    if spans is None:
        return [whole]

    def cut() -> list[tuple[int, ...]]:
        # The address of an absent tensor is 0 and stays 0, because its size is 0. Behind the six addresses `whole` has
        # the number of elements, which the span's replaces, what the piece's tensors are, the addresses of scales, and
        # whence its random numbers come.
        sizes = [0 if tensor is None else tensor.itemsize for tensor in piece[:6]]
        return [
            (
                *(address + start * size for address, size in zip(whole, sizes, strict=False)),
                numel,
                *kinds,
                *(each and each + start // BLOCK * 4 for each in scales),
                key,
                first + start,
            )
            for start, numel in spans
        ]

    # The addresses are the key: after a tensor has moved another table is made.
    rows: list[tuple[int, ...]] = spans.remembered("cpu", whole, cut)
    return rows
