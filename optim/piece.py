"""A run of elements that one update changes: which they are, how they lie in memory, and its scalars."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

# -- The host constants of one Adam update, computed in fp64 and rounded once to fp32.
#
# Every implementation of the written order (torch operations, C++, Triton) gets its constants from here, so that all of
# them round `lr / bc1` and `1 - beta` alike.


def round_to_float32(value: float) -> float:
    """The nearest fp32 value as a Python float. Overflow gives an infinity, like a cast in C."""
    # `struct.pack("f", value)` would raise OverflowError.
    return ctypes.c_float(value).value


Number = TypeVar("Number", bound="float | Tensor")


class Constants(NamedTuple, Generic[Number]):
    """Constants of one update; each is an fp32 value, or a 0-dim fp32 tensor."""

    grad_scale: Number
    """`inv_scale`, negated to maximise: the sign survives every later rounding, so it costs no operation."""
    clip: Number
    beta1: Number
    one_minus_beta1: Number
    beta2: Number
    one_minus_beta2: Number
    root_bias2: Number
    """`sqrt(1 - beta2 ** step)`; 1 without bias correction."""
    eps: Number
    step_size: Number
    """`lr / (1 - beta1 ** step)`; `lr` without bias correction."""
    l2: Number
    """Weight decay that is added to the gradient (Adam). 0 leaves it out, as in AdamW."""
    decay: Number
    """`lr * weight_decay`, subtracted from the parameter (AdamW). 0 leaves it out, as in Adam."""


AdamScalars: TypeAlias = Constants[float]


def adam_scalars(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    adamw_mode: bool = True,
    bias_correction: bool = True,
    maximize: bool = False,
    inv_scale: float = 1.0,
    clip: float = 1.0,
) -> AdamScalars:
    """Constants of update number `step`, which counts from 1. Raises ValueError for a step below 1."""
    if step < 1:
        raise ValueError(f"step counts updates from 1, found {step}")
    beta1, beta2 = betas
    # All differences from 1 use the fp64 betas: `1 - beta2` of a beta2 = 0.999 that was rounded to fp32 is off by
    # 1.3e-5 of its value.
    bias1 = 1.0 - beta1**step if bias_correction else 1.0
    bias2 = 1.0 - beta2**step if bias_correction else 1.0
    return AdamScalars(
        grad_scale=round_to_float32(-inv_scale if maximize else inv_scale),
        clip=round_to_float32(clip),
        beta1=round_to_float32(beta1),
        one_minus_beta1=round_to_float32(1.0 - beta1),
        beta2=round_to_float32(beta2),
        one_minus_beta2=round_to_float32(1.0 - beta2),
        root_bias2=round_to_float32(bias2**0.5),
        eps=round_to_float32(eps),
        step_size=round_to_float32(lr / bias1),
        l2=0.0 if adamw_mode else round_to_float32(weight_decay),
        decay=round_to_float32(lr * weight_decay) if adamw_mode else 0.0,
    )


# -- The order in which the elements of a parameter lie in memory.
#
# A chunk keeps a dense parameter in this order, a channels_last weight too, so that kernels find its strides. The tiles
# of the norm (`optim.norm`) are cut from it: in another order they hold other elements, and their sums have other bits.


def in_memory_order(value: Tensor, like: Tensor) -> Tensor:
    """(numel,) the elements of `value` in the order in which those of `like`, of the same shape, lie in memory.

    A view if those of `value` lie in the same order, else a copy. If `like` has gaps in memory, the order is that of
    indices.
    """
    return _in_order(value, like).contiguous().view(-1)


def write_in_memory_order(value: Tensor, like: Tensor, flat: Tensor) -> None:
    """Copy `flat`, (numel,), to the elements of `value` in the order of `in_memory_order`. Nothing if it is a view."""
    if flat.data_ptr() != value.data_ptr():
        ordered = _in_order(value, like)
        ordered.copy_(flat.view(ordered.shape))


def _in_order(value: Tensor, like: Tensor) -> Tensor:
    # Only shape and strides of `like` are read: a parameter that fetches itself knows both without being fetched.
    if not like.is_contiguous() and is_dense(like):
        return value.permute(sorted(range(like.dim()), key=like.stride().__getitem__, reverse=True))
    return value


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


# -- Spans: the elements of a longer piece that an update touches. Thousands of runs then need no tensors of their own.


class Spans:
    """Runs of elements [start, start + numel), in order and without overlap."""

    __slots__ = ("_memo", "numels", "starts")

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        """runs: (start, numel). Raises ValueError if they overlap or are out of order."""
        pairs = [(start, numel) for start, numel in runs if numel]
        end = 0
        for start, numel in pairs:
            if start < end or numel < 0:
                raise ValueError(f"spans must be in order and apart, found one from {start} on after one to {end}")
            end = start + numel
        self.starts = tuple(start for start, _ in pairs)
        self.numels = tuple(numel for _, numel in pairs)
        # By name, the last key and its result only: a table of addresses is dropped when its tensors have moved.
        self._memo: dict[str, tuple[Hashable, Any]] = {}

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.starts, self.numels, strict=True)

    @property
    def end(self) -> int:
        """The end of the last run."""
        return self.starts[-1] + self.numels[-1] if self.starts else 0

    def within(self, start: int, end: int) -> Spans:
        """The parts of the runs in [start, end), counted from `start`."""
        # The usual case returns the same object, which keeps its remembered tables from step to step.
        if start <= 0 and end >= self.end:
            return self

        def cut() -> Spans:
            borders = ((max(s, start), min(s + n, end)) for s, n in self)
            return Spans((first - start, last - first) for first, last in borders if first < last)

        found: Spans = self.remembered("within", (start, end), cut)
        return found

    def remembered(self, name: str, key: Hashable, make: Any) -> Any:
        """`make()`, or its last result if `key` has not changed: the tables of kernels are the same in most steps."""
        before = self._memo.get(name)
        if before is None or before[0] != key:
            before = self._memo[name] = key, make()
        return before[1]


# -- The operands of one Adam update: the flat tensors of one run of elements, in one of two master layouts.
#
# *Whole*: `weight` is the fp32 master, and `half`, if given, its bf16 or fp16 copy, written in the same pass. *Split*:
# `weight` is bf16, the upper half of the master, and `remainder` is its lower half, int16 (see `optim.master`).


class Draws(NamedTuple):
    """From where the random numbers of stochastically rounded moments come: one of 32 bits for each element.

    They are a function of these numbers alone, and so alike on all ranks, in all chunks and for all kernels.
    """

    key: int
    """64 bits made of seed and step, see `optim.reference.key_of_draws`."""
    first: int
    """The place of the piece's first element in its tensor."""


BLOCK = 256
"""Elements of a block, which shares the scale of its 8-bit moments. Every tensor starts with a block of its own."""
GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOMENT_DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
HALF_DTYPES = (torch.bfloat16, torch.float16)


class AdamPiece(NamedTuple):
    """The tensors of one update: all (numel,), contiguous, on one device, without overlap.

    One exception: `half` and a 16-bit `grad` may share their memory. Each gradient is then overwritten by its weight.
    """

    weight: Tensor
    """fp32 master, or bf16 if there is a remainder; updated."""
    grad: Tensor
    """fp32, bf16 or fp16; only read."""
    exp_avg: Tensor
    """fp32, bf16, or uint8 beside scales; updated."""
    exp_avg_sq: Tensor
    """Of the same dtype; updated."""
    half: Tensor | None = None
    """bf16 or fp16 copy of an fp32 `weight`; written."""
    remainder: Tensor | None = None
    """int16, beside a bf16 `weight`; updated."""
    spans: Spans | None = None
    """The elements that are updated; None: all of them."""
    exp_avg_scale: Tensor | None = None
    """(blocks,) fp32, beside uint8 moments: of each `BLOCK` elements from the first on; updated."""
    exp_avg_sq_scale: Tensor | None = None
    """Likewise."""
    draws: Draws | None = None
    """Beside bf16 moments, all of one tensor: they are rounded stochastically. None: to nearest even."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of (numel,) that are given, by name."""
        return {name: value for name, value in zip(self._fields[:6], self[:6], strict=True) if value is not None}

    @property
    def is_blockwise(self) -> bool:
        """Whether its moments have 8 bits, with a scale for each block."""
        return self.exp_avg_scale is not None

    def parts(self) -> list[AdamPiece]:
        """The piece itself, or one for each of its spans."""
        if self.spans is None:
            return [self]
        # Without its spans, which `narrow` would otherwise cut to each part.
        return [self._replace(spans=None).narrow(start, numel) for start, numel in self.spans]

    @property
    def layout(self) -> str:
        """The layout of the master: "whole", "whole, bf16" or "whole, fp16" with a 16-bit copy, or "split"."""
        if self.half is None:
            return "whole" if self.remainder is None else "split"
        return "whole, bf16" if self.half.dtype == torch.bfloat16 else "whole, fp16"

    def narrow(self, start: int, length: int) -> AdamPiece:
        """Elements [start, start + length), as views. Raises ValueError if that cuts a block of 8-bit moments."""
        parts = {name: tensor.detach().narrow(0, start, length) for name, tensor in self.tensors.items()}
        if self.exp_avg_scale is not None and self.exp_avg_sq_scale is not None:
            if start % BLOCK:
                raise ValueError(f"8-bit moments are cut at multiples of {BLOCK} elements, found {start}")
            blocks = slice(start // BLOCK, -(-(start + length) // BLOCK))
            parts |= {"exp_avg_scale": self.exp_avg_scale[blocks], "exp_avg_sq_scale": self.exp_avg_sq_scale[blocks]}
        spans = None if self.spans is None else self.spans.within(start, start + length)
        draws = None if self.draws is None else self.draws._replace(first=self.draws.first + start)
        return AdamPiece(**{**self._asdict(), **parts, "spans": spans, "draws": draws})

    def check(self) -> None:
        """Raises ValueError for a wrong shape, layout, dtype or device, and for tensors that share memory."""
        if self.half is not None and self.remainder is not None:
            raise ValueError("half and remainder exclude each other: a split master's bf16 half is its weight")
        fp32 = (torch.float32,)
        weight = fp32 if self.remainder is None else (torch.bfloat16,)
        allowed = {"weight": weight, "grad": GRAD_DTYPES, "half": HALF_DTYPES, "remainder": (torch.int16,)}
        allowed |= {"exp_avg": MOMENT_DTYPES, "exp_avg_sq": (self.exp_avg.dtype,)}
        for name, tensor in self.tensors.items():
            _check_tensor(name, tensor, self.weight, allowed.get(name, fp32))
        self._check_scales()
        self._check_overlap()
        if self.spans is not None and self.spans.end > self.weight.numel():
            raise ValueError(f"spans end at {self.spans.end}, weight has {self.weight.numel()} elements")

    def _check_scales(self) -> None:
        scales = {"exp_avg_scale": self.exp_avg_scale, "exp_avg_sq_scale": self.exp_avg_sq_scale}
        for name, scale in scales.items():
            if (scale is not None) != (self.exp_avg.dtype is torch.uint8):
                raise ValueError(f"{name} must be given with uint8 moments, and with no others: {self.exp_avg.dtype}")
            num_blocks = -(-self.weight.numel() // BLOCK)
            if scale is not None:
                _check_tensor(name, scale, self.weight, (torch.float32,), num_blocks)
        if self.draws is not None and self.exp_avg.dtype is not torch.bfloat16:
            raise ValueError(f"draws are of bf16 moments, found {self.exp_avg.dtype}")
        # A span that began inside a block would give the elements before it another scale.
        if self.is_blockwise and self.spans is not None and any(start % BLOCK for start in self.spans.starts):
            raise ValueError(f"spans over 8-bit moments start at multiples of {BLOCK} elements")

    def _check_overlap(self) -> None:
        # Kernels read element i of the gradient before they write element i of the copy. So the same address and width
        # are safe, and a shifted overlap is not. `reuse_fp16_shard` lends a home to its gradient this way.
        shared = self.half is not None and self.grad.itemsize == 2 and self.half.data_ptr() == self.grad.data_ptr()
        named = [(n, t) for n, t in self.tensors.items() if not (shared and n == "half")]
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, name) for name, t in named if t.numel())
        # In the order of addresses it is enough to compare neighbours.
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise ValueError(f"{name} and {other} share memory: an update would read what it has written")


def _check_tensor(
    name: str, tensor: Tensor, weight: Tensor, allowed: Sequence[torch.dtype], numel: int | None = None
) -> None:
    numel = weight.numel() if numel is None else numel
    if tensor.layout != torch.strided or tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, found {tensor.layout} of shape {tuple(tensor.shape)}")
    if tensor.numel() != numel or tensor.device != weight.device:
        raise ValueError(
            f"{name} must match weight ({numel} elements on {weight.device}), "
            f"found {tensor.numel()} elements on {tensor.device}"
        )
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, found {tensor.dtype}")
