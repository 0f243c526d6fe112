"""`StepReport`: what `optimizer.last_step` says of a step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepReport:
    """What the last step did. Equal on all ranks."""

    number: int  # counts steps from 1, also those that were skipped and those without a gradient
    grad_norm: float  # L2, or what clip_grad_norm_() was asked for, before clipping and without the loss scale
    clip: float  # what gradients were multiplied by
    skipped: str | None  # the first parameter whose gradient was not finite: nothing was updated
    loss_scale: float  # with which the step's backwards ran; 1 without one
