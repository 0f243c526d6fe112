"""The optimizer state of all chunks. It is allocated, moved and freed as training requires (`StateStore`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.manager.params import ParamStore
from gemini.optimizer.chunk_state import ChunkOptimizerState
from gemini.optimizer.elementwise import ElementwiseUpdate, EntryNames
from gemini.placement.demand import OPTIM_STATES, Kind, Tier


class ChunkStates:
    """The states of one optimizer, by chunk."""

    def __init__(
        self,
        params: ParamStore,
        update: ElementwiseUpdate,
        param_groups: list[dict[str, Any]],
        group_of: Mapping[int, int],
    ) -> None:
        """group_of: the param group of each parameter in a group, by parameter index."""
        self._params = params
        self._update = update
        self._param_groups = param_groups
        self._group_of = dict(group_of)
        self.by_chunk: dict[int, ChunkOptimizerState] = {}  # by chunk index, in order; may contain frozen chunks
        self._fp16: dict[int, Chunk] = {}  # the chunks in `by_chunk` with fp16 weights

    @property
    def trained(self) -> list[Chunk]:
        """The chunks that a step updates, in order."""
        return [state.chunk for state in self.by_chunk.values() if state.chunk.trainable]

    @property
    def trains_fp16(self) -> bool:
        """Whether a step updates fp16 weights. Read at every access to a gradient, so it looks at fp16 chunks only."""
        return any(chunk.trainable for chunk in self._fp16.values())

    def ungrouped(self) -> dict[int, list[bool]]:
        """Flags of parameters in no group: by chunk index, then by position. Only chunks with such parameters."""
        with_some = {index: state.groups for index, state in self.by_chunk.items() if None in state.groups}
        return {index: [group is None for group in groups] for index, groups in with_some.items()}

    def has(self, chunk: Chunk) -> bool:
        """Whether the chunk's state has memory."""
        return chunk.index in self.by_chunk

    def names_of(self, managed: ManagedParameter) -> tuple[str, ...]:
        """The flat states that a parameter has."""
        state = self.by_chunk.get(managed.chunk.index)
        return () if state is None else state.names(managed.position)

    def flat_of(self, chunk: Chunk, name: str) -> Tensor:
        """A flat state of a chunk, (optim_numel,). Zeros if only other ranks have created it so far."""
        state = self.by_chunk[chunk.index]
        flat = state.flats.get(name)
        return torch.zeros(chunk.optim_numel, dtype=state.dtype, device="cpu") if flat is None else flat

    def has_stepped(self, chunk: Chunk) -> bool:
        """Whether a step, or a loaded state dict, has written the chunk's state. Equal on all ranks."""
        state = self.by_chunk.get(chunk.index)
        return state is not None and any(scalars is not None for scalars in state.scalars)

    def add(self, chunk: Chunk, tier: Tier) -> None:
        """Allocate fresh state for a chunk. Raises BudgetError, and holds nothing for the chunk then."""
        groups = self._groups(chunk, self._group_of)
        state = ChunkOptimizerState(chunk, tier, self._update.is_fused, groups)
        self._allocate_missing(state)
        comes_last = all(index < chunk.index for index in islice(reversed(self.by_chunk), 1))
        self.by_chunk[chunk.index] = state
        if chunk.dtype is torch.float16:
            self._fp16[chunk.index] = chunk
        # `by_chunk` is in order of chunks, which is the order of updates. An unfrozen chunk may come before others.
        if not comes_last:
            ordered = sorted(self.by_chunk.items())
            self.by_chunk.clear()
            self.by_chunk.update(ordered)

    def reserve(self, tiers: Mapping[Chunk, Tier]) -> None:
        """Reserve host memory, in one piece, for the missing state of chunks planned on `tiers`. Raises BudgetError."""
        self._params.host.reserve(self.missing_host_bytes(tiers), Kind.OPTIM)

    def missing_host_bytes(self, tiers: Mapping[Chunk, Tier]) -> int:
        """Bytes on the host that the chunks' state still needs if it is planned on `tiers`."""
        there = (self.by_chunk[chunk.index] for chunk in tiers if self.has(chunk))
        held = sum(len(state.flats) * state.num_flat_bytes for state in there if state.tier is Tier.HOST)
        return sum(self.host_bytes(chunk, tier) for chunk, tier in tiers.items()) - held

    def add_all(self, tiers: Mapping[Chunk, Tier]) -> None:
        """Allocate fresh state for the first chunks. Raises BudgetError, and holds nothing then."""
        try:
            self.reserve(tiers)
            for chunk, tier in tiers.items():
                self.add(chunk, tier)
        except BaseException:
            self.drop_all()
            raise

    def drop_all(self) -> None:
        """Free the state of all chunks."""
        for state in list(self.by_chunk.values()):
            self.drop(state.chunk)

    def drop(self, chunk: Chunk) -> None:
        """Free the state of a chunk."""
        state = self.by_chunk.pop(chunk.index)
        self._fp16.pop(chunk.index, None)
        state.free(list(state.flats), self._params)

    def migrate(self, chunk: Chunk, tier: Tier) -> None:
        """Move a chunk's state to `tier`, or to the host if the device is full."""
        self.by_chunk[chunk.index].migrate(tier, self._params)

    def discard(self, managed: ManagedParameter) -> None:
        """Reset one parameter's state to that before its first step."""
        state = self.by_chunk.get(managed.chunk.index)
        if state is not None:
            state.discard(managed)

    def entry_names(self, managed: ManagedParameter, groups: Sequence[Mapping[str, Any]]) -> EntryNames:
        """The keys of a parameter's entry in a state dict whose param groups are `groups`."""
        number = self._group_of[managed.index]
        return self._update.entry_names({**self._param_groups[number], **groups[number]})

    def group(self, managed: ManagedParameter) -> int | None:
        """The number of a parameter's param group. None: it is in no group."""
        return self._group_of.get(managed.index)

    @contextmanager
    def adding_group(self, number: int, members: list[ManagedParameter]) -> Iterator[None]:
        """A context in which parameters without a group are added to one. If the block raises, it is undone.

        Raises BudgetError; nothing has changed then.
        """
        before = self._group_of
        names_before = [list(state.flats) for state in self.by_chunk.values()]
        self._regroup(before | {managed.index: number for managed in members})
        try:
            self.reserve({state.chunk: state.tier for state in self.by_chunk.values()})
            for state in self.by_chunk.values():
                self._allocate_missing(state)
            yield
        except BaseException:
            self._regroup(before)
            for state, names in zip(self.by_chunk.values(), names_before, strict=True):
                state.free([name for name in state.flats if name not in names], self._params)
            raise

    def _regroup(self, group_of: dict[int, int]) -> None:
        self._group_of = group_of
        for state in self.by_chunk.values():
            state.groups[:] = self._groups(state.chunk, group_of)

    def host_bytes(self, chunk: Chunk, tier: Tier) -> int:
        """Bytes on the host of a chunk's state that is planned on `tier`."""
        # A state that does not exist yet is asked like one without memory.
        state = self.by_chunk.get(chunk.index)
        if state is None:
            state = ChunkOptimizerState(chunk, tier, False, self._groups(chunk, self._group_of))
        count = len({*state.flats, *self._missing(state)})
        return count * state.num_flat_bytes if tier is Tier.HOST or count > OPTIM_STATES else 0

    def _allocate_missing(self, state: ChunkOptimizerState) -> None:
        state.allocate(self._missing(state), self._params)

    def _missing(self, state: ChunkOptimizerState) -> list[str]:
        """The flat states that the chunk's groups need and that it does not have."""
        groups = [self._param_groups[number] for number in sorted({n for n in state.groups if n is not None})]
        names = {name: None for group in groups for name in self._update.flat_names(group)}  # in order
        return [name for name in names if name not in state.flats]

    @staticmethod
    def _groups(chunk: Chunk, group_of: Mapping[int, int]) -> list[int | None]:
        return [group_of.get(managed.index) for managed in chunk.parameters]
