"""Updates chunk by chunk, each where its state lives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from gemini.chunks.chunk import Chunk
from gemini.executor.executor import Executor
from gemini.optimizer.chunk_state import ChunkOptimizerState, Run
from gemini.optimizer.elementwise import ElementwiseUpdate, GradientFactors
from gemini.optimizer.shard_view import ShardView, Staging
from gemini.optimizer.summary import GradientSummary
from gemini.placement.demand import Kind, Tier


class ChunkUpdates:
    """One optimizer's updates of its model's chunks."""

    def __init__(
        self,
        executor: Executor,
        states: Mapping[int, ChunkOptimizerState],
        update: ElementwiseUpdate,
        param_groups: list[dict[str, Any]],
    ) -> None:
        self._executor = executor
        self._states = states
        self._update = update
        self._param_groups = param_groups
        self._staging = Staging()

    def refuse_bad_hyperparameters(self) -> None:
        """Let the update check its hyperparameters on no elements, while every rank can still go back."""
        checked: set[int] = set()  # membership only
        for state in self._states.values():
            for position, group in enumerate(state.groups):
                if group is not None and group not in checked:
                    checked.add(group)
                    none = torch.zeros(0, dtype=state.dtype)
                    its_group = self._param_groups[group]
                    self._update.update(none, none.clone(), state.empty_run(position), its_group, GradientFactors())

    def update_chunk(self, chunk: Chunk, summary: GradientSummary, factors: GradientFactors) -> None:
        """Update one chunk where its state lives; it is on this rank alone until the new weights are gathered."""
        executor, state = self._executor, self._states[chunk.index]
        steps = self.steps(chunk, summary)
        runs = state.runs(steps)
        if runs:
            self._update_runs(chunk, state, runs, factors)
        self._count_elsewhere(state, runs, [position for position, does in enumerate(steps) if does])
        executor.gradients.exchange.homes.give_back(chunk)  # where this rank had nothing to update
        executor.after_chunk_update(chunk)
        if chunk.home_layout.world_size < chunk.optim_layout.world_size:
            executor.fetcher.spread(chunk)

    def steps(self, chunk: Chunk, summary: GradientSummary) -> list[bool]:
        """By position in the chunk: the parameter has a gradient on some rank, and is in a param group."""
        groups = self._states[chunk.index].groups
        return [
            summary.has_gradient[managed.index] and group is not None
            for managed, group in zip(chunk.parameters, groups, strict=True)
        ]

    def _update_runs(self, chunk: Chunk, state: ChunkOptimizerState, runs: list[Run], factors: GradientFactors) -> None:
        executor = self._executor
        fetcher = executor.fetcher
        gradient = executor.gradients.store.gradients[chunk.index]
        tier = self._where(chunk, state)
        view = ShardView(chunk, fetcher, self._staging, tier)
        grad = gradient.reduced()
        if gradient.reduced_tier() is not tier:
            staged = self._staging.take("gradient", chunk.optim_numel, grad.dtype)
            from_tier = fetcher.tier(gradient.reduced_tier())
            grad = fetcher.staged_copy(staged, grad, tier, from_tier)
        scalars: dict[int, dict[str, Any]] = {}
        for run in runs:
            end = run.start + run.numel
            run_state = state.state_of(run)
            group = self._param_groups[run.group]
            replaced = self._update.update_run(view, run.start, grad[run.start : end], run_state, group, factors)
            state.keep(run, run_state, replaced, fetcher)
            for position in run.positions:
                scalars[position] = run_state.scalars
        state.keep_scalars(scalars)
        executor.gradients.exchange.homes.consumed(chunk)
        view.close(complete=sum(run.numel for run in runs) == chunk.optim_numel)

    def _count_elsewhere(self, state: ChunkOptimizerState, runs: list[Run], updated: list[int]) -> None:
        """Parameters that lie wholly in other ranks' shards count their steps here too, so that all ranks agree."""
        here = {position for run in runs for position in run.positions}
        absent = [position for position in updated if position not in here]
        if not absent:
            return
        dtype = state.dtype
        for position in absent:
            run_state = state.empty_run(position)
            group_number = state.groups[position]
            assert group_number is not None
            none = torch.zeros(0, dtype=dtype)
            self._update.update(none, none.clone(), run_state, self._param_groups[group_number], GradientFactors())
            state.scalars[position] = run_state.scalars

    def _where(self, chunk: Chunk, state: ChunkOptimizerState) -> Tier:
        """Where its optimizer state is; without one, the device if everything that the update touches is there."""
        if state.flats:
            return state.tier
        tiers = {chunk.homes[kind].tier for kind in (Kind.PARAM, Kind.MASTER) if kind in chunk.homes}
        tiers.add(self._executor.gradients.store.gradients[chunk.index].reduced_tier())
        return Tier.DEVICE if tiers == {Tier.DEVICE} else Tier.HOST
