"""What a model's chunks and parameters need of their optimizer, without the optimizer itself (`OptimizerPart`)."""

from __future__ import annotations

from gemini.chunks.chunk import ManagedParameter
from gemini.optimizer.chunk_states import ChunkStates
from gemini.optimizer.clipping import Clipping
from gemini.optimizer.scaling import Scaling


class ChunkOptimizer:
    """The states, the loss scale and the clip of one optimizer."""

    def __init__(self, states: ChunkStates, scaling: Scaling, clipping: Clipping) -> None:
        self.states = states
        self._scaling = scaling
        self._clipping = clipping

    def forget_summary(self) -> None:
        """Take the norm again: gradients were changed by hand. Local."""
        self._clipping.summary = None

    def factors_to_come(self, managed: ManagedParameter) -> tuple[float, float]:
        """What the next step will multiply `managed`'s gradient by: 1 / loss scale, and what it is clipped by."""
        scale, is_ours = self._scaling.value, self.states.group(managed) is not None
        return 1.0 / scale, self._clipping.coefficient(scale) if is_ours else 1.0

    def before_gradient_write(self) -> None:
        """Apply a requested clip before a gradient is changed by hand. Local."""
        if self._clipping.summary is not None:
            self._clipping.take_effect(self._scaling.value, self.states.ungrouped())
