"""The exchange: a chunk's gradient goes to the other ranks, and the mean into its home.

With several ranks the exchange is only started at first; it is finished when the next one starts, when its slot is
wanted, or when the backward ends. The mean is made in fp32 (fp64 for fp64) and rounded once, to the dtype in which the
gradient rests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gemini.chunks.gradient import ChunkGradient, Content, ReducedState
from gemini.executor.grad_memory import GradMemory
from gemini.executor.scratch import Scratch
from gemini.executor.shared_homes import SharedHomes
from gemini.memory.tier import copy
from gemini.observe import Moving
from gemini.ranks.communicator import Communicator


@dataclass
class _InFlight:
    """A reduction that was started."""

    gradient: ChunkGradient
    gathered: Callable[[], Tensor]  # waits; the mean
    backward: int
    moving: Moving


class GradReducer:
    """Reduces one gradient at a time."""

    def __init__(
        self, store: GradMemory, homes: SharedHomes, communicator: Communicator, scratch: Scratch, stage: int
    ) -> None:
        self.store = store
        self.homes = homes
        self.communicator = communicator
        self.scratch = scratch
        self.stage = stage
        self._in_flight: _InFlight | None = None

    def start_reduction(self, gradient: ChunkGradient, backward: int) -> None:
        """GradReducer the open payload; its mean is merged as one of backward number `backward`. Collective."""
        self.scratch.reset()
        if self.communicator.world_size == 1:
            with self._moving(gradient, blocks=1):
                self._merge_own(gradient, backward)
            return
        moving = self._moving(gradient, blocks=2)
        with moving:
            gathered = self._launch(gradient)
        self._in_flight = _InFlight(gradient, gathered, backward, moving)
        if self.stage == 0:
            self.finish_reduction()

    def _moving(self, gradient: ChunkGradient, blocks: int) -> Moving:
        chunk, home = gradient.chunk, gradient.resting.tier
        ends = home if gradient.slot is None else "gradient slot", home
        where = self.communicator.position.here
        return self.store.observer.moving("reduce", chunk.index, *ends, chunk.payload_bytes, where, blocks)

    def _merge_own(self, gradient: ChunkGradient, backward: int) -> None:
        """One rank's gradient is the mean."""
        chunk, payload = gradient.chunk, gradient.payload
        assert payload is not None
        if chunk.narrows:
            rounded = self.scratch.take(payload.numel(), chunk.gradient_dtype)
            payload = rounded.copy_(payload)
        self._merge(gradient, payload, backward)
        self.store.close(gradient)

    def _launch(self, gradient: ChunkGradient) -> Callable[[], Tensor]:
        """Send the payload to the other ranks; what is returned waits for the mean. Collective."""
        chunk, payload = gradient.chunk, gradient.payload
        assert payload is not None
        self.homes.before_reduction(chunk)
        rests_as_is = chunk.gradient_dtype is chunk.dtype
        whole = payload
        if self.stage == 0 and not rests_as_is:
            whole = self.scratch.take(chunk.numel, chunk.gradient_dtype)
        in_place = payload is gradient.whole or self.stage == 0
        if in_place and len(chunk.layout.units) == 1:
            begin = chunk.layout.slices(chunk.rank)[0].payload_start
            out = whole[begin : begin + chunk.layout.shard_numel]
        else:
            out = self.scratch.take(chunk.layout.shard_numel, chunk.gradient_dtype)
        if chunk.travel_dtype is not chunk.dtype:
            payload = self.scratch.take(chunk.numel, chunk.travel_dtype).copy_(payload)
        finish = self.communicator.start_reduce_scatter(payload, chunk.layout, out, chunk.index, self.scratch.take)
        self.store.leave(gradient)

        def gathered() -> Tensor:
            finish()
            if self.stage > 0:
                return out
            self.communicator.all_gather(whole, out, chunk.layout, chunk.index)
            return whole

        return gathered

    def finish_reduction(self) -> None:
        """Wait for the reduction in flight, if any, and merge its result. Local: launches nothing but at stage 0."""
        if self._in_flight is None:
            return
        flight, self._in_flight = self._in_flight, None
        with torch.inference_mode(False), torch.no_grad(), flight.moving:
            self._merge(flight.gradient, flight.gathered(), flight.backward)
            self.store.close(flight.gradient)

    def make_room(self, gradient: ChunkGradient) -> None:
        """Memory for a reduced gradient that comes from no backward. Every rank does it at the same point."""
        self.homes.before_reduction(gradient.chunk)
        self.homes.make_room(gradient)

    def forget(self) -> None:
        """The one in flight has failed on the way."""
        self._in_flight = None

    def _merge(self, gradient: ChunkGradient, reduced: Tensor, backward: int) -> None:
        """shard <- reduced, or += where this step has a gradient already."""
        is_first = self.begin_merge(gradient, backward)
        self.put(gradient, 0, reduced[: gradient.reduced().numel()], is_first or gradient.content is Content.SUM)

    def begin_merge(self, gradient: ChunkGradient, backward: int, is_sum: bool = False) -> bool:
        """Make room for what is reduced of backward number `backward`; whether it is the step's first.

        is_sum: it is of several backwards already, and rests in fp32 from the first on.
        """
        chunk, is_first = gradient.chunk, not gradient.is_reduced
        if is_sum or not (is_first or gradient.first_backward == backward):
            self.store.widen(gradient, backward)
        if gradient.reduced_state is ReducedState.WIDE:
            self.homes.give_back(chunk)
        elif is_first:
            if is_sum:
                self.homes.before_reduction(chunk)
            self.homes.make_room(gradient)
            gradient.become_reduced(ReducedState.IN_SHARD, backward)
        return is_first

    def put(self, gradient: ChunkGradient, start: int, reduced: Tensor, replaces: bool) -> None:
        """Elements from `start` on of the reduced gradient: set if `replaces`, else added to."""
        store = self.store
        target = gradient.reduced()[start : start + reduced.numel()]
        tier = store.tier(gradient.reduced_tier())
        if replaces:
            if target.data_ptr() != reduced.data_ptr():
                copy(target, reduced, tier, store.device, store.traffic)
        elif tier is store.device:
            target.add_(reduced)
        else:
            staging = torch.empty(target.numel(), dtype=reduced.dtype)
            copy(staging, reduced, tier, store.device, store.traffic)
            store.device.synchronize()
            target.add_(staging)
