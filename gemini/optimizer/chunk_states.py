"""The optimizer state of all chunks. It is allocated, moved and freed as training requires (`StateStore`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.manager.params import ParamStore
from gemini.memory.region import Region
from gemini.optimizer.chunk_state import ChunkOptimizerState, resting_tier
from gemini.optimizer.elementwise import ElementwiseUpdate
from gemini.optimizer.in_words import settings_in_words
from gemini.optimizer.runs import EntryNames, GradientFactors, Run, RunUpdate
from gemini.placement.demand import Kind, StateHome, Tier


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
        self._flat_names: dict[int, tuple[str, tuple[str, ...]]] = {}  # by param group: its settings, its flat states
        self._expected: Mapping[int, Collection[str]] = {}  # flat states that are about to be loaded, by chunk index
        self.have_changed = True  # as in `StateStore`
        self._num_held = 0  # number of flat states after the last step

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

    def scalars_of(self, managed: ManagedParameter) -> dict[str, Any] | None:
        """What is kept of a parameter beside flat states, such as its number of steps; None before its first update."""
        state = self.by_chunk.get(managed.chunk.index)
        return None if state is None else state.scalars[managed.position]

    def region_of(self, chunk: Chunk, name: str) -> Region:
        """A flat state of a chunk, (optim_numel,). Zeros if only other ranks have created it so far."""
        state = self.by_chunk[chunk.index]
        # A rank without the state takes part in its gather all the same, with a tensor of the size that the others
        # have.
        if name not in state.flats:
            return Region(Tier.HOST, torch.zeros(chunk.optim_numel, dtype=state.dtype, device="cpu"))
        return state.region(name)

    def has_stepped(self, chunk: Chunk) -> bool:
        """Whether a step, or a loaded state dict, has written the chunk's state. Equal on all ranks."""
        state = self.by_chunk.get(chunk.index)
        return state is not None and any(scalars is not None for scalars in state.scalars)

    def state_counts(self, chunks: Iterable[Chunk]) -> list[int]:
        """How many states per element each chunk has or its groups need. Equal on all ranks."""
        return [self._num_states(chunk) for chunk in chunks]

    def _num_states(self, chunk: Chunk) -> int:
        state = self._of(chunk)
        # A state counts for as long as it has memory, also one that its group has stopped using, such as momentum that
        # was lowered to 0.
        return len({*state.flats, *self._missing(state), *self._expected.get(chunk.index, ())})

    @contextmanager
    def expecting(self, names: Mapping[int, Collection[str]]) -> Iterator[None]:
        """Inside, plans also count these flat states, by chunk index, which are about to be loaded."""
        # If gradients wait for a step, no state may move now. The mark then makes a later forward follow.
        self._expected, self.have_changed = names, True
        try:
            yield
        finally:
            self._expected = {}

    def note_followed(self) -> None:
        """Record that the plan counts these numbers of states, or that it cannot."""
        self.have_changed = False

    def note_step(self) -> None:
        """A step ended, which may have made states that no plan counts, such as momentum that was raised from 0."""
        # Our Adam has all of its states from the start.
        if not self._update.is_fused:
            before, self._num_held = self._num_held, sum(len(state.flats) for state in self.by_chunk.values())
            self.have_changed |= self._num_held != before

    def add(self, chunk: Chunk, home: StateHome) -> None:
        """Allocate fresh state for a chunk. Raises BudgetError, and holds nothing for the chunk then."""
        state = self._new(chunk, home)
        self._allocate_missing(state)
        comes_last = all(index < chunk.index for index in islice(reversed(self.by_chunk), 1))
        # The chunk enters `by_chunk` only with its memory: after a BudgetError nothing has to be taken out again.
        self.by_chunk[chunk.index] = state
        if chunk.dtype is torch.float16:
            self._fp16[chunk.index] = chunk
        # `by_chunk` is in order of chunks, which is the order of updates. An unfrozen chunk may come before others.
        if not comes_last:
            ordered = sorted(self.by_chunk.items())
            # In place: `ChunkUpdates` has this dict.
            self.by_chunk.clear()
            self.by_chunk.update(ordered)

    def reserve(self, homes: Mapping[Chunk, StateHome]) -> None:
        """Reserve host memory, in one piece, for what `missing_host_bytes` says. Raises BudgetError."""
        self._params.host.reserve(self.missing_host_bytes(homes), Kind.OPTIM)

    def missing_host_bytes(self, homes: Mapping[Chunk, StateHome]) -> int:
        """Bytes on the host that the chunks' state still needs if it is planned at these homes."""
        there = (self.by_chunk[chunk.index] for chunk in homes if self.has(chunk))
        # `host_bytes` counts all states of a chunk, so those that are on the host already are subtracted.
        held = sum(len(state.flats) * state.num_flat_bytes for state in there if state.tier is Tier.HOST)
        return sum(self.host_bytes(chunk, home) for chunk, home in homes.items()) - held

    def add_all(self, homes: Mapping[Chunk, StateHome]) -> None:
        """Allocate fresh state for the first chunks. Raises BudgetError, and holds nothing then."""
        try:
            # One reservation for all chunks is one mapping of host memory, which is registered with a GPU's driver
            # once.
            self.reserve(homes)
            for chunk, home in homes.items():
                self.add(chunk, home)
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

    def migrate(self, chunk: Chunk, home: StateHome) -> None:
        """Move a chunk's state to `home`, or to the host if the device is full."""
        self.by_chunk[chunk.index].migrate(home, self._params)

    def discard(self, managed: ManagedParameter) -> None:
        """Reset one parameter's state to that before its first step."""
        state = self.by_chunk.get(managed.chunk.index)
        if state is not None:
            state.discard(managed)

    def entry_names(self, managed: ManagedParameter, groups: Sequence[Mapping[str, Any]]) -> EntryNames:
        """The keys of a parameter's entry in a state dict whose param groups are `groups`."""
        number = self._group_of[managed.index]
        # Loaded hyperparameters decide which states an entry has: one of torch's Adam with `amsgrad=True` has a third
        # one.
        return self._update.entry_names({**self._param_groups[number], **groups[number]})

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError, or what a torch optimizer raises, for bad hyperparameters: by an update of no elements."""
        nothing = RunUpdate(Run(0, 0, (), 0), None, torch.zeros(0, device="cpu"), {}, {}, is_new=True)
        self._update.update([nothing], [group], GradientFactors())

    def group(self, managed: ManagedParameter) -> int | None:
        """The number of a parameter's param group. None: it is in no group."""
        return self._group_of.get(managed.index)

    @contextmanager
    def adding_group(self, number: int, members: list[ManagedParameter]) -> Iterator[None]:
        """Put parameters without a group into one. The block allocates their state; if it raises, both are undone."""
        before = self._group_of
        names_before = [list(state.flats) for state in self.by_chunk.values()]
        # The members join before the block runs, because the plan that it makes counts the states which their group
        # needs.
        self._regroup(before | {managed.index: number for managed in members})
        try:
            yield
        except BaseException:
            self.have_changed = True  # the plan may count the new members' states by now
            self._regroup(before)
            for state, names in zip(self.by_chunk.values(), names_before, strict=True):
                state.free([name for name in state.flats if name not in names], self._params)
            raise

    def allocate_all(self) -> None:
        """Allocate what the chunks lack of the states that their groups need. Raises BudgetError."""
        # As in `add_all`, host memory is reserved for all chunks together.
        self.reserve({state.chunk: StateHome(state.tier, state.num_planned) for state in self.by_chunk.values()})
        for state in self.by_chunk.values():
            self._allocate_missing(state)

    def _regroup(self, group_of: dict[int, int]) -> None:
        self._group_of = group_of
        for state in self.by_chunk.values():
            state.regroup(self._groups(state.chunk, group_of))

    def host_bytes(self, chunk: Chunk, home: StateHome) -> int:
        """Bytes on the host of a chunk's state whose planned home is `home`."""
        count = self._num_states(chunk)
        is_there = resting_tier(home, count, self._params.memory) is Tier.HOST
        return count * self._of(chunk).num_flat_bytes if is_there else 0

    def _of(self, chunk: Chunk) -> ChunkOptimizerState:
        """A chunk's state. Where there is none yet, an object without memory stands for it."""
        return self.by_chunk.get(chunk.index) or self._new(chunk, StateHome(Tier.HOST))

    def _new(self, chunk: Chunk, home: StateHome) -> ChunkOptimizerState:
        groups = self._groups(chunk, self._group_of)
        return ChunkOptimizerState(chunk, *home, self._update.is_fused, groups)

    def _allocate_missing(self, state: ChunkOptimizerState) -> None:
        state.allocate(self._missing(state), self._params)

    def _missing(self, state: ChunkOptimizerState) -> list[str]:
        """The flat states that the chunk's groups need and that it does not have."""
        # Sorted groups, and a dict in place of a set of names, whose order differs by process, give all ranks one order
        # of allocations.
        groups = sorted({number for number in state.groups if number is not None})
        names = {name: None for number in groups for name in self._names_in(number)}  # in order
        return [name for name in names if name not in state.flats]

    def _names_in(self, number: int) -> tuple[str, ...]:
        """The flat states of a param group. A trial update finds them, once for all chunks."""
        group = self._param_groups[number]
        settings = settings_in_words(group)
        # The answer depends on hyperparameters, which a user may set at any time: SGD keeps a buffer only while its
        # momentum is above 0.
        if self._flat_names.get(number, ("",))[0] != settings:
            self._flat_names[number] = settings, self._update.flat_names(group)
        return self._flat_names[number][1]

    @staticmethod
    def _groups(chunk: Chunk, group_of: Mapping[int, int]) -> list[int | None]:
        return [group_of.get(managed.index) for managed in chunk.parameters]
