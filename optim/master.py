"""16-bit weights and their fp32 masters: rounding, splitting, joining, in scratch of a bounded size."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

# -- Scratch buffers for elementwise work on tiles. They are reused, so that a step on the CPU allocates nothing.
#
# A tile is small enough for its scratch to stay in cache. Each thread has its own buffers, because two threads may
# update two chunks at once. On other devices every call gets new buffers from the caching allocator, because one stream
# could write to a reused buffer while another still reads it.


CPU_TILE_NUMEL_PER_THREAD = 2**17
DEVICE_TILE_NUMEL = 2**24


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_use: dict[tuple[str, torch.dtype], Tensor] = {}


_buffers = _Buffers()


def tile_numel(device: torch.device) -> int:
    """The number of elements of a tile on `device`. On the CPU a multiple of the threads that share the work."""
    if device.type == "cpu":
        return CPU_TILE_NUMEL_PER_THREAD * torch.get_num_threads()
    return DEVICE_TILE_NUMEL


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised buffer, (numel,), valid until the next call with this `name` on this thread."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    # No device in the key: only buffers in host memory are kept.
    key = (name, dtype)
    buffer = _buffers.by_use.get(key)
    if buffer is None or buffer.numel() < numel:
        # A buffer made in inference mode could never be written outside it.
        with torch.inference_mode(False):
            buffer = _buffers.by_use[key] = torch.empty(numel, dtype=dtype, device=device)
    return buffer[:numel]


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Detached tiles of flat tensors of one length and device, which are all cut at the same elements."""
    numel = tile_numel(tensors[0].device)
    return zip(*(tensor.detach().split(numel) for tensor in tensors), strict=True)


# -- fp32 to bf16, rounded half up on the bit pattern.
#
# `hi = (bits + 0x8000) >> 16`, so `bits = (hi << 16) + lo` with an int16 `lo` restores every finite master exactly.
# Round-to-nearest-even could not be inverted with 16 bits. The sign is a bit of its own, so ties round away from zero.
# An infinity stays one. A NaN, which the addition could turn into an infinity or a zero, becomes 0x7fc0.


BF16_NAN_BITS = 0x7FC0


def to_bfloat16_half_up(master: Tensor, out: Tensor | None = None) -> Tensor:
    """`master` (fp32, contiguous, any shape) as bf16, in `out` (contiguous, same shape) if given.

    Raises ValueError for tensors of another dtype, layout or shape.
    """
    if master.dtype != torch.float32 or not master.is_contiguous():
        raise ValueError(f"master must be fp32 and contiguous, found {master.dtype}, stride {master.stride()}")
    if out is None:
        out = torch.empty_like(master, dtype=torch.bfloat16)
    if out.dtype != torch.bfloat16 or not out.is_contiguous() or out.shape != master.shape:
        raise ValueError(
            f"out must be bf16, contiguous and of shape {tuple(master.shape)}, "
            f"found {out.dtype}, stride {out.stride()}, shape {tuple(out.shape)}"
        )
    with torch.no_grad():
        for values, rounded in tiles(master.view(-1), out.view(-1)):
            _round_tile(values, rounded.view(torch.int16))
    return out


def _may_hold_nan(values: Tensor) -> bool:
    # A comparison per element costs more than all the rest of a rounding. On the CPU one sum tells whether there can be
    # a NaN. On a device the host would have to wait for it.
    return values.device.type != "cpu" or bool(values.sum().isnan().item())


def _round_tile(values: Tensor, rounded: Tensor) -> None:
    sums = scratch("rounded bits", values.numel(), torch.int32, values.device)
    torch.add(values.view(torch.int32), 0x8000, out=sums)
    sums.bitwise_right_shift_(16)
    # The shift was arithmetic, so every sum fits into int16, with the weight's sign.
    rounded.copy_(sums)
    if _may_hold_nan(values):
        rounded.masked_fill_(values.isnan(), BF16_NAN_BITS)


# -- An fp32 master beside a half-precision parameter, and how each follows the other.
#
# The optimizer updates the master, and the parameter is the master rounded (bf16: half up on the bit pattern, fp16: to
# nearest even). If an element of a parameter is *not* its master rounded, it was written to since the last update, and
# its master is set to it. So no edit of a weight is lost, and no other element loses its fraction.


def round_master_(weight: Tensor, master: Tensor) -> None:
    """Round `master` (fp32) into `weight` (bf16 or fp16). Both are contiguous."""
    if weight.dtype == torch.bfloat16:
        to_bfloat16_half_up(master, out=weight)
    else:
        weight.copy_(master)


def absorb_edits_(master: Tensor, weight: Tensor) -> None:
    """Set elements of `master` to those of `weight` that differ from the rounded master. Both flat, contiguous."""
    with torch.no_grad():
        for values, current in tiles(master, weight):
            expected = scratch("rounded master", values.numel(), weight.dtype, weight.device)
            round_master_(expected, values)
            expected_bits, bits = expected.view(torch.int16), current.view(torch.int16)
            # On the CPU the usual case, no edit, is detected without temporaries. On a device the host would have to
            # wait for the answer.
            if weight.device.type != "cpu" or not torch.equal(expected_bits, bits):
                values.copy_(torch.where(expected_bits != bits, current.float(), values))


# -- A master in two halves: `bits = (weight << 16) + remainder`, exact for every fp32 value but NaN payloads.
#
# `weight` is the master rounded half up on the bit pattern (see `optim.master`), so it is the bf16 parameter itself,
# and the master costs only an int16 beside it. A NaN master becomes the NaN 0x7fc0 with remainder 0. No master splits
# into a zero weight and a negative remainder. If that is found, the weight was set to zero since the last split, and
# the remainder is ignored.


def split_master_(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Split `master` (fp32) into `weight` (bf16) and `remainder` (int16): 1-D, contiguous, of one length and device."""
    _check(weight, remainder, master)
    with torch.no_grad():
        for values, hi, lo in tiles(master, weight, remainder):
            its_bits = scratch("split bits", values.numel(), torch.int32, values.device)
            to_bfloat16_half_up(values, out=hi)
            its_bits.copy_(hi.view(torch.int16))
            # The copy from int16 has extended the sign, which the shift pushes out.
            its_bits.bitwise_left_shift_(16)
            torch.sub(values.view(torch.int32), its_bits, out=its_bits)
            lo.copy_(its_bits)
            if _may_hold_nan(values):
                lo.masked_fill_(values.isnan(), 0)


def join_master_(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
    """Join `weight` (bf16) and `remainder` (int16) in `master` (fp32): 1-D, contiguous, of one length and device."""
    _check(weight, remainder, master)
    with torch.no_grad():
        for values, hi, lo in tiles(master, weight, remainder):
            bits = values.view(torch.int32)
            bits.copy_(hi.view(torch.int16))
            bits.bitwise_left_shift_(16)
            # The remainder is signed: the weight was rounded half up, so the master may lie below it.
            bits.add_(lo)
            # A zero weight with a negative remainder becomes a NaN.
            if _may_hold_nan(values):
                bits.copy_(torch.where((hi == 0) & (lo < 0), hi.view(torch.int16).int() << 16, bits))


def _check(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    wanted = {"weight": torch.bfloat16, "remainder": torch.int16, "master": torch.float32}
    for (name, dtype), tensor in zip(wanted.items(), (weight, remainder, master)):
        right = tensor.dtype == dtype and tensor.dim() == 1 and tensor.is_contiguous()
        if not right or tensor.numel() != master.numel() or tensor.device != master.device:
            raise ValueError(
                f"{name} must be {dtype}, 1-D, contiguous, {master.numel()} elements on {master.device}, "
                f"found {tensor.dtype}, shape {tuple(tensor.shape)}, {tensor.device}"
            )
