"""The order-independent sum of squares behind the global gradient norm.

A parameter's gradient, in the order of the parameter's memory, is cut into canonical tiles of 256 elements
(the last one padded with zeros). Each tile is summed in one written order: 256 squares, then half added onto
half, 128 + 128, 64 + 64 and so on. fp32 input is summed in fp64 lanes, where its squares are exact. bf16 and
fp16 input is summed in fp32 lanes; a tile whose sum then is below 2**-80 or not finite is summed again in
fp64 lanes.

Tile sums are added *exactly*: as integers, cut into 32-bit digits, into int64 limbs. Integer addition has
no order, so no split into chunks, threads or ranks changes a bit, and ranks merge their limbs by an integer
all-reduce.
"""

import math
from typing import TypeAlias

import torch
from torch import Tensor

from optim.master import scratch

TILE = 256
"""Elements of a canonical tile."""
VALUE_LIMBS = 20
INF_LIMB = VALUE_LIMBS
"""Counts tiles whose sum is infinite: they hold an infinity and no NaN."""
NAN_LIMB = VALUE_LIMBS + 1
"""Counts tiles that hold a NaN."""
NUM_LIMBS = VALUE_LIMBS + 2
LOWEST_EXPONENT = -352
"""Limb i counts multiples of 2**(32 * i - 352). The smallest sum is 2**-298, 52 fraction bits reach to
2**-350; the largest is below 256 * 2**256 = 2**264, inside limb 19."""
# Each tile adds less than 2**32 to any limb, and a limb holds 2**63: none overflows before 2**31 tiles have been added,
# over all ranks together, which are 5.5e11 elements.
SMALLEST_FP32_SUM = 2.0**-80
"""Above it, what 256 squares lost to underflow (each below 2**-149) is under 2**-61 of the sum."""

FP64_SUMS = (2.0**-290, 2.0**264)
"""Tile sums of fp64 input outside this range count as zero and as infinite.

A limit: fp64 gradients with a norm of 2**132 (5e39) or more in one tile count as non-finite, though they may be finite.
The limbs cannot hold such a norm, so nothing could be clipped by it. No fp32 gradient reaches it.
"""

CPU_BLOCK_NUMEL = 2**17
"""Elements summed at once on the CPU: few enough for the fp64 lanes to stay in cache."""
DEVICE_BLOCK_NUMEL = 2**24

NormLimbs: TypeAlias = Tensor
"""(NUM_LIMBS,) int64: 20 limbs, then the counts of infinite and of NaN tiles; adds up by addition."""


def zero_norm_limbs(device: torch.device | str = "cpu") -> NormLimbs:
    """Limbs that hold nothing yet."""
    return torch.zeros(NUM_LIMBS, dtype=torch.int64, device=device)


def accumulate_sum_of_squares_(limbs: NormLimbs, flat: Tensor) -> Tensor:
    """`optim.dispatch.accumulate_sum_of_squares_` as plain torch operations, for any device.

    In a tile that counts as infinite without an infinity in it (`FP64_SUMS`) the first element counts as non-finite.
    Temporaries: 12 bytes an element for at most 2**17 elements (2**24 off the CPU), and 8 a tile.
    """
    sums = tile_sums(flat)
    add_tile_sums_(limbs, sums)
    return first_nonfinite(flat, sums)


def check(limbs: NormLimbs, flat: Tensor) -> None:
    """Raises ValueError for other limbs than `zero_norm_limbs` makes, and for tensors that have no such norm."""
    if limbs.shape != (NUM_LIMBS,) or limbs.dtype != torch.int64:
        raise ValueError(f"expected ({NUM_LIMBS},) int64 limbs, found {tuple(limbs.shape)} {limbs.dtype}")
    if flat.dim() != 1 or not flat.is_floating_point() or flat.itemsize < 2:
        raise ValueError(f"expected a 1-D fp64, fp32, bf16 or fp16 tensor, found {flat.dim()}-D {flat.dtype}")


def tile_sums(flat: Tensor) -> Tensor:
    """Sums of squares of the tiles of `flat`: (num_tiles,) fp64; infinite or NaN where the tile is."""
    flat = flat.detach()
    sums = torch.empty(-(-flat.numel() // TILE), dtype=torch.float64, device=flat.device)
    block = CPU_BLOCK_NUMEL if flat.device.type == "cpu" else DEVICE_BLOCK_NUMEL
    if flat.numel() == 0:
        return sums
    with torch.no_grad():
        # Both block sizes are multiples of TILE, so no tile is cut, and only the last one of all is padded.
        for values, out in zip(flat.split(block), sums.split(block // TILE)):
            _sum_block(values, out)
    return sums


def _sum_block(values: Tensor, out: Tensor) -> None:
    if values.dtype == torch.float32:
        out.copy_(_halving_sum(values, torch.float64))
        return
    if values.dtype == torch.float64:
        # The limbs do not cover fp64's range: smaller sums count as zero, larger ones as infinite.
        sums = _halving_sum(values, torch.float64)
        sums = torch.where(sums < FP64_SUMS[0], 0.0, sums)
        out.copy_(torch.where(sums >= FP64_SUMS[1], math.inf, sums))
        return
    out.copy_(_halving_sum(values, torch.float32))
    # Not (a <= x < b), rather than its opposite, so that NaN counts as outside.
    outside = ((out >= SMALLEST_FP32_SUM) & (out < math.inf)).logical_not_()
    # Off the CPU the host would have to wait to learn that there is nothing to redo.
    if values.device.type != "cpu" or outside.any():
        out.copy_(torch.where(outside, _halving_sum(values, torch.float64), out))


def _halving_sum(values: Tensor, lanes: torch.dtype) -> Tensor:
    """Return (tiles,) sums in the written order, valid until the next call with the same lanes on this thread."""
    numel = values.numel()
    num_tiles = -(-numel // TILE)
    flat = scratch("norm lanes", num_tiles * TILE, lanes, values.device)
    flat[:numel].copy_(values)
    # The memory behind the values may hold the squares of an earlier call.
    flat[numel:].zero_()
    flat.mul_(flat)
    squares = flat.view(num_tiles, TILE)
    width = TILE
    while width > 1:
        low, high = squares.narrow(1, 0, width).chunk(2, dim=1)
        low.add_(high)
        width //= 2
    return squares[:, 0]


def add_tile_sums_(limbs: NormLimbs, sums: Tensor) -> None:
    """Add `tile_sums` to `limbs`, exactly; sums that are not finite are counted instead."""
    with torch.no_grad():
        for part in sums.split(CPU_BLOCK_NUMEL):
            _add_block(limbs, part)


def _add_block(limbs: NormLimbs, sums: Tensor) -> None:
    bits = sums.view(torch.int64)
    biased = (bits >> 52) & 0x7FF
    counted = (biased != 0) & (biased != 0x7FF)  # neither zero (subnormal sums do not occur) nor non-finite
    mantissa = torch.where(counted, (bits & (2**52 - 1)) | 2**52, 0)
    shift = torch.where(counted, biased - (1075 + LOWEST_EXPONENT), 0)
    # Sums that are not counted have mantissa 0 and shift 0, so they add zeros to the lowest limbs.
    limb, shift = shift >> 5, shift & 31
    # mantissa << shift, as three 32-bit digits, within int64. The shift may be 0, and shifting by 64 is undefined.
    low, high = mantissa & 0xFFFFFFFF, mantissa >> 32
    low, high = low << shift, high << shift
    high = high + (low >> 32)
    for i, digit in enumerate((low & 0xFFFFFFFF, high & 0xFFFFFFFF, high >> 32)):
        limbs.index_add_(0, limb + i, digit)
    # Counted by tile, not by element: ranks add these up as integers, and only whether they are 0 matters.
    limbs[INF_LIMB].add_(sums.isinf().sum())
    limbs[NAN_LIMB].add_(sums.isnan().sum())


def first_nonfinite(flat: Tensor, sums: Tensor) -> Tensor:
    """Index of the first element of `flat` that is not finite, -1 if none: 0-dim int64."""
    none = torch.full((), -1, dtype=torch.int64, device=flat.device)
    if flat.numel() == 0:
        return none
    bad_tiles = sums.isfinite().logical_not_()
    if flat.device.type == "cpu" and not bad_tiles.any():
        return none
    # Indices stay on the device. `argmax`, which torch has for numbers only, returns the first of equal values.
    first_tile = bad_tiles.to(torch.uint8).argmax()
    indices = first_tile * TILE + torch.arange(TILE, device=flat.device)
    # In a shorter last tile the indices repeat its last element. `argmax` returns the first flag, so it never finds a
    # repeat.
    indices.clamp_(max=flat.numel() - 1)
    bad_elements = flat.detach()[indices].isfinite().logical_not_()
    # `take`, because `indices[...]` with one position has the host read it, and so wait for the device.
    return torch.where(bad_tiles.any(), indices.take(bad_elements.to(torch.uint8).argmax()), none)


def norm_from_limbs(limbs: NormLimbs) -> float:
    """Correctly rounded fp64 root of the exact sum; NaN or infinity if a tile was. Waits for the device."""
    *digits, num_inf, num_nan = limbs.tolist()
    if num_nan:
        return math.nan
    if num_inf:
        return math.inf
    total = sum([digit << (32 * i) for i, digit in enumerate(digits)])
    # Take at least 64 significant bits of the root. A sticky last bit tells whether anything was cut off, so that the
    # conversion to float rounds correctly.
    extra = max(0, 130 - total.bit_length())
    # The root halves the exponent, so the shift must be even. LOWEST_EXPONENT is even, too.
    extra += extra % 2
    scaled = total << extra
    root = math.isqrt(scaled)
    sticky = 2 * root + (root * root != scaled)
    return math.ldexp(float(sticky), (LOWEST_EXPONENT - extra) // 2 - 1)


def max_abs(flat: Tensor) -> Tensor:
    """Largest magnitude of `flat` (infinity norm): 0-dim fp32 on its device; NaN if one is, 0 if empty."""
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=flat.device)
    with torch.no_grad():
        smallest, largest = flat.detach().aminmax()
        return torch.maximum(largest, -smallest).float()
