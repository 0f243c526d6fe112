"""Gradient clipping by the exact, order-independent global norm, for plain models.

Call and formula are those of `torch.nn.utils.clip_grad_norm_`, but the norm is that of `optim.norm`. It does not depend
on how gradients are divided or in which order they are added, so a sharded run has the same bits.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from optim.dispatch import accumulate_sum_of_squares_
from optim.norm import NormLimbs, first_nonfinite, max_abs, norm_from_limbs, tile_sums, zero_norm_limbs
from optim.piece import GRAD_DTYPES, in_memory_order


def clip_coefficient(norm: float, max_norm: float) -> float:
    """min(1, max_norm / (norm + 1e-6)) in fp64, for the caller to round once; NaN for a NaN norm, as in torch.

    Raises ValueError for a `max_norm` that is negative or NaN.
    """
    if not max_norm >= 0.0:
        raise ValueError(f"max_norm must be a number >= 0, found {max_norm}")
    quotient = max_norm / (norm + 1e-6)
    # Not `min(1.0, quotient)`, which is 1.0 for a NaN.
    return 1.0 if quotient >= 1.0 else quotient


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients of a plain model in place so that their norm is at most `max_norm`. Local.

    Call and formula are those of `torch.nn.utils.clip_grad_norm_`; the 2-norm is exact, whatever the order of the
    gradients, so a sharded run has the same bits.

    Args:
        parameters: the parameters. Those without a gradient are ignored.
        max_norm: the largest norm, at least 0.
        norm_type: 2 or inf.
        error_if_nonfinite: True raises RuntimeError for a norm that is not finite, before any gradient changes.

    Returns the norm before clipping, 0-dim fp32. Raises ValueError for other arguments, and RuntimeError if no
    parameter has a gradient.

    Example:
        >>> module(torch.ones(2, 8)).sum().backward()
        >>> norm = clip_grad_norm_(module.parameters(), max_norm=1.0)
        >>> torch.linalg.vector_norm(module.weight.grad) <= 1.0 < norm
        tensor(True)
    """
    norm_type = float(norm_type)
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type must be 2 or inf, found {norm_type}")
    # Called for its check: a bad `max_norm` raises before any gradient is read.
    clip_coefficient(0.0, max_norm)
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    # A parameter given twice is still one parameter: scaled once, counted once.
    holders = list(dict.fromkeys(parameters))
    gradients = [p.grad.detach() for p in holders if p.grad is not None]
    if not gradients:
        raise RuntimeError(
            f"none of the {len(parameters)} parameters has a gradient, so there is nothing to clip. "
            "torch returns 0 here, which hides a missing backward() or an early zero_grad()"
        )
    _check(gradients)
    with torch.no_grad():
        norm = _global_norm(holders) if norm_type == 2.0 else _infinity_norm(gradients)
        # Only the error looks for the culprit, because the host waits for the device at every gradient that it looks
        # at.
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(f"the gradient norm is {norm}, so it cannot be clipped: {_culprit(holders)}")
        coefficient = clip_coefficient(norm, float(max_norm))
        for gradient in gradients:
            # A NaN norm has a NaN coefficient, which makes all gradients NaN, as in torch.
            gradient.mul_(coefficient)
    return torch.tensor(norm, dtype=torch.float32, device=gradients[0].device)


def _check(gradients: list[Tensor]) -> None:
    for gradient in gradients:
        if gradient.layout != torch.strided or gradient.dtype not in GRAD_DTYPES:
            raise ValueError(
                f"gradients must be dense fp32, bf16 or fp16, found {gradient.layout} {gradient.dtype} "
                f"of shape {tuple(gradient.shape)}"
            )


def _global_norm(parameters: list[Tensor]) -> float:
    # One set of limbs a device, so that the host waits for each device once and not for each gradient.
    by_device: dict[torch.device, NormLimbs] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.detach()
            limbs = by_device.setdefault(gradient.device, zero_norm_limbs(gradient.device))
            # Tiles are cut in the order of the parameter's memory, whatever the gradient's is, as in a chunk.
            accumulate_sum_of_squares_(limbs, in_memory_order(gradient, parameter))
    limbs = zero_norm_limbs()
    for local in by_device.values():
        limbs += local.cpu()
    return norm_from_limbs(limbs)


def _infinity_norm(gradients: list[Tensor]) -> float:
    by_device: dict[torch.device, list[Tensor]] = {}
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(max_abs(gradient.contiguous().view(-1)))
    # Python's max would drop a NaN; torch's keeps it.
    return float(torch.stack([torch.stack(parts).max().cpu() for parts in by_device.values()]).max())


def _culprit(parameters: list[Tensor]) -> str:
    for position, parameter in enumerate(parameters):
        if parameter.grad is None:
            continue
        flat = parameter.grad.contiguous().view(-1)
        index = int(first_nonfinite(flat, tile_sums(flat)))
        if index >= 0:
            found = f"{float(flat[index])} at flat index {index}"
            return f"parameter {position} of shape {tuple(parameter.shape)} has {found}"
    return "all gradients are finite, but their norm overflows"
