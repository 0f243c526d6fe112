"""What the optimizer keeps for one chunk: flat per-element states, and step counts and scalars by parameter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.errors import BudgetError
from gemini.executor.fetcher import Fetcher
from gemini.memory.tier import copy
from gemini.optimizer.elementwise import RunState
from gemini.placement.demand import Kind, Tier


@dataclass(frozen=True)
class Run:
    """Elements [start, start + numel) of the optimizer's flat tensors, and the chunk positions that they belong to."""

    start: int
    numel: int
    positions: tuple[int, ...]
    group: int


@dataclass(eq=False)
class ChunkOptimizerState:
    """One trainable chunk's optimizer state on this rank."""

    chunk: Chunk
    tier: Tier  # where all of `flats` rest
    counts_steps: bool  # `step` is an int here, not a tensor
    groups: list[int | None]  # by position: the param group, None for a parameter that no group has
    flats: dict[str, Tensor] = field(default_factory=dict)  # (optim_numel,) each
    scalars: list[dict[str, Any] | None] = field(default_factory=list)  # by position; None before the first update

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.chunk.dtype is torch.float64 else torch.float32

    def take(self, name: str, fetcher: Fetcher) -> Tensor:
        """A zeroed flat state called `name`. Where the device is full, all of them rest on the host from now on."""
        num_bytes = self.chunk.optim_numel * self.dtype.itemsize
        try:
            buffer = fetcher.tier(self.tier).take(num_bytes, Kind.OPTIM)
        except BudgetError:
            if self.tier is Tier.HOST:
                raise
            self.move(Tier.HOST, fetcher)
            buffer = fetcher.host.take(num_bytes, Kind.OPTIM)
        self.flats[name] = buffer.view(self.dtype)
        return self.flats[name]

    def give(self, names: Sequence[str], fetcher: Fetcher) -> None:
        """Give flat states back."""
        for name in names:
            fetcher.tier(self.tier).give(self.flats.pop(name).view(torch.uint8), Kind.OPTIM)

    def move(self, tier: Tier, fetcher: Fetcher) -> None:
        """Rest on `tier` from now on, or on the host where that is full."""
        if tier is self.tier:
            return
        before = self.tier
        contents = {name: flat.to("cpu", copy=True) for name, flat in self.flats.items()}
        self.give(list(contents), fetcher)
        self.tier = tier
        for name in contents:
            self.take(name, fetcher)
        for name, content in contents.items():
            copy(self.flats[name], content, fetcher.tier(self.tier), fetcher.tier(before), fetcher.traffic)

    def forget(self, managed: ManagedParameter) -> None:
        """One parameter's state is as before its first update."""
        self.scalars[self.chunk.parameters.index(managed)] = None
        for flat in self.flats.values():
            for piece in self.chunk.optim_pieces(managed):
                flat[piece.shard_start : piece.shard_start + piece.numel].zero_()

    def names(self, managed: ManagedParameter) -> list[str]:
        """The states that a parameter has: a torch optimizer makes them in its first update."""
        is_new = self.scalars[self.chunk.parameters.index(managed)] is None
        return [] if is_new and not self.counts_steps else sorted(self.flats)

    def runs(self, has_gradient: Sequence[bool]) -> list[Run]:
        """The fewest runs whose elements share group and scalars and all have a gradient; paddings are bridged."""
        positions = range(len(self.groups))
        active = [i for i in positions if has_gradient[i] and self.groups[i] is not None]
        if len(active) == len(self.groups) and self._is_uniform():
            return [Run(0, self.chunk.optim_numel, tuple(positions), self.groups[0] or 0)] if positions else []
        runs: list[Run] = []
        for position in active:
            group = self.groups[position]
            assert group is not None
            for piece in self.chunk.optim_pieces(self.chunk.parameters[position]):
                runs.append(Run(piece.shard_start, piece.numel, (position,), group))
        return runs

    def _is_uniform(self) -> bool:
        first_group, first = self.groups[0], self.scalars[0]
        return all(g == first_group for g in self.groups) and all(_same(first, other) for other in self.scalars)

    def empty_run(self, position: int) -> RunState:
        """The state of a run of no elements of a parameter that this rank holds nothing of."""
        scalars = self.scalars[position]
        flat = {name: whole[:0] for name, whole in self.flats.items()}
        return RunState(flat, dict(scalars or {}), is_new=scalars is None)

    def state_of(self, run: Run) -> RunState:
        scalars = self.scalars[run.positions[0]]
        flat = {name: whole[run.start : run.start + run.numel] for name, whole in self.flats.items()}
        return RunState(flat, dict(scalars or {}), is_new=scalars is None)

    def keep(self, run: Run, state: RunState, replaced: dict[str, Tensor], fetcher: Fetcher) -> None:
        """Note what an update made of the run's state."""
        for name, value in replaced.items():
            flat = self.flats.get(name)
            if flat is None:
                flat = self.take(name, fetcher)
            flat[run.start : run.start + run.numel].copy_(value)

    def keep_scalars(self, updated: dict[int, dict[str, Any]]) -> None:
        """After all runs of a step: a parameter cut into several runs is counted once."""
        for position, scalars in updated.items():
            self.scalars[position] = scalars


def _same(a: dict[str, Any] | None, b: dict[str, Any] | None) -> bool:
    if a is b:
        return True
    if a is None or b is None:
        return False
    return a.keys() == b.keys() and all(bool(a[name] == b[name]) for name in a)
