"""Adam in the written order, as plain torch operations: what every other kernel reproduces bit for bit.

    g = g * inv_scale * clip            [L2: g += wd * p]
    m = (b1 * m) + ((1 - b1) * g)
    v = (b2 * v) + (((1 - b2) * g) * g)
    d = (sqrt(v) / sqrt(bc2)) + eps     [decoupled: p = p - ((lr * wd) * p)]
    p = p - (((lr / bc1) * m) / d)

All in fp32, every operation rounded on its own: no `lerp`, `addcmul`, `addcdiv` or `add(alpha=)`, which
contract. A multiplication or division by exactly 1 is left out, which changes no bit, and so is a weight
decay that is 0. The work goes through tiles that stay in cache; the border of a tile changes no bit either.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from optim.scalars import AdamScalars, adam_scalars
from optim.scratch import scratch, tile_numel
from optim.square_root import prefers_wide_square_root, square_root_

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def adam_update_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
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
) -> None:
    """One update, in place, of `param`, `exp_avg` and `exp_avg_sq`; `grad` is only read.

    All are 1-D, contiguous, of one length, on one device; all fp32 but `grad`, which may be bf16 or fp16.
    `step` is the number of this update, from 1.
    """
    _check(param, grad, exp_avg, exp_avg_sq)
    scalars = adam_scalars(
        step=step,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=weight_decay,
        adamw_mode=adamw_mode,
        bias_correction=bias_correction,
        maximize=maximize,
        inv_scale=inv_scale,
        clip=clip,
    )
    numel, device = param.numel(), param.device
    if numel == 0:
        return
    tile = min(numel, tile_numel(device))
    scaled = scratch("adam gradient", tile, torch.float32, device)
    term = scratch("adam term", tile, torch.float32, device)
    denom = scratch("adam denominator", tile, torch.float32, device)
    wide = scratch("adam root", tile, torch.float64, device) if prefers_wide_square_root(device) else None
    factors = _Factors.of(scalars, device)
    with torch.no_grad():
        for p, g, m, v in zip(*(t.detach().split(tile) for t in (param, grad, exp_avg, exp_avg_sq))):
            n = p.numel()
            if n < tile:
                scaled, term, denom = scaled[:n], term[:n], denom[:n]
                wide = None if wide is None else wide[:n]
            g = _scaled_gradient(g, p, scaled, term, scalars, factors)
            _update_moments(g, m, v, term, factors)
            _denominator(denom, v, wide, scalars, factors)
            _update_parameter(p, m, denom, term, scalars, factors)


class _Factors(NamedTuple):
    """`AdamScalars` as 0-dim fp32 tensors, which cost torch half the dispatch of Python floats."""

    grad_scale: Tensor
    clip: Tensor
    beta1: Tensor
    one_minus_beta1: Tensor
    beta2: Tensor
    one_minus_beta2: Tensor
    root_bias2: Tensor
    eps: Tensor
    step_size: Tensor
    l2: Tensor
    decay: Tensor

    @classmethod
    def of(cls, scalars: AdamScalars, device: torch.device) -> "_Factors":
        factors = cls(*torch.tensor(scalars, dtype=torch.float32, device="cpu").unbind())
        if device.type == "cpu":
            return factors
        # CUDA multiplies by the reciprocal of a host scalar; only a divisor on the device is a division.
        divisor = torch.full((), scalars.root_bias2, dtype=torch.float32, device=device)
        return factors._replace(root_bias2=divisor)


def _scaled_gradient(
    g: Tensor, p: Tensor, scaled: Tensor, term: Tensor, scalars: AdamScalars, factors: _Factors
) -> Tensor:
    """The fp32 gradient that the moments see: `g` itself if there is nothing to do, else `scaled`."""
    if g.dtype != torch.float32:
        g = scaled.copy_(g)
    if scalars.grad_scale != 1.0:
        g = torch.mul(g, factors.grad_scale, out=scaled)
    if scalars.clip != 1.0:
        g = torch.mul(g, factors.clip, out=scaled)
    if scalars.l2 != 0.0:
        torch.mul(p, factors.l2, out=term)
        g = torch.add(g, term, out=scaled)
    return g


def _update_moments(g: Tensor, m: Tensor, v: Tensor, term: Tensor, factors: _Factors) -> None:
    torch.mul(g, factors.one_minus_beta1, out=term)
    m.mul_(factors.beta1).add_(term)
    torch.mul(g, factors.one_minus_beta2, out=term)
    term.mul_(g)
    v.mul_(factors.beta2).add_(term)


def _denominator(
    denom: Tensor, v: Tensor, wide: Tensor | None, scalars: AdamScalars, factors: _Factors
) -> None:
    square_root_(denom, v, wide)
    if scalars.root_bias2 != 1.0:
        denom.div_(factors.root_bias2)
    denom.add_(factors.eps)


def _update_parameter(
    p: Tensor, m: Tensor, denom: Tensor, term: Tensor, scalars: AdamScalars, factors: _Factors
) -> None:
    if scalars.decay != 0.0:
        torch.mul(p, factors.decay, out=term)
        p.sub_(term)
    torch.mul(m, factors.step_size, out=term)
    term.div_(denom)
    p.sub_(term)


def _check(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be 1-D and contiguous, found {tuple(tensor.shape)} {tensor.stride()}"
            )
        if tensor.numel() != param.numel() or tensor.device != param.device:
            raise ValueError(
                f"{name} must match param ({param.numel()} elements on {param.device}), "
                f"found {tensor.numel()} elements on {tensor.device}"
            )
        allowed = GRAD_DTYPES if name == "grad" else (torch.float32,)
        if tensor.dtype not in allowed:
            raise ValueError(f"{name} must be one of {allowed}, found {tensor.dtype}")
