"""`StepReport`: the outcome of a step, which `optimizer.last_step` has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """The outcome of a step. Equal on all ranks."""

    number: int  # of the step, from 1. Skipped steps and those without a gradient count
    grad_norm: float  # L2, or the norm that clip_grad_norm_() requested, before clipping and without the loss scale
    clip: float  # the factor by which gradients were clipped
    skipped: str | None  # the first parameter with a non-finite gradient, for which nothing was updated
    loss_scale: float  # the loss scale of the step's backwards; 1 without one
