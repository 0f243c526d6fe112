"""The host constants of one Adam update, computed in fp64 and rounded once to fp32.

Every implementation of the written order (torch operations, C++, Triton) gets its constants from here, so that all of
them round `lr / bc1` and `1 - beta` alike.
"""

import ctypes
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor


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
