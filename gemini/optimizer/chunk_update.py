"""Updates of chunks, each on the tier of its state.

A launch and the Python around it cost as much as the update of a small chunk. So chunks whose update touches only one
tier are launched together, in batches. A chunk that needs a staging buffer is the last of its batch: the next chunk
would overwrite the buffer before the launch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.manager.step import Step
from gemini.memory.region import Region
from gemini.memory.transfer import ready, wait_on_stream
from gemini.optimizer.chunk_state import ChunkOptimizerState
from gemini.optimizer.elementwise import ElementwiseUpdate
from gemini.optimizer.runs import GradientFactors, Run, RunUpdate
from gemini.optimizer.shard_view import ShardView, staged_bytes
from gemini.optimizer.staging import Staging
from gemini.optimizer.summary import GradientSummary
from gemini.placement.demand import Kind, Tier

BATCH_NUMEL = 2**25
"""Elements that are updated together: 0.2 ms at 4 TB/s. More would only delay the work that follows an update."""


@dataclass(frozen=True)
class _ChunkUpdate:
    """A chunk in a batch, prepared and not launched yet."""

    state: ChunkOptimizerState
    weights: ShardView | None  # None: this rank has nothing to update
    runs: list[RunUpdate]


class ChunkUpdates:
    """Updates the chunks of one model."""

    def __init__(
        self,
        step: Step,
        states: Mapping[int, ChunkOptimizerState],
        update: ElementwiseUpdate,
        param_groups: list[dict[str, Any]],
    ) -> None:
        self._step = step
        self._states = states
        self._update = update
        self._param_groups = param_groups
        self._staging = Staging(step)

    def refuse_bad_hyperparameters(self) -> None:
        """Raise for bad hyperparameters before the step, by an update of no elements. Nothing has changed then."""
        # One parameter per group and dtype is enough. The dtype counts, because HybridAdam refuses fp64 weights, which
        # may come after fp32 ones in a model.
        checked: set[tuple[int, torch.dtype]] = set()  # membership only
        for state in self._states.values():
            groups = {group for group in set(state.groups) if group is not None}
            for group in sorted(groups):
                if (group, state.dtype) not in checked:
                    checked.add((group, state.dtype))
                    nothing = state.start(Run(0, 0, (state.groups.index(group),), group))
                    self._update.update([nothing], self._param_groups, GradientFactors())

    def room(self, chunks: Iterable[Chunk]) -> AbstractContextManager[None]:
        """Inside, `update` finds all that it needs beside the homes. See [Note: Room for an update] in staging.py.

        Local. Raises torch.OutOfMemoryError or BudgetError, and nothing has changed then.
        """
        needs: dict[tuple[Tier, str], int] = {}
        memory = self._step.params.memory
        temporaries = 0  # on the device; the host has no bound that an allocation would find
        gathers_in_slot = False
        for chunk in chunks:
            gradient = self._step.grads.of(chunk)
            if not gradient.is_reduced:
                continue
            reduced, tier = gradient.reduced(), self._states[chunk.index].tier
            staged = staged_bytes(chunk, tier, loads=not self._update.is_fused)
            if reduced.tier is not tier:
                staged["gradient"] = reduced.nbytes
            for name, num_bytes in staged.items():
                # Chunks are staged one after the other in the same pieces, so the largest need counts and not the sum.
                needs[tier, name] = max(num_bytes, needs.get((tier, name), 0))
            if tier is Tier.DEVICE:
                its = self._update.temporary_bytes(
                    chunk.optim_numel, self._states[chunk.index].dtype, memory.device.device
                )
                temporaries = max(temporaries, its)
            gathers_in_slot |= _is_updated_in_parts(chunk) and chunk.homes[Kind.PARAM].tier is Tier.HOST
        # Whole weights on the host are gathered in a slot of payloads, which may have no memory yet.
        if gathers_in_slot:
            self._step.payloads.take_room()
        return self._staging.reserved(needs, temporaries)

    def update(self, chunks: Mapping[Chunk, bytes], factors: GradientFactors) -> None:
        """Update chunks on the tiers of their states. Local until new weights are gathered.

        chunks: the chunks to update, with their `steps`.
        """
        batch: list[_ChunkUpdate] = []
        numel = 0
        for chunk, steps in chunks.items():
            must_end = self._prepare(chunk, steps, batch)
            numel += chunk.optim_numel
            if must_end or numel >= BATCH_NUMEL:
                self._finish(batch, factors)
                batch, numel = [], 0
        if batch:
            self._finish(batch, factors)

    def steps(self, chunk: Chunk, summary: GradientSummary) -> bytes:
        """Whether each parameter, by position, has a gradient on some rank and is in a param group."""
        has_gradient = summary.of(chunk)
        groups = self._states[chunk.index].groups
        if None in groups:
            has_gradient = bytes(has and group is not None for has, group in zip(has_gradient, groups, strict=True))
        return has_gradient

    def _prepare(self, chunk: Chunk, steps: bytes, batch: list[_ChunkUpdate]) -> bool:
        """Add a chunk to the batch. Returns whether the batch must end with it."""
        state = self._states[chunk.index]
        runs = state.runs(steps)
        # All updated parameters are in other ranks' shards. Count their steps here too.
        if not any(run.numel for run in runs):
            batch.append(_ChunkUpdate(state, None, [state.start(run) for run in runs]))
            return False
        tier = state.tier
        state.wait_for_readers()
        view = ShardView(chunk, self._step.params, self._staging, tier)
        gradient = self._step.grads.of(chunk)
        reduced = gradient.reduced()
        is_grad_staged = reduced.tier is not tier
        grad = self._staged(reduced, tier) if is_grad_staged else ready(reduced)
        # Stage the weights now: only then `is_staged`, which ends the batch, is known.
        view.segments()
        updates = [state.start(run, view, grad) if run.numel else state.start(run) for run in runs]
        batch.append(_ChunkUpdate(state, view, updates))
        # A torch optimizer updates one chunk at a time: its call of `ShardView.load` may stage weights, which is not
        # known yet here.
        return is_grad_staged or view.is_staged or not self._update.is_fused

    def _finish(self, batch: Sequence[_ChunkUpdate], factors: GradientFactors) -> None:
        """Launch the batch, and bring the new weights home.

        Collective if each rank has updated a part of weights that all ranks hold whole.
        """
        step = self._step
        self._update.update([run for each in batch for run in each.runs], self._param_groups, factors)
        for each in batch:
            state, chunk = each.state, each.state.chunk
            state.store_updates(each.runs, step.params)
            if each.weights is not None:
                # The gradient is used up: a home that was lent to it takes the new weights in `close`.
                step.grads.homes.consumed(chunk)
                each.weights.close(state.are_all([update.run for update in each.runs]))
            # If this rank had nothing to update, the chunk's home may still hold the gradient.
            step.grads.homes.restore(chunk)
            step.after_chunk_update(chunk)
            # Ranks may end their batches at different chunks, as staging depends on what each updates. All of them keep
            # the order of chunks, in which the gathers must come.
            if _is_updated_in_parts(chunk):
                _all_gather_weights(step, chunk)

    def _staged(self, gradient: Region, tier: Tier) -> Tensor:
        """A copy of the gradient on `tier`, ready to be read there."""
        memory = self._step.params.memory
        staged = self._staging.buffer(tier, "gradient", gradient.numel, gradient.dtype)
        # An earlier chunk's copy may still read the buffer: `copy` starts behind the tickets of both regions.
        memory.transfer.copy(staged, gradient)
        return ready(staged)


def _is_updated_in_parts(chunk: Chunk) -> bool:
    """Whether every rank keeps the weights whole and updates a part of them."""
    return chunk.home_layout.world_size < chunk.optim_layout.world_size


def _all_gather_weights(step: Step, chunk: Chunk) -> None:
    """Make weights that were updated in parts, as at stages 1 and 2, whole again on every rank. Collective."""
    params, home = step.params, chunk.homes[Kind.PARAM]
    with torch.no_grad():
        if home.tier is Tier.DEVICE:
            # `close` may have started a copy of this rank's part to the home. The gather must send the new values.
            wait_on_stream(home)
            params.communicator.all_gather(home.flat, None, chunk.layout, chunk.index)
            return
        payload = step.payloads.open_own_part(chunk)
        params.communicator.all_gather(payload.flat, None, chunk.layout, chunk.index)
        # This rank's own part is at home already, so only the other ranks' parts cross to the host.
        for others in chunk.layout.others(chunk.rank):
            params.memory.transfer.copy(home[others], payload[others])
        # What is launched into the slot next must not overtake the copies that read the payload.
        wait_on_stream(payload)
