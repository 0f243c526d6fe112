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

import numpy as np
import torch
from torch import Tensor

from optim.master import join_master_, round_master_, scratch, split_master_, tile_numel
from optim.piece import AdamPiece, AdamScalars, Constants

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
        part = piece.narrow(start, min(tile, numel - start))
        if part.remainder is None:
            _update_tile(part.weight, part, scalars, factors)
            if part.half is not None:
                round_master_(part.half, part.weight)
        else:
            master = scratch("adam master", part.weight.numel(), torch.float32, device)
            join_master_(master, part.weight, part.remainder)
            _update_tile(master, part, scalars, factors)
            split_master_(part.weight, part.remainder, master)


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
