"""The order-independent sum of squares of `optim.norm` as two Triton kernels: the gradient is read once.

The first sums tiles in the written order. The second, over 1/256 as many numbers, cuts the sums into digits, adds them
in registers, one column per limb, and adds the columns to the limbs by integer atomics, whose order does not matter.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from optim.norm import INF_LIMB, LOWEST_EXPONENT, NAN_LIMB, NUM_LIMBS, SMALLEST_FP32_SUM, TILE, NormLimbs

BLOCK_TILES = 16
"""Tiles that a program of the first kernel sums."""
BLOCK_SUMS = 64
"""Tile sums that a program of the second kernel cuts up at once."""
MAX_LIMB_PROGRAMS = 512
"""Limit of programs of the second kernel: each ends with one atomic per limb, all of them to the same addresses."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Compiler options. A square contracted with an addition would have other bits."""

_SLICE = tl.constexpr(32)  # columns of a tile that are loaded together; a tile is eight of them
_COLUMNS = tl.constexpr(32)  # of the digits: the limbs, rounded up to a power of two
_NUM_LIMBS = tl.constexpr(NUM_LIMBS)
_INF_LIMB = tl.constexpr(INF_LIMB)
_NAN_LIMB = tl.constexpr(NAN_LIMB)
_TILE = tl.constexpr(TILE)
_FIRST_EXPONENT = tl.constexpr(1075 + LOWEST_EXPONENT)  # biased exponent of a sum whose mantissa is not shifted
_SMALLEST_FP32_SUM = tl.constexpr(SMALLEST_FP32_SUM)


def accumulate_sum_of_squares_(limbs: NormLimbs, flat: Tensor) -> Tensor:
    """Add the squares of `flat` to `limbs`. `flat` is 1-D, fp32, bf16 or fp16, and starts at a tile border.

    Limbs and result are those of `optim.norm.accumulate_sum_of_squares_`: the index of the first non-finite element, -1
    if there is none, as 0-dim int64 on the device of `flat`. The host waits for nothing. Temporaries: 8 bytes per tile,
    and a copy of a `flat` that is not contiguous. Raises ValueError for limbs on another device; the caller has checked
    the rest with `optim.norm.check`.
    """
    if limbs.device != flat.device:
        raise ValueError(f"limbs must be on the device of flat, {flat.device}, found {limbs.device}")
    is_half, device = flat.dtype != torch.float32, flat.device
    flat = flat.detach().contiguous()
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    first = torch.full((), -1, dtype=torch.int64, device=device)
    num_tiles = triton.cdiv(flat.numel(), TILE)
    if num_tiles == 0:
        return first
    sums = torch.empty(num_tiles, dtype=torch.float64, device=device)
    # Triton launches on the thread's current device, whatever device the tensors are on. The second kernel follows the
    # first one on its stream, so the sums need no wait.
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        tile_sums_kernel[(triton.cdiv(num_tiles, BLOCK_TILES),)](
            flat, flat.numel(), sums, first, IS_HALF=is_half, TILES=BLOCK_TILES, **OPTIONS
        )
        num_programs = min(triton.cdiv(num_tiles, BLOCK_SUMS), MAX_LIMB_PROGRAMS)
        limbs_kernel[(num_programs,)](sums, num_tiles, limbs, BLOCK=BLOCK_SUMS, **OPTIONS)
    return first


@triton.jit
def tile_sums_kernel(
    flat: tl.tensor,  # fp32, fp16, or int16: the bits of bf16
    numel: tl.tensor,
    sums: tl.tensor,
    first: tl.tensor,  # int64, -1: as an unsigned number the largest of all, so that a minimum replaces it
    IS_HALF: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """Sums of squares of TILES tiles, fp64, and the minimum of `first` and the index of what is not finite there."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    start = tile * _TILE
    if IS_HALF:
        narrow = _tile_sums(flat, start, numel, tl.float32, TILES)
        its_sums = narrow.to(tl.float64)
        # Not (a <= x < b), rather than its opposite, so that NaN counts as outside.
        # Tiles behind the end have a sum of 0. Without the second condition they would cost the block a second sum in
        # fp64.
        outside = (((narrow >= _SMALLEST_FP32_SUM) & (narrow < float("inf"))) == 0) & (start < numel)
        if tl.max(outside.to(tl.int32), axis=0) != 0:
            its_sums = tl.where(outside, _tile_sums(flat, start, numel, tl.float64, TILES), its_sums)
    else:
        its_sums = _tile_sums(flat, start, numel, tl.float64, TILES)
    tl.store(sums + tile, its_sums, mask=start < numel)
    nonfinite = (its_sums < float("inf")) == 0
    if tl.max(nonfinite.to(tl.int32), axis=0) != 0:
        index = _first_nonfinite(flat, start, numel)
        tl.atomic_min(first.to(tl.pointer_type(tl.uint64)), index.to(tl.uint64), sem="relaxed")


@triton.jit
def limbs_kernel(sums: tl.tensor, num_tiles: tl.tensor, limbs: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Add every num_programs-th block of `sums` to `limbs`."""
    column = tl.arange(0, _COLUMNS)
    digits = tl.zeros((BLOCK, _COLUMNS), tl.int64)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    while start < num_tiles:
        # Zeros behind the end are not counted: their exponent is 0.
        i = start + tl.arange(0, BLOCK)
        # Digits stay below 2**32 and are added in int64, so that carries are left to the host.
        digits += _digits(tl.load(sums + i, mask=i < num_tiles, other=0.0), column[None, :])
        start += tl.num_programs(0) * BLOCK
    totals = tl.sum(digits, axis=0)
    # Most limbs get nothing. Zeros are left out: all programs add to the same addresses, one after the other. Relaxed
    # order is enough, because nobody reads the limbs before the kernel has ended.
    tl.atomic_add(limbs + column, totals, mask=(column < _NUM_LIMBS) & (totals != 0), sem="relaxed")


@triton.jit
def _tile_sums(
    flat: tl.tensor, start: tl.tensor, numel: tl.tensor, LANES: tl.constexpr, TILES: tl.constexpr
) -> tl.tensor:
    """(TILES,) sums of squares in the written order: the upper half onto the lower, 128 + 128, 64 + 64 and so on."""
    # A tile is eight slices of 32 elements. 128 + 128 adds slices k and k + 4, 64 + 64 then adds s2 to s0 and s3 to s1,
    # and 32 + 32 adds these two.
    s0 = _square(flat, start, 0, numel, LANES) + _square(flat, start, 4, numel, LANES)
    s2 = _square(flat, start, 2, numel, LANES) + _square(flat, start, 6, numel, LANES)
    s1 = _square(flat, start, 1, numel, LANES) + _square(flat, start, 5, numel, LANES)
    s3 = _square(flat, start, 3, numel, LANES) + _square(flat, start, 7, numel, LANES)
    x = (s0 + s2) + (s1 + s3)  # (TILES, 32)
    x = _halve(x, TILES, 16)
    x = _halve(x, TILES, 8)
    x = _halve(x, TILES, 4)
    x = _halve(x, TILES, 2)
    return tl.reshape(_halve(x, TILES, 1), (TILES,))


@triton.jit
def _square(flat: tl.tensor, start: tl.tensor, PART: tl.constexpr, numel: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Return (TILES, 32): the squares of the tiles' elements from 32 * PART on, zeros behind the end of `flat`."""
    i = start[:, None] + (tl.arange(0, _SLICE) + PART * _SLICE)[None, :]
    x = _fp32(tl.load(flat + i, mask=i < numel, other=0)).to(LANES)
    return x * x


@triton.jit
def _fp32(x: tl.tensor) -> tl.tensor:
    """Convert fp32, fp16 or the bits of bf16 to fp32."""
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def _halve(x: tl.tensor, TILES: tl.constexpr, HALF: tl.constexpr) -> tl.tensor:
    """Return (TILES, HALF): the lower half of the columns plus the upper one. A sum of two has one order."""
    return tl.sum(tl.reshape(x, (TILES, 2, HALF)), axis=1)


@triton.jit
def _digits(sums: tl.tensor, column: tl.tensor) -> tl.tensor:
    """Return (BLOCK, 32) int64: what each fp64 sum adds to each limb, and to the two counts behind them."""
    bits = sums.to(tl.int64, bitcast=True)
    biased = (bits >> 52) & 0x7FF
    fraction = bits & 0xFFFFFFFFFFFFF
    counted = (biased != 0) & (biased != 0x7FF)  # neither zero (subnormal sums do not occur) nor non-finite
    mantissa = tl.where(counted, fraction | 0x10000000000000, 0)
    shift = tl.where(counted, biased - _FIRST_EXPONENT, 0)
    limb, shift = (shift >> 5).to(tl.int32)[:, None], shift & 31
    # mantissa << shift, as three 32-bit digits, without leaving int64
    low, high = (mantissa & 0xFFFFFFFF) << shift, (mantissa >> 32) << shift
    high += low >> 32
    digits = tl.where(column == limb, (low & 0xFFFFFFFF)[:, None], 0)
    digits = tl.where(column == limb + 1, (high & 0xFFFFFFFF)[:, None], digits)
    digits = tl.where(column == limb + 2, (high >> 32)[:, None], digits)
    is_inf = (biased == 0x7FF) & (fraction == 0)
    is_nan = (biased == 0x7FF) & (fraction != 0)
    digits += ((column == _INF_LIMB) & is_inf[:, None]).to(tl.int64)
    digits += ((column == _NAN_LIMB) & is_nan[:, None]).to(tl.int64)
    return digits


@triton.jit
def _first_nonfinite(flat: tl.tensor, start: tl.tensor, numel: tl.tensor) -> tl.tensor:
    """Index of the first element of the tiles at `start` that is not finite: int64, its largest value if none."""
    i = start[:, None] + tl.arange(0, _TILE)[None, :]
    x = _fp32(tl.load(flat + i, mask=i < numel, other=0))
    index = tl.where((tl.abs(x) < float("inf")) == 0, i, 0x7FFFFFFFFFFFFFFF)
    return tl.min(tl.min(index, axis=1), axis=0)
