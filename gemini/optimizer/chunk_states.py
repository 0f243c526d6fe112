"""Optimizer states by chunk: made, counted, taken together or not at all."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from gemini.errors import BudgetError, UnsupportedError
from gemini.memory.arena import HostTier
from gemini.memory.memory import RankMemory
from gemini.memory.transfer import Region, Tickets, wait_on_tier
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.averages import AVERAGE, Averages
from gemini.optimizer.elementwise import settings_in_words
from gemini.optimizer.several import GroupRules, SeveralUpdates, UpdateRule
from gemini.optimizer.shards import EntryNames, GradientFactors, Run, RunUpdate, ShardView, StoredStates, runs_of
from gemini.placement.demand import Kind, StateHome, Tier, update_tier
from gemini.placement.host_room import check_host_room_for_steps, check_room_at_rest
from gemini.placement.plan import Plan
from gemini.placement.planning import has_room_for
from gemini.runtime.chunk import Chunk, ManagedParameter
from gemini.runtime.manager import ChunkManager
from gemini.runtime.params import ParamStore
from gemini.runtime.step import Step
from optim import FP32, StateFormat, StateLayout

# -- One chunk's optimizer state: flat per-element states, and step counts and other scalars by parameter.

Formats = dict[str, list[StateFormat | None]]
"""How memories are stored: by their names, then by position. None: the parameter has no such state."""


def resting_tier(home: StateHome, count: float, memory: RankMemory) -> Tier:
    """The tier on which a chunk's `count` flat states rest if their planned home is `home`.

    States that come between two plans, such as momentum that is raised from 0 in mid-training, have no room on a device
    with a budget, even where bytes are free: slots may not have taken theirs yet. All states of the chunk then rest on
    the host until the next plan.
    """
    is_beyond = count > home.num_states and memory.device.capacity_bytes is not None
    return Tier.HOST if is_beyond else home.tier


@dataclass(eq=False)
class ChunkOptimizerState:
    """One chunk's optimizer state on this rank. A frozen chunk keeps the state of its earlier training."""

    chunk: Chunk
    tier: Tier  # the tier on which all of `flats` rest
    num_planned: float  # number of flat states that the plan has room for
    is_fused: bool  # our Adam updates all parameters: every one has all of `flats`, and `step` is an int, not a tensor
    groups: list[int | None]  # by position: the param group; None for a parameter in no group
    rules: GroupRules | None = None  # where groups differ in what updates them, or some are updated whole
    formats: Formats = field(default_factory=dict)  # of the memories of which some part is not stored as `dtype`
    flats: dict[str, Tensor] = field(default_factory=dict)
    """(optim_numel,) each, or (num_bytes,) uint8 of those that have a layout; two names may share one."""
    held: dict[str, Tensor] = field(default_factory=dict)  # the same, each once, by the name of its memory
    tickets: Tickets = field(default_factory=Tickets)  # of all `flats`
    layouts: dict[str, StateLayout] = field(init=False)  # of `formats`
    dtype: torch.dtype = field(init=False)  # of each element of `flats`
    update_tier: Tier = field(init=False)  # on which updates run: what rests on the disk is brought to the host
    scalars: list[dict[str, Any] | None] = field(init=False)  # by position; None before the first update
    num_updates: int = 0  # with `edits`, it tells which copies that users have read are stale
    edits: Counter[tuple[int, str]] = field(default_factory=Counter)  # by position and name; "": of all names
    made: list[tuple[str, ...]] = field(init=False)  # by position: names of flat states that updates have created
    lacks_average: list[bool] = field(init=False)  # by position: the parameter's average has not begun yet
    whose: list[str | None] = field(init=False)  # by position: which of several optimizers has made its state

    def __post_init__(self) -> None:
        self.dtype = torch.float64 if self.chunk.dtype is torch.float64 else torch.float32
        self.update_tier = update_tier(self.tier)
        self.layouts = {name: _layout(self.chunk, its) for name, its in self.formats.items()}
        self.scalars = [None for _ in self.groups]
        self.made = [() for _ in self.groups]
        self.lacks_average = [True for _ in self.groups]
        self.whose = [None if self.rules is None or each is None else self.rules.whose(each) for each in self.groups]
        # The runs of the last step, and what they were derived from.
        self._runs: list[Run] = []
        self._runs_are_of: tuple[Any, ...] = ()
        self._scalars_before: list[dict[str, Any] | None] = []

    def layout_of(self, name: str) -> StateLayout | None:
        """How a flat state is stored; None: as elements of `dtype`."""
        return self.layouts.get(self.memory_of(name))

    def bytes_of(self, name: str) -> int:
        """Bytes of one flat state."""
        layout = self.layout_of(name)
        return self.chunk.optim_numel * self.dtype.itemsize if layout is None else layout.num_bytes

    def num_states(self, memories: Collection[str]) -> float:
        """These flat states as plans count them: in states of full precision. Equal on all ranks."""
        if not self.layouts or not self.chunk.optim_numel:
            return len(memories)
        return sum(map(self.bytes_of, memories)) / (self.chunk.optim_numel * self.dtype.itemsize)

    def new_flat(self, name: str) -> tuple[int, torch.dtype]:
        """Number and dtype of the elements of a flat state, as it is stored."""
        layout = self.layout_of(name)
        return (self.chunk.optim_numel, self.dtype) if layout is None else (layout.num_bytes, torch.uint8)

    def region(self, name: str) -> Region:
        """A flat state, as it is stored."""
        return Region(self.tier, self.flats[name], self.tickets)

    def all_flats(self) -> Region:
        """What stands for all flat states where they are waited for: a region of no elements, with their tickets."""
        return Region(self.tier, self._no_gradient(), self.tickets)

    def allocate(self, names: Sequence[str], params: ParamStore) -> None:
        """Allocate zeroed flat states beside the present ones. Raises BudgetError; nothing has changed then.

        If the device is full, or the plan counts fewer states, all of them rest on the host from now on.
        """
        self._rest([*self.flats, *names], self.tier, params)

    def migrate(self, home: StateHome, params: ParamStore) -> None:
        """Move all states to `home`, or to the host, as in `allocate`. Raises BudgetError; nothing has changed then."""
        self.num_planned = home.num_states
        self._rest(list(self.flats), home.tier, params)

    def free(self, names: Sequence[str], params: ParamStore) -> None:
        """Free flat states."""
        for name in names:
            del self.flats[name]
        used = {self.memory_of(name) for name in self.flats}
        for name in [each for each in self.held if each not in used]:
            params.memory.free(Region(self.tier, self.held.pop(name), self.tickets), Kind.OPTIM)

    def memory_of(self, name: str) -> str:
        """The name of the memory that a flat state lies in: its own, unless no parameter has both that share it."""
        return name if self.rules is None else self.rules.memory_of(name)

    def _rest(self, names: list[str], tier: Tier, params: ParamStore) -> None:
        memories = list(dict.fromkeys(map(self.memory_of, names)))
        tier = resting_tier(StateHome(tier, self.num_planned), self.num_states(memories), params.memory)
        leaves = tier is not self.tier
        try:
            # All memory is taken before anything moves, so that a refusal leaves every state where it is.
            taken = self._taken([each for each in memories if leaves or each not in self.held], tier, params)
        except BudgetError as refused:
            if tier is not Tier.DEVICE:
                raise
            # The host takes the bytes, so nothing is lost. Uncounted, the shortage would make model data give up a part
            # of the device at the next step.
            params.memory.note_evaded(refused)
            self._rest(names, Tier.HOST, params)
            return
        # All states rest on one tier, where the update runs. Copy the present ones, and free the old memory only after
        # the copies have ended.
        if leaves:
            moves = [(taken[name], Region(self.tier, flat, self.tickets)) for name, flat in self.held.items()]
            for to, source in moves:
                params.memory.transfer.copy(to, source)
            wait_on_tier(*(region for pair in moves for region in pair))
            # `free` gives the memory back to `self.tier`, which must still be the old tier here.
            self.free(list(self.flats), params)
            self.tier, self.update_tier = tier, update_tier(tier)
        self.held.update((name, region.flat) for name, region in taken.items())
        self.flats.update((name, self.held[self.memory_of(name)]) for name in names)

    def _taken(self, names: Sequence[str], tier: Tier, params: ParamStore) -> dict[str, Region]:
        """Allocate all of these states. Raises BudgetError, and holds none of them then."""
        taken: dict[str, Region] = {}
        try:
            for name in names:
                its = params.memory.allocate(tier, *self.new_flat(name), Kind.OPTIM, self.chunk, self.tickets)
                taken[name] = its
        except BudgetError:
            for region in taken.values():
                params.memory.free(region, Kind.OPTIM)
            raise
        return taken

    def discard(self, managed: ManagedParameter, *, keeps_average: bool = False) -> None:
        """Reset one parameter's state to that before its first update.

        keeps_average: not the average of its weights, of which its optimizer knows nothing.
        """
        wait_on_tier(self.all_flats())
        position = managed.position
        self.note_edit(position)
        self.scalars[position], self.made[position] = None, ()
        self.lacks_average[position] |= not keeps_average
        # Only the parameter's own elements are reset: the rest of each flat tensor is state of the chunk's other
        # parameters.
        for name, flat in self.held.items():
            if keeps_average and name == AVERAGE:
                continue
            layout = self.layout_of(name)
            if layout is None:
                for part in managed.own_parts(flat):
                    part.zero_()
            else:
                for piece in managed.pieces:
                    layout.zero(flat, piece.shard_start, piece.numel)

    def set_scalars(self, position: int, scalars: dict[str, Any]) -> None:
        """Give the parameter scalars of its own, as a state dict has them. Call `discard` before."""
        self.scalars[position] = scalars

    def note_edit(self, position: int, name: str = "") -> None:
        """A user has set a state or a scalar of a parameter, or, without a name, all of them."""
        self.edits[position, name] += 1

    def stamp(self, position: int, name: str) -> object:
        """A value that is equal as long as nothing has changed this state or scalar."""
        return id(self), self.num_updates, self.edits[position, ""], self.edits[position, name]

    def note_exchange(self) -> None:
        """The averages and the weights have changed places."""
        self.num_updates += 1

    def regroup(self, groups: Sequence[int | None]) -> None:
        """The parameters are in these param groups now, by position."""
        self.groups[:] = groups

    def follow_rules(self) -> None:
        """Reset parameters that another optimizer updates from now on: as in plain PyTorch it has no state of them."""
        if self.rules is None:
            return
        for managed, group in zip(self.chunk.parameters, self.groups, strict=True):
            position = managed.position
            whose = self.whose[position] if group is None else self.rules.whose(group)
            if self.scalars[position] is not None and whose != self.whose[position]:
                self.discard(managed, keeps_average=True)
            self.whose[position] = whose

    def name_staged(self, staged: dict[str, Tensor]) -> None:
        """Add to copies of `held` on another tier the names that share them."""
        staged.update({name: staged[self.memory_of(name)] for name in self.flats})

    def names(self, position: int) -> tuple[str, ...]:
        """The flat states of a parameter. Adam's exist from the start, a torch optimizer's once it has created them."""
        has_average = AVERAGE in self.flats and not self.lacks_average[position]
        return (*self.names_of_update(position), AVERAGE) if has_average else self.names_of_update(position)

    def names_of_update(self, position: int) -> tuple[str, ...]:
        """The flat states of a parameter that its optimizer knows: all but the average of its weights."""
        if self.is_fused:
            if AVERAGE not in self.flats:
                return tuple(self.flats)
            return tuple(name for name in self.flats if name != AVERAGE)
        always = None if self.rules is None else self.rules.names(self.groups[position])
        return self.made[position] if always is None else always

    def counts_steps(self, position: int) -> bool:
        """Whether the parameter's `step` is an int, and not a tensor or what else an optimizer makes of it."""
        return self.is_fused or (self.rules is not None and self.rules.counts_steps(self.groups[position]))

    def is_whole(self, position: int) -> bool:
        """Whether the parameter is updated whole, by an optimizer that treats each tensor by itself."""
        return self.rules is not None and self.rules.is_whole(self.groups[position])

    def without_average(self) -> list[tuple[int, int]]:
        """(first element, number) of the parts of parameters whose average has not begun."""
        lacking = [each for each in self.chunk.parameters if self.lacks_average[each.position]]
        return [(piece.shard_start, piece.numel) for each in lacking for piece in each.pieces]

    def note_average(self, position: int | None = None) -> None:
        """The average of a parameter has begun; None: that of all."""
        for each in range(len(self.lacks_average)) if position is None else (position,):
            self.lacks_average[each] = False

    def runs(self, steps: bytes) -> list[Run]:
        """The fewest runs of elements that are updated now and share group and scalars. Runs span paddings.

        steps: by position, whether the parameter is updated. The runs of the last step are reused unless something has
        changed that decides them: comparing lists of thousands is much faster than deriving runs. Scalars are compared
        by identity, because an update gives new ones to all parameters that share them.
        """
        # Copies, because both lists are written in place.
        decides = steps, [*self.groups], [*self.made]
        if decides != self._runs_are_of or not all(map(operator.is_, self.scalars, self._scalars_before)):
            self._runs, self._runs_are_of, self._scalars_before = self._find_runs(steps), decides, [*self.scalars]
        return self._runs

    def _find_runs(self, steps: bytes) -> list[Run]:
        # Group the parameters by what they share. Groups are few, so a linear search among them is enough; scalars may
        # be tensors, which have no hash by value.
        active = [i for i, group in enumerate(self.groups) if steps[i] and group is not None]
        alike: list[tuple[Any, list[int]]] = []  # (what they share, positions)
        for position in active:
            shared = self.groups[position], self.made[position], self.scalars[position]
            # A parameter that is updated whole is a run of its own, whatever its scalars.
            others = () if self.is_whole(position) else alike
            of_its_kind = next((its for other, its in others if _share(other, shared)), None)
            if of_its_kind is None:
                alike.append((shared, [position]))
            else:
                of_its_kind.append(position)
        # The usual case: all parameters alike, so one run of all elements, paddings included.
        if len(alike) == 1 and len(active) == len(self.groups):
            return [Run(0, self.chunk.optim_numel, tuple(active), alike[0][0][0])]
        # Only our own Adam takes runs with spans. The run of a whole parameter is one, too, though its pieces may lie
        # apart: what was made of it is written piece by piece.
        in_one = [self.counts_steps(its[0]) or self.is_whole(its[0]) for _, its in alike]
        return [
            run
            for ((group, *_), its), is_one in zip(alike, in_one, strict=True)
            for run in runs_of(self.chunk, its, group, is_one)
        ]

    def are_all(self, runs: Sequence[Run]) -> bool:
        """Whether the runs cover all elements of this rank, paddings included."""
        return len(runs) == 1 and runs[0].numel == self.chunk.optim_numel and runs[0].spans is None

    def start(self, run: Run, weights: ShardView | None = None) -> RunUpdate:
        """The update of one run. weights: of the whole chunk; None for a run without elements."""
        # Parameters of one run have equal scalars and states, so the first one stands for all of them.
        scalars, part = self.scalars[run.positions[0]], slice(run.start, run.start + run.numel)
        names = self.names_of_update(run.positions[0])
        flats = self.flats if weights is None or not weights.staged_states else weights.staged_states
        if self.layouts and self.counts_steps(run.positions[0]):
            # Of our Adam, which makes no state later.
            packed = StoredStates(self.layouts, flats) if run.numel else None
            return RunUpdate(run, weights, self._no_gradient(), {}, dict(scalars or {}), scalars is None, stored=packed)
        # Beside the states that these parameters have, those that they lack and that have memory already: if the update
        # creates one, its values go there.
        room = self._views(flats, run) if self.layouts else {name: each[part] for name, each in flats.items()}
        flat = {name: room.pop(name) for name in names if name in room}
        room.pop(AVERAGE, None)
        # The scalars are copied, because a parameter that this step passes over may share the dict, and its step count
        # must not grow.
        its = dict(scalars or {})
        return RunUpdate(run, weights, self._no_gradient(), flat, its, is_new=scalars is None, room=room)

    def _views(self, flats: Mapping[str, Tensor], run: Run) -> dict[str, Tensor]:
        """A run's elements of every state that has memory for them, for an optimizer whose states are fp32."""
        found: dict[str, Tensor] = {}
        for name, flat in flats.items():
            layout = self.layout_of(name)
            if layout is None:
                found[name] = flat[run.start : run.start + run.numel]
            elif not run.numel:
                found[name] = _nothing(self.dtype, flat.device)
            else:
                # Within a run of such an optimizer there are only paddings between tensors, so it lies in one part.
                its = layout.part_of(flat, run.start, run.numel)
                found |= {} if its is None else {name: its.elements}
        return found

    def _no_gradient(self) -> Tensor:
        """The gradient before it is there. It tells the update which dtype the weights have, and where."""
        # Torch's optimizers refuse a gradient on another device than their states, though neither has an element.
        for flat in self.flats.values():
            return _nothing(self.dtype, flat.device)
        return _nothing(self.dtype, torch.device("cpu"))

    def store_updates(self, updates: Sequence[RunUpdate], params: ParamStore) -> None:
        """Store the states and scalars that the updates of a step have made.

        Raises UnsupportedError for a state that another optimizer keeps in fewer bits.
        """
        # A torch optimizer creates its states in its first update: allocate them in the chunk's state then. Ranks that
        # hold no elements of the parameter do so too, since all of them have one plan.
        for each in updates:
            part = slice(each.run.start, each.run.start + each.run.numel)
            for name, value in each.made.items():
                if name not in self.flats:
                    self.allocate([name], params)
                if name in each.room:  # it was made there
                    continue
                if self.layout_of(name) is not None:
                    raise UnsupportedError(
                        f"an update of {self.chunk.names()} has made {name!r}, which the first one did not, and "
                        "another optimizer keeps its moments of 8 or 16 bits under this name: leave those in fp32"
                    )
                self.flats[name][part].copy_(value)
        self.num_updates += 1
        # All parameters of a run share its scalars from now on. A parameter that is cut into several runs is assigned
        # equal scalars several times, which counts one step.
        for each in updates:
            for position in each.run.positions:
                self.scalars[position] = each.scalars
                managed = self.chunk.parameters[position]
                # After its first update this is a look, not a call for each parameter and step.
                if not managed.has_fractions:
                    managed.note_fractions()
                if each.made:
                    self.note_made(position, each.made)
        # Parameters that shared scalars still do, so the cached runs stay valid.
        self._scalars_before[:] = self.scalars

    def note_made(self, position: int, names: Iterable[str]) -> None:
        """Record that the parameter has these flat states too."""
        self.made[position] = tuple(sorted({*self.made[position], *names}))


def _layout(chunk: Chunk, formats: Sequence[StateFormat | None]) -> StateLayout:
    """Where the parts of a memory are whose formats are these, by position. Equal in size on all ranks."""
    layout = chunk.optim_layout

    def of(rank: int, num_bytes: int = 0) -> StateLayout:
        pairs = zip(chunk.parameters, formats, strict=True)
        return StateLayout.of(
            (
                (piece.shard_start, piece.numel, its, piece.payload_start - each.offset)
                for each, its in pairs
                for piece in layout.pieces(rank, each.offset, each.numel)
            ),
            num_bytes,
        )

    most = max(of(rank).num_bytes for rank in range(layout.world_size))
    return of(chunk.rank if layout.world_size > 1 else 0, most)


@cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(0, dtype=dtype, device=device)


def _share(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[:2] == b[:2] and _same(a[2], b[2])


def _same(a: dict[str, Any] | None, b: dict[str, Any] | None) -> bool:
    if a is b:
        return True
    if a is None or b is None:
        return False
    # After `load_state_dict()` each parameter has scalars of its own. Where they are equal, one run takes them all
    # again.
    return a.keys() == b.keys() and all(bool(a[name] == b[name]) for name in a)


# -- The optimizer state of all chunks. It is allocated, moved and freed as training requires (`StateStore`).


class ChunkStates:
    """The states of one optimizer, by chunk."""

    def __init__(
        self,
        params: ParamStore,
        update: UpdateRule,
        param_groups: list[dict[str, Any]],
        group_of: Mapping[int, int],
        averages: Averages | None = None,
        embeddings: Collection[int] = (),
    ) -> None:
        """group_of: the param group of each parameter in a group, by parameter index. embeddings: indices of those."""
        self._embeddings = embeddings
        self._params = params
        self.averages = averages
        self._update = update
        self._rules = GroupRules(update, param_groups) if isinstance(update, SeveralUpdates) else None
        self._param_groups = param_groups
        self._group_of = dict(group_of)
        self.by_chunk: dict[int, ChunkOptimizerState] = {}  # by chunk index, in order; may contain frozen chunks
        self._fp16: dict[int, Chunk] = {}  # the chunks in `by_chunk` with fp16 weights
        # The flat states of a parameter, by its param group and shape, with the settings of the group.
        self._flat_names: dict[tuple[int, tuple[int, ...]], tuple[str, tuple[str, ...]]] = {}
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
        return bool(self._fp16) and any(chunk.trainable for chunk in self._fp16.values())

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

    def note_write(self, managed: ManagedParameter, name: str) -> None:
        """A user has set a state of a parameter. Local."""
        self.by_chunk[managed.chunk.index].note_edit(managed.position, name)

    def scalars_of(self, managed: ManagedParameter) -> dict[str, Any] | None:
        """What is kept of a parameter beside flat states, such as its number of steps; None before its first update."""
        state = self.by_chunk.get(managed.chunk.index)
        return None if state is None else state.scalars[managed.position]

    def region_of(self, chunk: Chunk, name: str) -> Region:
        """A flat state of a chunk, as it is stored. Zeros if only other ranks have created it so far.

        Raises GeminiError for the averages inside `optimizer.ema.weights()`.
        """
        if name == AVERAGE and self.averages is not None:
            self.averages.refuse_exchanged(f"the state {name!r}")
        state = self.by_chunk[chunk.index]
        # A rank without the state takes part in its gather all the same, with a tensor of the size that the others
        # have.
        if name not in state.flats:
            numel, dtype = state.new_flat(name)
            return Region(Tier.HOST, torch.zeros(numel, dtype=dtype, device="cpu"))
        return state.region(name)

    def layout_of(self, chunk: Chunk, name: str) -> StateLayout | None:
        """How a flat state of a chunk is stored; None: as numbers of its dtype."""
        return self.by_chunk[chunk.index].layout_of(name)

    def has_stepped(self, chunk: Chunk) -> bool:
        """Whether a step, or a loaded state dict, has written the chunk's state. Equal on all ranks."""
        state = self.by_chunk.get(chunk.index)
        return state is not None and any(scalars is not None for scalars in state.scalars)

    def state_counts(self, chunks: Iterable[Chunk]) -> list[float]:
        """How many states of full precision per element each chunk has or its groups need. Equal on all ranks."""
        states = map(self._of, chunks)
        return [state.num_states(self._memories(state)) for state in states]

    def _memories(self, state: ChunkOptimizerState) -> Collection[str]:
        # A state counts for as long as it has memory, also one that its group has stopped using, such as momentum that
        # was lowered to 0.
        names = *state.flats, *self._missing(state), *self._expected.get(state.chunk.index, ())
        return dict.fromkeys(map(state.memory_of, names))

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
            before, self._num_held = self._num_held, sum(len(state.held) for state in self.by_chunk.values())
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
        held = sum(sum(map(state.bytes_of, state.held)) for state in there if state.tier is Tier.HOST)
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

    def resting_bytes(self, plan: Plan) -> dict[int, int]:
        """Bytes of gradients that rest until a step and have no home in `plan`, by chunk: of parameters in no group."""
        return {
            index: state.chunk.optim_numel * state.chunk.gradient_dtype.itemsize
            for index, state in sorted(self.by_chunk.items())
            if None in state.groups and plan.demand.chunks[index].frees_gradient
        }

    def tier_of(self, chunk: Chunk) -> Tier:
        """The tier on which a chunk's state rests."""
        return self.by_chunk[chunk.index].tier

    def migrate(self, chunk: Chunk, home: StateHome) -> None:
        """Move a chunk's state to `home`, or to the host if the device is full."""
        self.by_chunk[chunk.index].migrate(home, self._params)

    def discard(self, managed: ManagedParameter) -> None:
        """Reset one parameter's state to that before its first step."""
        state = self.by_chunk.get(managed.chunk.index)
        if state is not None:
            state.discard(managed)

    def entry_names(self, managed: ManagedParameter, groups: Sequence[Mapping[str, Any]] | None) -> EntryNames:
        """The keys of a parameter's entry in a state dict whose param groups are `groups`; None: as they are here."""
        number, groups = self._group_of[managed.index], groups or self._param_groups
        # Loaded hyperparameters decide which states an entry has: one of torch's Adam with `amsgrad=True` has a third
        # one.
        names = self._update.entry_names({**self._param_groups[number], **groups[number]}, tuple(managed.shape))
        return names if self.averages is None else names.with_flat(AVERAGE)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Raises ValueError, or what a torch optimizer raises, for bad hyperparameters: by an update of no elements."""
        nothing = RunUpdate(Run(0, 0, (), 0), None, torch.zeros(0, device="cpu"), {}, {}, is_new=True)
        try:
            self._update.update([nothing], [group], GradientFactors())
        except KeyError as error:
            raise ValueError(f"a param group with {settings_in_words(group)} has no {error}") from error

    def group(self, managed: ManagedParameter) -> int | None:
        """The number of a parameter's param group. None: it is in no group."""
        return self._group_of.get(managed.index)

    @contextmanager
    def regrouping(self, groups: Sequence[dict[str, Any]], group_of: Mapping[int, int]) -> Iterator[None]:
        """Have other param groups, and other members of them. The block allocates; if it raises, all is undone.

        group_of: the param group of each parameter in a group, by parameter index.
        """
        before = [*self._param_groups], self._group_of
        names_before = {index: list(state.flats) for index, state in self.by_chunk.items()}
        # The members move before the block runs, because the plan that it makes counts the states which their group
        # needs.
        self._regroup(groups, group_of)
        try:
            self._refuse_other_formats()
            yield
        except BaseException:
            self.have_changed = True  # the plan may count the new members' states by now
            self._regroup(*before)
            for index, state in self.by_chunk.items():
                kept = names_before.get(index, [])
                state.free([name for name in state.flats if name not in kept], self._params)
            raise
        for state in self.by_chunk.values():
            state.follow_rules()

    def allocate_all(self) -> None:
        """Allocate what the chunks lack of the states that their groups need. Raises BudgetError."""
        # As in `add_all`, host memory is reserved for all chunks together.
        self.reserve({state.chunk: StateHome(state.tier, state.num_planned) for state in self.by_chunk.values()})
        for state in self.by_chunk.values():
            self._allocate_missing(state)

    def _regroup(self, groups: Sequence[dict[str, Any]], group_of: Mapping[int, int]) -> None:
        # In place: the step and its updates have this list.
        self._param_groups[:] = groups
        self._group_of = dict(group_of)
        for state in self.by_chunk.values():
            state.regroup(self._groups(state.chunk, self._group_of))

    def _refuse_other_formats(self) -> None:
        if not self._stores_small and not any(state.formats for state in self.by_chunk.values()):
            return
        for state in self.by_chunk.values():
            for name, wanted in self._formats(state.chunk, state.groups).items():
                found = state.formats.get(name, [FP32] * len(wanted))
                others = [i for i, (a, b) in enumerate(zip(wanted, found, strict=True)) if a is not None and a != b]
                if others:
                    raise UnsupportedError(
                        f"optim_bits of {', '.join(state.chunk.parameters[i].name for i in others)} was changed, or "
                        "they were moved to a group with another one or to another optimizer, and their moments are "
                        "stored already: set it before the ShardedOptimizer is made, or load a checkpoint into one "
                        "that was made with it"
                    )

    def host_bytes(self, chunk: Chunk, home: StateHome) -> int:
        """Bytes on the host of a chunk's state whose planned home is `home`."""
        state = self._of(chunk)
        memories = self._memories(state)
        is_there = resting_tier(home, state.num_states(memories), self._params.memory) is Tier.HOST
        return sum(map(state.bytes_of, memories)) if is_there else 0

    def _of(self, chunk: Chunk) -> ChunkOptimizerState:
        """A chunk's state. Where there is none yet, an object without memory stands for it."""
        return self.by_chunk.get(chunk.index) or self._new(chunk, StateHome(Tier.HOST))

    def _new(self, chunk: Chunk, home: StateHome) -> ChunkOptimizerState:
        groups = self._groups(chunk, self._group_of)
        formats = self._formats(chunk, groups) if self._stores_small and chunk.dtype is not torch.float64 else {}
        small = {name: its for name, its in formats.items() if any(each not in (None, FP32) for each in its)}
        return ChunkOptimizerState(chunk, *home, self._update.is_fused, groups, self._rules, small)

    @property
    def _stores_small(self) -> bool:
        """Whether any param group may have states of less than fp32."""
        return any(self._update.format_of(group) != FP32 for group in self._param_groups)

    def _formats(self, chunk: Chunk, groups: Sequence[int | None]) -> Formats:
        """How the chunk's states are stored if its parameters are in these groups."""
        found: Formats = {}
        for managed, number in zip(chunk.parameters, groups, strict=True):
            # Of a parameter in no group nothing is known where there are several optimizers.
            if number is None and self._rules is not None:
                continue
            group = {} if number is None else self._param_groups[number]
            is_whole = self._rules is not None and self._rules.is_whole(number)
            names = self._names_in(number, tuple(managed.shape) if is_whole else ()) if number is not None else None
            its = self._update.format_of(group, managed.numel, managed.index in self._embeddings)
            for name in self._update.flat_names(group) if names is None else names:
                memory = name if self._rules is None else self._rules.memory_of(name)
                found.setdefault(memory, [None] * len(groups))[managed.position] = its
        return found

    def _allocate_missing(self, state: ChunkOptimizerState) -> None:
        state.allocate(self._missing(state), self._params)

    def _missing(self, state: ChunkOptimizerState) -> list[str]:
        """The flat states that the chunk's groups need and that it does not have."""
        # Sorted groups, and a dict in place of a set of names, whose order differs by process, give all ranks one order
        # of allocations.
        # What an elementwise optimizer keeps depends on no shape, and a chunk may have thousands of parameters.
        for managed in state.chunk.parameters:
            if managed.part is not None and managed.part.is_cut and state.is_whole(managed.position):
                raise UnsupportedError(
                    f"{managed.name!r} is divided by tensor parallelism, and its optimizer takes whole tensors: ranks "
                    "exchange shards of parts, and no rank has the whole. Give it to HybridAdam or another elementwise "
                    "optimizer"
                )
        needing = {
            (number, tuple(managed.shape) if state.is_whole(managed.position) else ())
            for managed, number in zip(state.chunk.parameters, state.groups, strict=True)
            if number is not None
        }
        names = {name: None for group in sorted(needing) for name in self._names_in(*group)}  # in order
        if self.averages is not None:
            names[AVERAGE] = None
        return [name for name in names if name not in state.flats]

    def _names_in(self, number: int, shape: tuple[int, ...]) -> tuple[str, ...]:
        """The flat states of a param group's parameters. A trial update finds them, once for all chunks."""
        group = self._param_groups[number]
        settings = settings_in_words(group)
        # The answer depends on hyperparameters, which a user may set at any time: SGD keeps a buffer only while its
        # momentum is above 0.
        if self._flat_names.get((number, shape), ("",))[0] != settings:
            self._flat_names[number, shape] = settings, self._update.flat_names(group, shape)
        return self._flat_names[number, shape][1]

    @staticmethod
    def _groups(chunk: Chunk, group_of: Mapping[int, int]) -> list[int | None]:
        return [group_of.get(managed.index) for managed in chunk.parameters]


# -- Makes an optimizer on all ranks or on none: failures are told to all, and memory is allocated, all of it or none.


@contextmanager
def making_optimizer(step: Step) -> Iterator[None]:
    """Around all that makes an optimizer, its checks too: an exception is told to the other ranks.

    The rank that was refused may go on, while the others would wait for it in the next collective. After a failure that
    every rank caught they start together again; collective in that case.
    """
    step.failures.find()
    # An optimizer may be made inside a forward, which goes on.
    if not (step.calls.by_thread or step.is_recomputing()):
        step.failures.recover()
    with step.publishing():
        yield


def take_states(model: ShardedModel, states: ChunkStates) -> None:
    """Allocate gradients, masters and optimizer state. Collective.

    The plan in force counts Adam's two states per element. Another one is made for an optimizer with fewer or more.
    If the device has less memory than the budget, model data shrinks as after an out-of-memory step, and all of it is
    tried again. It is tried again once if the host has more free memory now than when it was read. Raises BudgetError,
    alike on all ranks, and holds nothing then.
    """
    purpose = model.trainability.purpose
    # Free memory of the host may grow again and again by chance. Look once, or this might never end.
    has_looked = False
    numbers = states.state_counts(model.chunk_manager.chunks)
    with purpose.beginning_training("an optimizer", numbers):
        while True:
            error = _try_states(model.chunk_manager, states, purpose.may_make_room())
            if error is None:
                # The plan may count other numbers where states cannot move now. Then a later forward follows.
                if has_room_for(model.plan, numbers):
                    states.note_followed()
                return
            # Every rank takes the same branch, because all have agreed on `error.is_shortage`: both calls are
            # collective.
            if error.is_shortage:
                found = purpose.make_room()
            else:
                found, has_looked = not has_looked and purpose.find_host_room(), True
            if not found:
                raise error


def _try_states(manager: ChunkManager, states: ChunkStates, stays_on_device: bool) -> BudgetError | None:
    """Allocate everything where the plan puts it. Collective. Returns None, or the reason why no rank holds any of it.

    stays_on_device: state that finds no memory on the device is a failure, and does not rest on the host instead.
    """
    training, error = manager.training, None
    device, host = manager.memory.tiers
    was_there, num_shortages = training.is_there, device.num_shortages
    trained = [chunk for chunk in manager.chunks if chunk.trainable]
    plan = manager.plan
    homes = {chunk: plan.placement.optim_home(plan.demand, chunk.index) for chunk in trained}
    try:
        try:
            # Gradients and masters come first, and map the host memory of the optimizer state in one piece with theirs.
            training.allocate(states.missing_host_bytes(homes))
            states.add_all(homes)
            held = host.ledger.total_bytes - _sums_beside(plan, host)
            check_host_room_for_steps(plan, held)
            check_room_at_rest(plan, states.resting_bytes(plan), held)
            if stays_on_device and device.num_shortages > num_shortages:
                error = BudgetError("device: no memory for optimizer state", tier=Tier.DEVICE, is_shortage=True)
        except BudgetError as refusal:
            error = refusal
        # A rank that found room must give it back if another one found none: no rank trains alone.
        error = manager.agree_on_room(error)
    except BaseException:
        _give_back(manager, states, was_there)
        raise
    if error is not None:
        _give_back(manager, states, was_there)
    elif not was_there:
        # The plan's gradient slots have no memory yet: their next use allocates it.
        manager.step.payloads.miss_room()
    return error


def _sums_beside(plan: Plan, host: HostTier) -> int:
    """Bytes of gradients that earlier steps have taken on the host beside the plan. Steps to come use them again."""
    planned = plan.placement.bytes_by_kind(plan.demand, Tier.HOST)[Kind.GRAD]
    return max(0, host.ledger.bytes_by_kind[Kind.GRAD] - planned)


def _give_back(manager: ChunkManager, states: ChunkStates, training_was_there: bool) -> None:
    states.drop_all()
    # If a backward came before the optimizer, it took the gradients' memory, and they are in it.
    if not training_was_there:
        manager.training.give_back()
