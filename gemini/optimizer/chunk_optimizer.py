"""The part of an optimizer that chunks and their parameters refer to (`OptimizerPart`).

It has the states, and the factors that the next step applies to gradients: the loss scale, and the clip that
`optimizer.clip_grad_norm_()` requested. The clip is applied inside the update, which saves a pass over all gradients.
If the user changes a gradient by hand before the step, it must be a clipped one, as in plain PyTorch. So the clip is
applied at that moment, and the norm that was computed is no longer that of the gradients.
"""

from __future__ import annotations

import math

from gemini.chunks.chunk import ManagedParameter
from gemini.errors import GeminiError
from gemini.manager.grads import GradStore
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.scaling import Scaling
from gemini.optimizer.summary import GradientSummary
from optim import clip_coefficient


class ChunkOptimizer:
    """The states of one optimizer, and what is known about the gradients of its next step."""

    def __init__(self, gradients: GradStore, states: ChunkStates, scaling: Scaling, kind: str) -> None:
        """kind: the name of the user's optimizer."""
        self.states = states
        self.scaling = scaling
        self.kind = kind
        self.num_steps = 0  # with skipped ones, and those before a checkpoint that was loaded
        # The step uses the summary of `clip_grad_norm_()` again, because another one would take a second pass over all
        # gradients and a second all-reduce.
        self.summary: GradientSummary | None = None
        self.requested: tuple[float, float] | None = None  # (max_norm, norm type) of `clip_grad_norm_()`
        self._gradients = gradients
        self._seen = 0, 0  # `_now()` when `summary` was computed

    def count_step(self) -> int:
        """Count a step. Returns its number, from 1."""
        self.num_steps += 1
        return self.num_steps

    def count_from(self, num_steps: int) -> None:
        """There were this many steps before, in another process."""
        self.num_steps = num_steps

    def request(self, max_norm: float, norm_type: float) -> None:
        """Clip the next step's gradients so. `saw` follows, with their norm."""
        self.requested = max_norm, norm_type

    def saw(self, summary: GradientSummary) -> None:
        """Keep a summary of the present gradients for the step."""
        self.summary, self._seen = summary, self._now()

    def before_step(self) -> None:
        """Raises GeminiError if gradients came after the clip, which would be clipped by a norm without them."""
        # The gradients that were summarised have been discarded, so the request is void.
        if self._seen[0] != self._now()[0]:
            self.reset_clipping()
        if self.summary is not None and self._seen != self._now():
            raise GeminiError("backward() after clip_grad_norm_(): clip again, after the last backward of the step")

    def reset_clipping(self) -> None:
        """Forget summary and clip, because the step used the gradients, or they were discarded."""
        self.summary = self.requested = None

    def factors_to_come(self, managed: ManagedParameter) -> tuple[float, float]:
        """The factors that the next step applies to `managed`'s gradient: 1 / loss scale, and the clip."""
        # A clip changes the gradients of this optimizer's groups only.
        is_ours = self.states.group(managed) is not None
        return 1.0 / self.scaling.value, self._coefficient() if is_ours else 1.0

    def before_gradient_write(self) -> None:
        """Apply a requested clip to all gradients and forget their norm, before one is changed by hand. Local."""
        if self.summary is None:
            return
        coefficient = self._coefficient()
        if coefficient != 1.0:
            self._gradients.leftovers.multiply(coefficient, self.states.ungrouped())
        # The gradients are clipped. An infinite bound keeps the step from clipping them again: without a request it
        # would clip to the bound that the optimizer was made with.
        if self.requested is not None:
            self.requested = math.inf, self.requested[1]
        self.summary = None

    def _coefficient(self) -> float:
        """The clip of the next step. 1 if there is none, or if a non-finite gradient will skip the step."""
        if self.summary is None or self.requested is None or self._seen != self._now():
            return 1.0
        # The norm is infinite or NaN here. A clip by it would make every gradient 0 or NaN.
        if self.summary.non_finite is not None:
            return 1.0
        # The gradients were summarised with the loss scale in them, and the bound is one of gradients without it.
        return clip_coefficient(self.summary.norm / self.scaling.value, self.requested[0])

    def _now(self) -> tuple[int, int]:
        return self._gradients.num_forgotten, self._gradients.num_backwards
