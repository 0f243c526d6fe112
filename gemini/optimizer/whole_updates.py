"""Updates of chunks some of whose parameters are updated whole: first those, on their owners, then the chunks.

Chunks are read, and their tensors exchanged, a window at a time (placement/owners.py). Then each chunk of the window is
updated as always, where its state rests; the rule of the parameters that are due whole copies what their owners have
made. A chunk whose state rests on another tier is brought twice in a step: to be read, and to be written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from gemini.memory.transfer import Region
from gemini.memory.work import WorkTicket
from gemini.optimizer.averages import Averages
from gemini.optimizer.chunk_states import ChunkOptimizerState
from gemini.optimizer.elementwise import MOST_TEMPORARIES
from gemini.optimizer.several import SeveralUpdates
from gemini.optimizer.shards import GradientFactors, Made
from gemini.optimizer.update import ChunkUpdates, Due
from gemini.optimizer.whole_tensor import DueTensor, TensorExchange, WholeTensorUpdate
from gemini.placement.owners import owners, windows, work_of
from gemini.runtime.chunk import Chunk, ManagedParameter
from gemini.runtime.grads import GradStore
from gemini.runtime.params import ParamStore
from gemini.runtime.recovery import Failures
from gemini.runtime.step import Payloads

UPDATES_WHOLE = (
    "update_in_backward=True updates each chunk as its gradients come, and an optimizer of whole tensors, such as "
    "Muon, needs all ranks' parts of a tensor at one place: wrap the model without it"
)


class WholeChunkUpdates(ChunkUpdates):
    """`ChunkUpdates` of a model with parameters that are updated whole. Its `update` is collective."""

    def __init__(
        self,
        params: ParamStore,
        grads: GradStore,
        failures: Failures,
        states: Mapping[int, ChunkOptimizerState],
        update: SeveralUpdates,
        param_groups: list[dict[str, Any]],
        averages: Averages | None,
    ) -> None:
        super().__init__(params, grads, failures, states, update, param_groups, False, averages)
        self._rules = update
        self._num_shards = params.communicator.num_shards
        self._tensors = TensorExchange(update, param_groups, params.communicator, params.device.device)
        self._made: dict[tuple[int, int], Made] = {}  # by chunk index and position, of the window at hand

    def room(self, resting: Mapping[Chunk, Region | None], payloads: Payloads) -> AbstractContextManager[None]:
        """See `ChunkUpdates.room`. What owners hold of a window is tried, as a torch optimizer's temporaries are."""
        return self._room(super().room(resting, payloads), [chunk for chunk, its in resting.items() if its is not None])

    @contextmanager
    def _room(self, others: AbstractContextManager[None], chunks: Sequence[Chunk]) -> Iterator[None]:
        whole = {chunk: self._whole_in(chunk, None) for chunk in chunks}
        for chunk, its in whole.items():
            self._refuse_shapes(chunk, its)
        most = max((self._window_bytes(whole, window) for window in self._windows(whole)), default=0)
        with others:
            if most:
                # The tensor is dropped at once: torch's allocator keeps its memory cached, and the owner finds it.
                torch.empty(most, dtype=torch.uint8, device=self._memory.device.device)
            yield

    def _refuse_shapes(self, chunk: Chunk, whole: Sequence[ManagedParameter]) -> None:
        """Raises ValueError for a parameter that its optimizer cannot update, before anything has changed."""
        for managed in whole:
            number = self._states[chunk.index].groups[managed.position]
            if managed.requires_grad and number is not None:
                group = self._param_groups[number]
                rule = self._rules.of(group)
                assert isinstance(rule, WholeTensorUpdate)
                rule.refuse_shape(group, managed)

    def update(self, chunks: Due, factors: GradientFactors, payloads: Payloads) -> None:
        """See `ChunkUpdates.update`. Collective: all ranks exchange the tensors of a window together."""
        whole = {chunk: self._whole_in(chunk, steps) for chunk, (steps, _) in chunks.items()}
        for window in self._windows(whole):
            parts = [part for chunk in window if whole[chunk] for part in self._read(chunk, *chunks[chunk])]
            self._made = self._tensors.step(parts, factors)
            del parts  # copies, which the writing does not need
            super().update({chunk: chunks[chunk] for chunk in window}, factors, payloads)
        self._made = {}

    def _whole_in(self, chunk: Chunk, steps: bytes | None) -> list[ManagedParameter]:
        """The parameters of a chunk that are updated whole, of those that `steps` has. None: of all."""
        state = self._states[chunk.index]
        due = (each for each in chunk.parameters if steps is None or steps[each.position])
        return [each for each in due if state.is_whole(each.position)]

    def _windows(self, whole: Mapping[Chunk, Sequence[ManagedParameter]]) -> list[list[Chunk]]:
        chunks = list(whole)
        numels = [sum(each.numel for each in its) for its in whole.values()]
        largest = max((each.numel for its in whole.values() for each in its), default=0)
        return [[chunks[number] for number in window] for window in windows(numels, largest, self._num_shards)]

    def _window_bytes(self, whole: Mapping[Chunk, Sequence[ManagedParameter]], window: Sequence[Chunk]) -> int:
        """The most bytes that any rank holds on the device for a window, beside what chunks stage."""
        tensors = [each for chunk in window for each in whole[chunk]]
        if not tensors:
            return 0
        loads = [0] * self._num_shards
        for each, owner in zip(tensors, owners([work_of(t.shape) for t in tensors], self._num_shards), strict=True):
            loads[owner] += each.numel
        held = sum(each.numel for each in tensors) // self._num_shards + max(loads)
        fields = 2 + max(len(self._states[chunk.index].flats) for chunk in window)
        largest = max(each.numel for each in tensors)
        itemsize = max(self._states[chunk.index].dtype.itemsize for chunk in window)
        # Sent and received together, beside the whole tensors, and what the optimizer itself takes for one of them.
        return itemsize * (2 * fields * held + MOST_TEMPORARIES * largest)

    def _read(self, chunk: Chunk, steps: bytes, gradient: Region | None) -> list[DueTensor]:
        """This rank's parts of the tensors of a chunk that are due whole, on the device."""
        found: list[DueTensor] = []
        for batch in self._batches([super()._plan(chunk, steps, gradient, 0, reads=True)]):
            for each in batch:
                state, view, region = each.state, each.weights, each.on_tier
                flat = None if region is None else region.flat
                for run in each.runs:
                    position = run.run.positions[0]
                    if state.is_whole(position):
                        weights = None if run.weights is None or view is None else view.load()
                        found.append(self._tensors.part(chunk, run, flat, weights, state.names_of_update(position)))
        return found

    def _plan(
        self,
        chunk: Chunk,
        steps: bytes,
        gradient: Region | None,
        number: int,
        ticket: WorkTicket | None = None,
        *,
        exchanges: bool = False,
        reads: bool = False,
    ) -> Any:
        """See `ChunkUpdates._plan`: with what was made of parameters that are updated whole."""
        planned = super()._plan(chunk, steps, gradient, number, ticket, exchanges=exchanges, reads=reads)
        for run in planned.runs:
            for position in run.run.positions:
                run.whole = self._made.get((chunk.index, position))
        return planned
