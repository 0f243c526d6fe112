"""Applies the loss scale to losses, and tells backwards of scaled losses from others, which are refused."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.manager.grads import GradStore
from gemini.memory.untraced import A_HOOK, never_traced
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.loss_scale import LossScale
from gemini.optimizer.step_report import StepReport


class Scaling:
    """The loss scale of one optimizer. It is active while fp16 weights are trained."""

    def __init__(self, gradients: GradStore, states: ChunkStates, scale: LossScale) -> None:
        self._gradients = gradients
        self._states = states
        self._scale = scale

    @property
    def active(self) -> LossScale | None:
        return self._scale if self._states.trains_fp16 else None

    @property
    def value(self) -> float:
        """The factor of losses; 1 without loss scaling."""
        return 1.0 if self.active is None else self._scale.scale

    def of(self, loss: Tensor) -> Tensor:
        """The scaled loss. A hook on it marks the backward that passes through it."""
        if self.active is None:
            return loss
        # In fp32: a loss in fp16 would overflow at most scales.
        scaled = loss.float() * self._scale.scale
        # A loss without a graph takes no hook. Its backward raises torch's own error, as for a plain module.
        if scaled.requires_grad:
            scaled.register_hook(self._on_scaled_loss)
        return scaled

    @never_traced(A_HOOK)
    def _on_scaled_loss(self, grad: Tensor) -> None:
        self._gradients.begin_scaled_loss()
        # `end_backward()` resets the mark too, but does not run if this backward reaches nothing of the model.
        torch.autograd.Variable._execution_engine.queue_callback(self._gradients.end_scaled_loss)

    def after_step(self, skipped: str | None) -> None:
        """Adjust the scale. skipped: the parameter whose gradient was not finite, so that nothing was updated."""
        scale = self.active
        if scale is None:
            return
        before = scale.scale
        scale.update(skipped is not None)
        # Gradients that a step left (parameters in no group) still have the old scale.
        if scale.scale != before:
            self._gradients.leftovers.rescale(scale.scale / before)

    def refuse_endless_skips(self, report: StepReport | None) -> None:
        """Raises GeminiError if the last step was one of many that were skipped in a row, at the least scale."""
        if self.active is not None and report is not None and report.skipped is not None:
            self._scale.refuse_endless_skips(report.skipped, report.loss_scale)
