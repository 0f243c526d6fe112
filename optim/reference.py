"""Adam in the written order, as plain torch operations. Every other kernel reproduces it bit for bit.

    g = g * inv_scale * clip            [L2: g += wd * p]
    m = (b1 * m) + ((1 - b1) * g)
    v = (b2 * v) + (((1 - b2) * g) * g)
    d = (sqrt(v) / sqrt(bc2)) + eps     [decoupled: p = p - ((lr * wd) * p)]
    p = p - (((lr / bc1) * m) / d)

All in fp32, and every operation is rounded separately: no `lerp`, `addcmul`, `addcdiv` or `add(alpha=)`, which
contract. Multiplications and divisions by exactly 1, and a weight decay of 0, are left out, which changes no bit. The
work proceeds in tiles that stay in cache, including the casts of half-precision weights. Borders of tiles change no bit
either.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import cache, lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from optim.master import BF16_NAN_BITS, join_master_, round_master_, scratch, split_master_, tile_numel
from optim.piece import BLOCK, AdamPiece, AdamScalars, Constants, Draws, round_to_float32

# -- A correctly rounded fp32 square root.
#
# `torch.sqrt` on the CPU is not correctly rounded: about 20 % of its results are 1 ulp off. There are two exact ways,
# chosen by speed. NumPy's `sqrt` is the processor's instruction, but runs on one thread. torch's fp64 `sqrt` is exact
# after rounding to fp32, but slow; `1 / (1 / sqrt(v))` in fp64, which torch computes with the processor's instructions,
# takes half the time. Its three roundings have a relative error below 3 * 2**-53 in all. The root of an fp32 number is
# either an fp32 number or at least 2**-51 away from every border between two of them, so the final rounding to fp32 is
# correct. Zeros, infinities and negative numbers give the results of IEEE 754.


# NumPy takes 0.3 ns per element on its one thread. fp64 takes 1.2 ns divided by torch's threads.
MAX_NUMPY_THREADS = 3


def prefers_wide_square_root(device: torch.device) -> bool:
    """Whether `square_root_` needs the fp64 scratch buffer `wide` for tensors on `device`."""
    return device.type != "cpu" or torch.get_num_threads() > MAX_NUMPY_THREADS


def square_root_(out: Tensor, values: Tensor, wide: Tensor | None) -> None:
    """Write the roots of `values` to `out`, both fp32, contiguous. wide: fp64 scratch as long, or None to use NumPy."""
    if wide is None:
        # The root of a negative number is NaN, as in torch; NumPy would also warn.
        with np.errstate(invalid="ignore"):
            np.sqrt(values.numpy(), out=out.numpy())
        return
    wide.copy_(values)
    if values.device.type == "cpu":
        wide.rsqrt_().reciprocal_()
    else:
        wide.sqrt_()  # correctly rounded on GPUs, where rsqrt is not
    out.copy_(wide)


# -- Moments in 8 bits: blockwise dynamic quantisation (Dettmers et al. 2021, "8-bit Optimizers via Block-wise
# Quantization", arXiv 2110.02861).
#
# A block of 256 elements has one fp32 scale s, and each element is s times one of 256 numbers in [-1, 1], the dynamic
# map, which has seven decades with ever more numbers. The maps are those of bitsandbytes' `create_dynamic_map`: a
# signed one for the first moment and an unsigned one for the second.
#
#     s = the element of largest magnitude, the positive one of two
#     y = |(x * f) * (1 / (s * f))|      f = 2**64 if |s| < 2**-64 else 1: no reciprocal overflows
#     d = the decade of y, of the eight borders between zero, the seven decades and 1 the number below y
#     g = ((y * 10**(6 - d)) - 0.1) * (1 / 0.9) + 1       in [1, 2): where in its decade
#     k = the integer part of g * 2**d                    (of second moments: g * 2**(d + 1), less one)
#
# Borders lie in the middle between two numbers, and so do the integers that g passes: the nearest number is chosen, but
# for what lies within the rounding of this arithmetic of the middle. All of it is fp32, each operation rounded by
# itself, and needs no table: a lookup for each element costs processors more than all of an update. Three rules
# differ from the publication; its dequantisation reads all:
#
# 1. The scale keeps the sign of its element. The signed map has 1 but not -1: with |s|, a block whose largest element
#    is negative would lose 0.7 % of it whenever it is quantised, with a gradient of zero too. So quantising what was
#    dequantised gives the same bytes (for scales above 1e-36; below, elements may be subnormal numbers).
# 2. A second moment above zero is not rounded to zero, but to the map's least number. An element whose root became zero
#    beside a first moment that is not would be divided by eps alone, and jump.
# 3. What is not finite is stored as zero, in both moments of the element, and no scale is taken from it: one gradient
#    that is NaN makes its own weight NaN, as with fp32 moments, and not the 255 others of its block.
#
# The byte of a first moment is its number's index in the sorted map with the low seven bits inverted, so that the byte
# 0 means zero in both maps: memory of zeros, and the padding of a tensor's last block, holds moments of zero.


_ZERO = 127  # the index of 0 in the sorted signed map
_NUM_DECADES = 7
_TINY_SCALE = 2.0**-64
_LARGEST_PLACE = 2.0 - 2.0**-23


class DynamicMap(NamedTuple):
    """One of the two maps, and the constants with which its nearest number is found. All are fp32 values."""

    entries: Tensor
    """(256,): the number that each byte means, divided by the block's scale. On the CPU."""
    borders: tuple[float, ...]
    """Eight: between 0 and the first decade, between a decade and the next, and between the last one and 1."""
    powers: tuple[float, ...]
    """Seven: 10**(6 - d)."""
    sizes: tuple[float, ...]
    """Seven: by what the place in a decade is multiplied, 2**d or 2**(d + 1)."""
    first: int
    """What is subtracted from that product, 0 or 1."""
    top: int
    """The index of 1."""


PLACE_FACTOR = round_to_float32(1.0 / 0.9)
TENTH = round_to_float32(0.1)


@cache
def dynamic_map(is_signed: bool) -> DynamicMap:
    """The map of first moments, or that of second ones."""
    decades = [_decade(number, is_signed) for number in range(_NUM_DECADES)]
    positive = [each for decade in decades for each in decade]
    half = torch.tensor([0.0, *positive, 1.0], dtype=torch.float32, device="cpu")
    if is_signed:
        ordered = torch.cat([-half[1:-1].flip(0), half])  # 1 has no counterpart
        entries = ordered[torch.arange(256, device="cpu") ^ _ZERO]
    else:
        entries = half
    ends = [[0.0], *decades, [1.0]]
    borders = [round_to_float32((low[-1] + high[0]) / 2) for low, high in pairwise(ends)]
    if not is_signed:
        borders[0] = 0.0
    powers = tuple(round_to_float32(10.0 ** (6 - number)) for number in range(_NUM_DECADES))
    sizes = tuple(float(len(decade)) for decade in decades)
    return DynamicMap(entries, tuple(borders), powers, sizes, 0 if is_signed else 1, len(positive) + 1)


def _decade(number: int, is_signed: bool) -> list[float]:
    """The numbers in [0.1, 1] * 10**(number - 6): middles of 2**number equal parts of it; twice as many unsigned."""
    # Exact until they are rounded to fp32: torch's `linspace`, of which bitsandbytes makes them, has other last bits in
    # other versions.
    parts = 2**number if is_signed else 2 ** (number + 1)
    middles = (Fraction(1, 10) + Fraction(9, 10) * Fraction(2 * part + 1, 2 * parts) for part in range(parts))
    return [round_to_float32(float(middle / 10 ** (6 - number))) for middle in middles]


def quantize_(codes: Tensor, scales: Tensor, values: Tensor, is_signed: bool) -> None:
    """Write `values` (fp32) to `codes` (uint8), both (numel,), and `scales`, (blocks,) fp32. All on one device.

    The first element is the first of a block. Elements that the last block lacks count as zeros, and so do those that
    are not finite.
    """
    numel, num_blocks = values.numel(), scales.numel()
    if not numel:
        return
    x = scratch("quantized blocks", num_blocks * BLOCK, torch.float32, values.device)
    x[:numel].copy_(values)
    x[numel:].zero_()
    x = x.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).view(num_blocks, BLOCK)
    magnitude = x.abs().amax(dim=1, keepdim=True)
    scale = torch.where((x == magnitude).any(dim=1, keepdim=True), magnitude, -magnitude)
    factor = torch.where(magnitude < _TINY_SCALE, 2.0**64, 1.0)
    y = (x * factor) * torch.where(scale == 0.0, 1.0, scale * factor).reciprocal()
    if is_signed:
        index = _index_of(y.abs(), dynamic_map(True))
        code = torch.where(y < 0.0, (_ZERO - index).clamp_(min=0), _ZERO + index).bitwise_xor_(_ZERO)
    else:
        code = _index_of(y, dynamic_map(False))
    scales.copy_(scale.view(-1))
    codes.copy_(code.view(-1)[:numel])


def _index_of(y: Tensor, its: DynamicMap) -> Tensor:
    """The index, int32, of the nearest of zero and the positive numbers of a map."""
    power, size = torch.full_like(y, its.powers[0]), torch.full_like(y, its.sizes[0])
    for number in range(1, _NUM_DECADES):
        is_above = y > its.borders[number]
        power.masked_fill_(is_above, its.powers[number])
        size.masked_fill_(is_above, its.sizes[number])
    place = power.mul_(y).sub_(TENTH).mul_(PLACE_FACTOR).add_(1.0).clamp_(1.0, _LARGEST_PLACE)
    index = place.mul_(size).int() - its.first
    index.masked_fill_(y <= its.borders[0], 0)
    return index.masked_fill_(y > its.borders[-1], its.top)


def dequantize_(values: Tensor, codes: Tensor, scales: Tensor, is_signed: bool, first: int = 0) -> None:
    """Write what `codes` and `scales` mean to `values`, (numel,) fp32.

    first: the place of the first code in the first scale's block.
    """
    entries = dynamic_map(is_signed).entries.to(codes.device)
    torch.index_select(entries, 0, codes.int(), out=values)
    if not first and not values.numel() % BLOCK:
        values.view(-1, BLOCK).mul_(scales.unsqueeze(1))
    else:
        place = torch.arange(first, first + values.numel(), device=codes.device).div_(BLOCK, rounding_mode="floor")
        values.mul_(scales[place])


def to_bfloat16_even_(out: Tensor, values: Tensor) -> None:
    """Round `values` (fp32) to bf16 `out`, to nearest even; every NaN becomes 0x7fc0."""
    out.copy_(values)
    # torch's conversion of many elements has other NaNs than that of few.
    out.view(torch.int16).masked_fill_(values.isnan(), BF16_NAN_BITS)


# -- Moments in 16 bits that are rounded stochastically: away from zero with the probability of the part that is cut
# off, so that the mean over steps is the unrounded moment. Rounding to nearest leaves a second moment standing still
# where it changes by less than half of its last place.
#
# The random number of an element is a function of seed, step and its place in its tensor: a counter-based generator.
# The place is mixed twice by a bijection of 32 bits (xor-shifts and multiplications by the constants that C. Wellons'
# "hash prospector" has found to have little bias), once behind each half of the key. The lower half rounds the first
# moment, the upper one the second. Elements 2**32 places apart have the same number.


_MASK = 0xFFFFFFFF
_FACTORS = (0x7FEB352D, 0x846CA68B)


@lru_cache(maxsize=64)
def key_of_draws(seed: int, step: int) -> int:
    """The key, 64 bits, of the random numbers of one step: that of `splitmix64` after seed and step."""
    mask, key = 2**64 - 1, 0
    for number in (seed, step):
        key = (key + number + 0x9E3779B97F4A7C15) & mask
        key = ((key ^ key >> 30) * 0xBF58476D1CE4E5B9) & mask
        key = ((key ^ key >> 27) * 0x94D049BB133111EB) & mask
        key ^= key >> 31
    return key


def draws_of(draws: Draws, numel: int, device: torch.device) -> Tensor:
    """(numel,) int64: 32 random bits of each element from the first one of `draws` on."""
    # In 64 bits, of which the lower ones are those of unsigned products of 32 bits.
    h = torch.arange(draws.first, draws.first + numel, dtype=torch.int64, device=device).bitwise_and_(_MASK)
    h.bitwise_xor_(draws.key & _MASK)
    for number in range(2):
        h ^= h >> 16
        h.mul_(_FACTORS[0]).bitwise_and_(_MASK)
        h ^= h >> 15
        h.mul_(_FACTORS[1]).bitwise_and_(_MASK)
        h ^= h >> 16
        if not number:
            h.add_(draws.key >> 32).bitwise_and_(_MASK)
    return h


def to_bfloat16_drawn_(out: Tensor, values: Tensor, drawn: Tensor) -> None:
    """Round `values` (fp32) to bf16 `out`, away from zero if `drawn`, 16 bits, is large enough; NaN is 0x7fc0."""
    bits = values.view(torch.int32).long().bitwise_and_(_MASK)
    bits.add_(drawn).bitwise_right_shift_(16)
    out.view(torch.int16).copy_(bits.masked_fill_(values.isnan(), BF16_NAN_BITS))


# -- Adam in the written order, as plain torch operations. Every other kernel reproduces it bit for bit.
#
#     g = g * inv_scale * clip            [L2: g += wd * p]
#     m = (b1 * m) + ((1 - b1) * g)
#     v = (b2 * v) + (((1 - b2) * g) * g)
#     d = (sqrt(v) / sqrt(bc2)) + eps     [decoupled: p = p - ((lr * wd) * p)]
#     p = p - (((lr / bc1) * m) / d)
#
# All in fp32, and every operation is rounded separately: no `lerp`, `addcmul`, `addcdiv` or `add(alpha=)`, which
# contract. Multiplications and divisions by exactly 1, and a weight decay of 0, are left out, which changes no bit. The
# work proceeds in tiles that stay in cache, including the casts of half-precision weights. Borders of tiles change no
# bit either.
#
# Moments of 16 or 8 bits are widened to fp32 before all of this and rounded after it: p moves by the moments before
# they are rounded.


def update(pieces: Sequence[AdamPiece], scalars: AdamScalars) -> None:
    """One update, in place, of checked pieces on any device."""
    for part in [part for piece in pieces for part in piece.parts()]:
        if part.weight.numel():
            with torch.no_grad():
                _update_piece(part, scalars)


def _update_piece(piece: AdamPiece, scalars: AdamScalars) -> None:
    numel, device = piece.weight.numel(), piece.weight.device
    tile = min(numel, tile_numel(device))
    # Made once a piece: on CUDA `_factors` launches a kernel, which every tile would repeat.
    factors = _factors(scalars, device)
    for start in range(0, numel, tile):
        stored = piece.narrow(start, min(tile, numel - start))
        part = _with_wide_moments(stored)
        if part.remainder is None:
            _update_tile(part.weight, part, scalars, factors)
            if part.half is not None:
                round_master_(part.half, part.weight)
        else:
            master = scratch("adam master", part.weight.numel(), torch.float32, device)
            join_master_(master, part.weight, part.remainder)
            _update_tile(master, part, scalars, factors)
            split_master_(part.weight, part.remainder, master)
        _store_moments(stored, part)


def _with_wide_moments(stored: AdamPiece) -> AdamPiece:
    """The piece with its moments in fp32: itself, or with copies in scratch."""
    if stored.exp_avg.dtype is torch.float32:
        return stored
    wide = []
    for name, moment, scale in _moments_of(stored):
        values = scratch(f"wide {name}", moment.numel(), torch.float32, moment.device)
        if scale is None:
            values.copy_(moment)
        else:
            dequantize_(values, moment, scale, is_signed=name == "exp_avg")
        wide.append(values)
    return stored._replace(exp_avg=wide[0], exp_avg_sq=wide[1])


def _store_moments(stored: AdamPiece, part: AdamPiece) -> None:
    """Round the moments of `part` to those of `stored`, where the two are not the same."""
    if stored is part:
        return
    if stored.is_blockwise:
        is_lost = ~(part.exp_avg.isfinite() & part.exp_avg_sq.isfinite())
        for each in (part.exp_avg, part.exp_avg_sq):
            each.masked_fill_(is_lost, 0.0)
    drawn = None if stored.draws is None else draws_of(stored.draws, part.weight.numel(), part.weight.device)
    for (name, moment, scale), values in zip(_moments_of(stored), (part.exp_avg, part.exp_avg_sq), strict=True):
        if drawn is not None:
            to_bfloat16_drawn_(moment, values, drawn & 0xFFFF if name == "exp_avg" else drawn >> 16)
        elif scale is None:
            to_bfloat16_even_(moment, values)
        else:
            quantize_(moment, scale, values, is_signed=name == "exp_avg")


def _moments_of(piece: AdamPiece) -> tuple[tuple[str, Tensor, Tensor | None], ...]:
    return (
        ("exp_avg", piece.exp_avg, piece.exp_avg_scale),
        ("exp_avg_sq", piece.exp_avg_sq, piece.exp_avg_sq_scale),
    )


def _update_tile(p: Tensor, part: AdamPiece, scalars: AdamScalars, factors: Constants[Tensor]) -> None:
    numel, device = p.numel(), p.device
    # All of these are in use at once, so each needs a name of its own: a name gives the same memory again.
    names = ("adam gradient", "adam term", "adam denominator")
    scaled, term, denom = (scratch(name, numel, torch.float32, device) for name in names)
    wide = scratch("adam root", numel, torch.float64, device) if prefers_wide_square_root(device) else None
    # The parameter comes last: L2 decay reads its old value, and it moves by the new moments.
    g = _scaled_gradient(part.grad, p, scaled, term, scalars, factors)
    _update_moments(g, part.exp_avg, part.exp_avg_sq, term, factors)
    _denominator(denom, part.exp_avg_sq, wide, scalars, factors)
    _update_parameter(p, part.exp_avg, denom, term, scalars, factors)


def _factors(scalars: AdamScalars, device: torch.device) -> Constants[Tensor]:
    """The constants as 0-dim fp32 tensors, whose dispatch costs torch half that of Python floats."""
    # On the CPU also for CUDA pieces: torch passes a 0-dim CPU operand to a CUDA kernel by value, without a copy.
    factors = Constants(*torch.tensor(scalars, dtype=torch.float32, device="cpu").unbind())
    if device.type == "cpu":
        return factors
    # CUDA multiplies by the reciprocal of a divisor on the host, which rounds twice. Only one on the device divides.
    return factors._replace(root_bias2=torch.full((), scalars.root_bias2, dtype=torch.float32, device=device))


def _scaled_gradient(
    g: Tensor, p: Tensor, scaled: Tensor, term: Tensor, scalars: AdamScalars, factors: Constants[Tensor]
) -> Tensor:
    """The fp32 gradient that the moments see: `g` itself if there is nothing to do, else `scaled`."""
    # Every result goes to `scaled`, because the caller's gradient is only read.
    if g.dtype != torch.float32:
        g = scaled.copy_(g)
    if scalars.grad_scale != 1.0:
        g = torch.mul(g, factors.grad_scale, out=scaled)
    # A multiplication of its own: one by the product of both factors would round differently.
    if scalars.clip != 1.0:
        g = torch.mul(g, factors.clip, out=scaled)
    if scalars.l2 != 0.0:
        torch.mul(p, factors.l2, out=term)
        g = torch.add(g, term, out=scaled)
    return g


def _update_moments(g: Tensor, m: Tensor, v: Tensor, term: Tensor, factors: Constants[Tensor]) -> None:
    torch.mul(g, factors.one_minus_beta1, out=term)
    m.mul_(factors.beta1).add_(term)
    # From left to right, ((1 - b2) * g) * g: another order of the product has other bits.
    torch.mul(g, factors.one_minus_beta2, out=term)
    term.mul_(g)
    v.mul_(factors.beta2).add_(term)


def _denominator(
    denom: Tensor, v: Tensor, wide: Tensor | None, scalars: AdamScalars, factors: Constants[Tensor]
) -> None:
    square_root_(denom, v, wide)
    if scalars.root_bias2 != 1.0:
        denom.div_(factors.root_bias2)
    denom.add_(factors.eps)


def _update_parameter(
    p: Tensor, m: Tensor, denom: Tensor, term: Tensor, scalars: AdamScalars, factors: Constants[Tensor]
) -> None:
    if scalars.decay != 0.0:
        # torch's AdamW multiplies the parameter by `1 - lr * wd` instead, which rounds differently.
        torch.mul(p, factors.decay, out=term)
        p.sub_(term)
    torch.mul(m, factors.step_size, out=term)
    term.div_(denom)
    p.sub_(term)
