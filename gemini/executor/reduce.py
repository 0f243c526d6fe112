"""The reduction of one chunk's gradient: it goes to the other ranks, and the mean into its home.

A reduction is only started at first. It is finished when the next one starts, when its slot is wanted, or when the
backward ends. The mean is made in fp32 (fp64 for fp64) and rounded once, to the dtype in which the gradient rests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.chunks.gradient import ChunkGradient
from gemini.executor.grad_homes import GradHomes
from gemini.executor.grad_memory import GradMemory
from gemini.executor.scratch import Scratch
from gemini.executor.shared_homes import SharedHomes
from gemini.observe import Moving
from gemini.ranks.communicator import Communicator


@dataclass
class _InFlight:
    """A reduction that was started."""

    gradient: ChunkGradient
    gathered: Callable[[], Tensor]  # waits; the mean
    backward: int
    moving: Moving


@dataclass(eq=False)
class GradReducer:
    """Reduces one gradient at a time over several ranks."""

    memory: GradMemory
    homes: GradHomes
    shared: SharedHomes
    scratch: Scratch
    communicator: Communicator
    stage: int
    _in_flight: _InFlight | None = None

    def start(self, gradient: ChunkGradient, backward: int) -> None:
        """Send the open payload to the other ranks; its mean is one of backward number `backward`. Collective.

        The reduction in flight must be finished: both use the same scratch.
        """
        self.scratch.reset()
        moving = self.memory.moving(gradient, self.communicator.position.here, blocks=2)
        with moving:
            gathered = self._launch(gradient)
        self._in_flight = _InFlight(gradient, gathered, backward, moving)
        if self.stage == 0:
            self.finish()

    def _launch(self, gradient: ChunkGradient) -> Callable[[], Tensor]:
        """What is returned waits for the mean. Collective."""
        chunk, payload, scratch = gradient.chunk, gradient.payload, self.scratch
        assert payload is not None
        self.shared.before_reduction(chunk)
        rests_as_is = chunk.gradient_dtype is chunk.dtype
        whole = payload
        if self.stage == 0 and not rests_as_is:
            whole = scratch.take(chunk.numel, chunk.gradient_dtype)
        in_place = payload is gradient.whole or self.stage == 0
        if in_place and len(chunk.layout.units) == 1:
            begin = chunk.layout.slices(chunk.rank)[0].payload_start
            out = whole[begin : begin + chunk.layout.shard_numel]
        else:
            out = scratch.take(chunk.layout.shard_numel, chunk.gradient_dtype)
        if chunk.travel_dtype is not chunk.dtype:
            payload = scratch.take(chunk.numel, chunk.travel_dtype).copy_(payload)
        finish = self.communicator.start_reduce_scatter(payload, chunk.layout, out, chunk.index, scratch.take)
        self.memory.leave(gradient)

        def gathered() -> Tensor:
            finish()
            if self.stage > 0:
                return out
            self.communicator.all_gather(whole, out, chunk.layout, chunk.index)
            return whole

        return gathered

    def finish(self) -> None:
        """Wait for the reduction in flight, if any, and merge its result. Local: launches nothing but at stage 0."""
        if self._in_flight is None:
            return
        flight, self._in_flight = self._in_flight, None
        with torch.inference_mode(False), torch.no_grad(), flight.moving:
            self.homes.merge(flight.gradient, flight.gathered(), flight.backward)
            self.memory.close(flight.gradient)

    def forget(self) -> None:
        """The one in flight has failed on the way."""
        self._in_flight = None
