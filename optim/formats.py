"""Formats of optimizer state: how many bytes a block of 256 elements takes, and how it is read and written.

A format belongs to a state of a tensor, and the optimizer that updates the tensor says which: `exp_avg` may have 8 bits
beside an average of the weights in fp32, and beside another optimizer's momentum. Its blocks begin with the tensor.
Every tensor starts, and every shard ends, on a multiple of 256 elements, so no block is on two ranks, in two chunks or
in two shares of a thread, and no bit of a state depends on where it rests. Everyone but a kernel sees fp32: state
dicts, `safe_get_*` and the user's edits are read and written by `StateFormat.read` and `write`. A checkpoint has the
bytes themselves.

`StateLayout` says where the tensors of a shard have their blocks in the memory of one state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from optim.piece import BLOCK, Draws
from optim.reference import dequantize_, key_of_draws, quantize_, to_bfloat16_even_

_SCALE_BYTES = 4


@dataclass(frozen=True)
class StateFormat:
    """How the elements of one state of one tensor are stored.

    Args:
        name: for errors, checkpoints and words.
        dtype: of the stored elements.
        has_scales: whether each block has an fp32 scale beside its elements.
        seed: of the random numbers with which updates round bf16 elements stochastically. None: to nearest even.
    """

    name: str
    dtype: torch.dtype
    has_scales: bool = False
    seed: int | None = None

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of `BLOCK` elements, its scale included."""
        return BLOCK * self.dtype.itemsize + (_SCALE_BYTES if self.has_scales else 0)

    def draws(self, step: int, first: int) -> Draws | None:
        """The random numbers of update number `step` for elements from place `first` of their tensor on."""
        return None if self.seed is None else Draws(key_of_draws(self.seed, step), first)

    def read(self, stored: Tensor, scales: Tensor | None, name: str, first: int = 0) -> Tensor:
        """(numel,) fp32: what stored elements mean. It may be `stored` itself.

        scales: of the blocks from that of the first element on. name: of the state. first: the place of the first
            element in its block.
        """
        if scales is None:
            return stored.float()
        values = torch.empty(stored.numel(), dtype=torch.float32, device=stored.device)
        if stored.numel():
            dequantize_(values, stored, scales, _is_signed(name), first)
        return values

    def write(self, stored: Tensor, scales: Tensor | None, name: str, values: Tensor) -> None:
        """Store `values`, (numel,), of any dtype and device. The first is the first of a block."""
        values = values.to(stored.device, torch.float32)
        if scales is not None:
            quantize_(stored, scales, values, _is_signed(name))
        elif self.dtype is torch.bfloat16:
            to_bfloat16_even_(stored, values)
        else:
            stored.copy_(values)


FP32 = StateFormat("fp32", torch.float32)
BF16 = StateFormat("bf16", torch.bfloat16)
EIGHT_BIT = StateFormat("8bit", torch.uint8, has_scales=True)
BF16_STOCHASTIC = StateFormat("bf16_stochastic", torch.bfloat16, seed=0)
FORMATS = {each.name: each for each in (FP32, BF16, EIGHT_BIT, BF16_STOCHASTIC)}

LEAST_NUMEL = 4096
"""Elements of the smallest tensor whose moments have 8 bits, as in bitsandbytes: smaller ones have little to save. With
stochastic rounding each tensor is a piece of its own in an update, which smaller ones are not worth either."""


def _is_signed(name: str) -> bool:
    return name != "exp_avg_sq"


def format_named(given: object) -> StateFormat:
    """The format of `HybridAdam(state_dtype=given)`. Raises ValueError."""
    if isinstance(given, StateFormat):
        return given
    for each in FORMATS.values():
        if given == each.name or (given is each.dtype and not each.has_scales):
            return each
    raise ValueError(f"state_dtype must be torch.float32, torch.bfloat16, 'bf16_stochastic' or '8bit', found {given!r}")


def format_of_tensor(default: StateFormat, bits: object, numel: int, is_embedding: bool) -> StateFormat:
    """The format of the moments of a tensor of `numel` elements in all, on whatever ranks these are.

    default: of the optimizer. bits: `optim_bits` of the tensor's param group; None: it says nothing.
    is_embedding: it is looked up by rows, of which most have no gradient in a step, and those that have a large one.
    """
    wanted = {None: default, 32: FP32, 8: EIGHT_BIT}[checked_bits(bits)]
    if wanted == EIGHT_BIT and is_embedding and bits is None:
        return FP32
    return FP32 if numel < LEAST_NUMEL and (wanted == EIGHT_BIT or wanted.seed is not None) else wanted


def checked_bits(bits: object) -> int | None:
    """`optim_bits` of a param group. Raises ValueError for anything but 8, 32 and None."""
    if bits is not None and (isinstance(bits, bool) or bits not in (8, 32)):
        raise ValueError(f"optim_bits must be 8, 32 or None, found {bits!r}")
    return None if bits is None else int(bits)


class FormatRun(NamedTuple):
    """Elements [start, start + numel) of a shard that have one format."""

    start: int  # a multiple of BLOCK
    numel: int
    format: StateFormat
    data_start: int = 0  # bytes
    first_scale: int = 0
    place: int = 0  # of the first element in its tensor

    @property
    def num_blocks(self) -> int:
        """Blocks, of which the last one may be shorter."""
        return -(-self.numel // BLOCK)


class StoredRun(NamedTuple):
    """Elements of one part in the memory of a state: views."""

    start: int  # in the shard
    format: StateFormat
    elements: Tensor  # (numel,) of the format's dtype
    scales: Tensor | None  # (blocks,) fp32
    place: int  # of the first element in its tensor, where a part is of one tensor


@dataclass(frozen=True)
class StateLayout:
    """Where the elements of a shard are in the memory of each of its states: (num_bytes,) uint8.

    Elements of the parts come first, in their order, and then the scales of all. What lies between parts has no memory:
    tensors that have no such state.
    """

    parts: tuple[FormatRun, ...]  # in order
    scales_start: int  # bytes
    num_bytes: int  # alike on all ranks

    @staticmethod
    def of(runs: Iterable[tuple[int, int, StateFormat | None, int]], num_bytes: int = 0) -> StateLayout:
        """runs: (start, numel, format, place in the tensor) of every tensor's elements in the shard.

        A tensor without a format has no such state. num_bytes: at least so many.
        """
        parts: list[FormatRun] = []
        data = scales = 0
        before: StateFormat | None = None
        for start, numel, its, place in sorted(runs, key=lambda run: run[0]):
            if start % BLOCK:
                raise AssertionError(f"a tensor of a shard starts at element {start}, which is inside a block")
            before, alike = its, its == before
            if its is None:
                continue
            # Random numbers are drawn by the place in a tensor.
            if alike and its.seed is None:
                # One part, with the padding between the two: an update of both finds one run of elements.
                last = parts.pop()
                data, scales = last.data_start, last.first_scale
                part = last._replace(numel=start + numel - last.start)
            else:
                part = FormatRun(start, numel, its, data, scales, place)
            parts.append(part)
            data += part.num_blocks * BLOCK * its.dtype.itemsize
            scales += part.num_blocks if its.has_scales else 0
        end = -(-(data + _SCALE_BYTES * scales) // BLOCK) * BLOCK
        return StateLayout(tuple(parts), data, max(end, num_bytes))

    def format_at(self, start: int) -> StateFormat:
        """Of the element, which is a tensor's."""
        return next(part.format for part in reversed(self.parts) if part.start <= start)

    def stored(self, flat: Tensor, start: int, numel: int) -> Iterator[StoredRun]:
        """Views of elements [start, start + numel) in `flat`, the memory of a state, part by part.

        `start` is the first element of a block, or of a format without scales.
        """
        for part in self.parts:
            first, end = max(start, part.start), min(start + numel, part.start + part.numel)
            if first >= end:
                continue
            size, before = part.format.dtype.itemsize, first - part.start
            begin = part.data_start + before * size
            elements = flat[begin : begin + (end - first) * size].view(part.format.dtype)
            scales = None
            if part.format.has_scales:
                number = part.first_scale + before // BLOCK
                count = (before % BLOCK + end - first + BLOCK - 1) // BLOCK
                at = self.scales_start + _SCALE_BYTES * number
                scales = flat[at : at + _SCALE_BYTES * count].view(torch.float32)
            yield StoredRun(first, part.format, elements, scales, part.place + before)

    def part_of(self, flat: Tensor, start: int, numel: int) -> StoredRun | None:
        """Elements [start, start + numel), which have one format, as `stored`. None: they have no memory."""
        found = list(self.stored(flat, start, numel))
        assert len(found) < 2, f"elements from {start} on have {len(found)} formats"
        return found[0] if found and found[0].elements.numel() == numel else None

    def read(self, flat: Tensor, name: str, start: int, numel: int) -> Tensor:
        """(numel,) fp32 elements from `start` on, any one of the shard; paddings are zeros."""
        out = torch.zeros(numel, dtype=torch.float32, device=flat.device)
        for each in self.stored(flat, start, numel):
            values = each.format.read(each.elements, each.scales, name, each.start % BLOCK)
            out[each.start - start :][: values.numel()].copy_(values)
        return out

    def write(self, flat: Tensor, name: str, start: int, values: Tensor) -> None:
        """Store `values` from element `start` on, which is the first of a tensor's piece in the shard."""
        for each in self.stored(flat, start, values.numel()):
            part = values[each.start - start :][: each.elements.numel()]
            each.format.write(each.elements, each.scales, name, part)

    def zero(self, flat: Tensor, start: int, numel: int) -> None:
        """Set elements to zero, as before the first update: whole blocks of a tensor's piece."""
        for each in self.stored(flat, start, numel):
            each.elements.zero_()
            if each.scales is not None:
                each.scales.zero_()
