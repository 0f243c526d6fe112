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
from gemini.placement.demand import OPTIM_STATES, Kind, Tier


@dataclass(frozen=True)
class Run:
    """Elements [start, start + numel) of the optimizer's flat tensors, and the chunk positions that they belong to."""

    start: int
    numel: int
    positions: tuple[int, ...]
    group: int


@dataclass(eq=False)
class ChunkOptimizerState:
    """One chunk's optimizer state on this rank; of a frozen chunk, what its training left."""

    chunk: Chunk
    tier: Tier  # where all of `flats` rest
    counts_steps: bool  # `step` is an int here, not a tensor
    groups: list[int | None]  # by position: the param group, None for a parameter that no group has
    flats: dict[str, Tensor] = field(default_factory=dict)  # (optim_numel,) each
    scalars: list[dict[str, Any] | None] = field(init=False)  # by position; None before the first update
    made: list[tuple[str, ...]] = field(init=False)  # by position: flat states that updates have made

    def __post_init__(self) -> None:
        self.scalars = [None for _ in self.groups]
        self.made = [() for _ in self.groups]

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.chunk.dtype is torch.float64 else torch.float32

    @property
    def num_flat_bytes(self) -> int:
        """Of one flat state."""
        return self.chunk.optim_numel * self.dtype.itemsize

    def take(self, names: Sequence[str], fetcher: Fetcher) -> None:
        """Zeroed flat states beside those that there are. Raises BudgetError, and nothing has changed then.

        Where the device is full, or placement did not count on so many, all of them rest on the host from now on.
        """
        self._rest([*self.flats, *names], self.tier, fetcher)

    def move(self, tier: Tier, fetcher: Fetcher) -> None:
        """Rest on `tier` from now on, or on the host, as for `take`. Raises BudgetError; nothing has changed then."""
        self._rest(list(self.flats), tier, fetcher)

    def give(self, names: Sequence[str], fetcher: Fetcher) -> None:
        """Give flat states back."""
        for name in names:
            fetcher.tier(self.tier).give(self.flats.pop(name).view(torch.uint8), Kind.OPTIM)

    def _rest(self, names: list[str], tier: Tier, fetcher: Fetcher) -> None:
        if tier is Tier.DEVICE and len(names) > OPTIM_STATES:
            tier = Tier.HOST
        leaves = tier is not self.tier
        try:
            taken = self._taken([name for name in names if leaves or name not in self.flats], tier, fetcher)
        except BudgetError:
            if tier is Tier.HOST:
                raise
            self._rest(names, Tier.HOST, fetcher)
            return
        if leaves:
            for name, flat in self.flats.items():
                copy(taken[name], flat, fetcher.tier(tier), fetcher.tier(self.tier), fetcher.traffic)
            fetcher.device.synchronize()
            self.give(list(self.flats), fetcher)
            self.tier = tier
        self.flats.update(taken)

    def _taken(self, names: Sequence[str], tier: Tier, fetcher: Fetcher) -> dict[str, Tensor]:
        """All of them, or none and a BudgetError."""
        taken: dict[str, Tensor] = {}
        try:
            for name in names:
                taken[name] = fetcher.tier(tier).take(self.num_flat_bytes, Kind.OPTIM).view(self.dtype)
        except BudgetError:
            for flat in taken.values():
                fetcher.tier(tier).give(flat.view(torch.uint8), Kind.OPTIM)
            raise
        return taken

    def discard(self, managed: ManagedParameter) -> None:
        """One parameter's state becomes what it was before its first update."""
        position = managed.position
        self.scalars[position], self.made[position] = None, ()
        for flat in self.flats.values():
            for piece in self.chunk.optim_pieces(managed):
                flat[piece.shard_start : piece.shard_start + piece.numel].zero_()

    def names(self, position: int) -> tuple[str, ...]:
        """The flat states that a parameter has: Adam's from the start, a torch optimizer's once it has made them."""
        return tuple(self.flats) if self.counts_steps else self.made[position]

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
        first = self.groups[0], self.made[0]
        alike = all(found == first for found in zip(self.groups, self.made, strict=True))
        return alike and all(_same(self.scalars[0], other) for other in self.scalars)

    def empty_run(self, position: int) -> RunState:
        """The state of a run of no elements of a parameter that this rank holds nothing of."""
        return self._state_of(position, 0, 0)

    def state_of(self, run: Run) -> RunState:
        """What an update of the run starts from."""
        return self._state_of(run.positions[0], run.start, run.numel)

    def _state_of(self, position: int, start: int, numel: int) -> RunState:
        scalars = self.scalars[position]
        flat = {name: self.flats[name][start : start + numel] for name in self.names(position) if name in self.flats}
        return RunState(flat, dict(scalars or {}), is_new=scalars is None)

    def keep(self, run: Run, replaced: dict[str, Tensor], fetcher: Fetcher) -> None:
        """Note the flat states that an update of the run has made."""
        missing = [name for name in replaced if name not in self.flats]
        if missing:
            self.take(missing, fetcher)
        for name, value in replaced.items():
            self.flats[name][run.start : run.start + run.numel].copy_(value)

    def note_made(self, made: dict[int, tuple[str, ...]]) -> None:
        """After all runs of a step: the states that updates have made, by position."""
        for position, names in made.items():
            self.made[position] = tuple(sorted({*self.made[position], *names}))

    def keep_scalars(self, updated: dict[int, dict[str, Any]]) -> None:
        """After all runs of a step: a parameter cut into several runs is counted once."""
        for position, scalars in updated.items():
            self.scalars[position] = scalars
            self.chunk.parameters[position].has_fractions = True


def _same(a: dict[str, Any] | None, b: dict[str, Any] | None) -> bool:
    if a is b:
        return True
    if a is None or b is None:
        return False
    return a.keys() == b.keys() and all(bool(a[name] == b[name]) for name in a)
