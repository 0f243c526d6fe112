"""The exponential moving average of the weights, as a state of their chunks: `ShardedOptimizer(..., ema=0.999)`.

It is of the fp32 masters, and has the bits of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn` over
fp32 weights: the first step copies, and each further one does ema = ema + (1 - decay) * (weight - ema), also of
parameters that it had no gradient of. A skipped step changes nothing. The average rests as moments do, in shards, on
the tier of the chunk's optimizer state, under the name "ema": plans count it, state dicts and checkpoints have it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from gemini.access.states import States
from gemini.errors import GeminiError
from gemini.memory.transfer import ready
from gemini.optimizer.chunk_states import EMA, ChunkOptimizerState, ChunkStates
from gemini.runtime.chunk import ManagedParameter
from gemini.runtime.manager import ChunkManager

_TILE_NUMEL = 2**20
"""Elements that are averaged at once: a split master is joined for them, and stays in the processor's caches."""


class Average:
    """The average of one optimizer's parameters, `optimizer.ema`."""

    def __init__(self, decay: float, manager: ChunkManager, states: ChunkStates) -> None:
        """decay: from 0 to 1, how much of the average each step keeps."""
        self.decay = decay
        self._step = manager.step
        self._states = states
        self._parts = States(manager)
        self._is_shown = False

    def update(self) -> None:
        """A step has updated weights: average them. Local."""
        for chunk in self._states.trained:
            state = self._states.by_chunk[chunk.index]
            for managed in chunk.parameters:
                if state.groups[managed.position] is not None:
                    self._update_one(state, managed)

    def _update_one(self, state: ChunkOptimizerState, managed: ManagedParameter) -> None:
        weights = self._parts.full_precision(managed.chunk)
        has_one = managed.position in state.averaged
        average = ready(state.region(EMA))
        for piece in managed.pieces:
            for start in range(piece.shard_start, piece.shard_start + piece.numel, _TILE_NUMEL):
                numel = min(_TILE_NUMEL, piece.shard_start + piece.numel - start)
                target = average[start : start + numel]
                now = weights.read(start, numel).to(target.device, target.dtype)
                if has_one:
                    target.lerp_(now, 1 - self.decay)
                else:
                    target.copy_(now)
        state.note_averaged(managed.position)

    def refuse_shown(self, what: str) -> None:
        """Raises GeminiError for `what` inside `weights()`: it would take the average for the weights. Local."""
        if self._is_shown:
            raise GeminiError(f"{what} inside optimizer.ema.weights(), where the average is in the weights' place")

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside, the model's weights are the average: to evaluate, export, `state_dict()` or `save_pretrained`.

        Collective, between steps. The weights wait where the average rests, so it takes no memory; they come back with
        the bits that they had. Parameters without an average, such as frozen ones, stay as they are.

        Raises GeminiError inside a forward or backward, between backward and step, and inside itself. Inside, steps,
        the optimizer's state dict and checkpoints raise it.

        Example:
            >>> with optimizer.ema.weights():
            ...     averaged = model.state_dict()
        """
        self.refuse_shown("weights()")
        self._step.check_idle("optimizer.ema.weights()")
        if self._step.grads.num_backwards:
            raise GeminiError("optimizer.ema.weights() between backward() and step(): call it after the step")
        self._exchange()
        self._is_shown = True
        try:
            yield
        finally:
            self._exchange()
            self._is_shown = False

    @torch.no_grad()
    def _exchange(self) -> None:
        """Put the average into the weights' place, and the weights into that of the average. Collective."""
        with self._step.publishing(), torch.inference_mode(False):
            for chunk in self._states.trained:
                state = self._states.by_chunk[chunk.index]
                weights, average = self._parts.full_precision(chunk), self._parts.of_optimizer(chunk, EMA)
                for managed in chunk.parameters:
                    # The same on all ranks: all of them average all parameters.
                    if managed.position in state.averaged:
                        now: Tensor = weights.local(managed)
                        weights.set_local(managed, average.local(managed))
                        average.set_local(managed, now)
