"""One chunk's optimizer state: flat per-element states, and step counts and other scalars by parameter."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.errors import BudgetError
from gemini.manager.params import ParamStore
from gemini.memory.memory import Memory
from gemini.memory.region import Region, Tickets
from gemini.memory.transfer import wait_on_tier
from gemini.optimizer.runs import Run, RunUpdate, runs_of
from gemini.optimizer.shard_view import ShardView
from gemini.placement.demand import Kind, StateHome, Tier


def resting_tier(home: StateHome, count: int, memory: Memory) -> Tier:
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
    tier: Tier  # the tier on which all of `flats` rest, and on which updates run
    num_planned: int  # number of flat states that the plan has room for
    counts_steps: bool  # `step` is an int, not a tensor
    groups: list[int | None]  # by position: the param group; None for a parameter in no group
    flats: dict[str, Tensor] = field(default_factory=dict)  # (optim_numel,) each
    tickets: Tickets = field(default_factory=Tickets)  # of all `flats`
    scalars: list[dict[str, Any] | None] = field(init=False)  # by position; None before the first update
    made: list[tuple[str, ...]] = field(init=False)  # by position: names of flat states that updates have created

    def __post_init__(self) -> None:
        self.scalars = [None for _ in self.groups]
        self.made = [() for _ in self.groups]
        # The runs of the last step, and what they were derived from.
        self._runs: list[Run] = []
        self._runs_are_of: tuple[Any, ...] = ()
        self._scalars_before: list[dict[str, Any] | None] = []

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.chunk.dtype is torch.float64 else torch.float32

    @property
    def num_flat_bytes(self) -> int:
        """Bytes of one flat state."""
        return self.chunk.optim_numel * self.dtype.itemsize

    def region(self, name: str) -> Region:
        """(optim_numel,) a flat state."""
        return Region(self.tier, self.flats[name], self.tickets)

    def wait_for_readers(self) -> None:
        """The states are about to be written: whoever reads them in the background has to be done."""
        if self.tickets.reads:
            wait_on_tier(*map(self.region, self.flats))

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
            region = self.region(name)
            del self.flats[name]
            params.memory.free(region, Kind.OPTIM)

    def _rest(self, names: list[str], tier: Tier, params: ParamStore) -> None:
        tier = resting_tier(StateHome(tier, self.num_planned), len(names), params.memory)
        leaves = tier is not self.tier
        try:
            # All memory is taken before anything moves, so that a refusal leaves every state where it is.
            taken = self._taken([name for name in names if leaves or name not in self.flats], tier, params)
        except BudgetError as refused:
            if tier is Tier.HOST:
                raise
            # The host takes the bytes, so nothing is lost. Uncounted, the shortage would make model data give up a part
            # of the device at the next step.
            params.memory.note_evaded(refused)
            self._rest(names, Tier.HOST, params)
            return
        # All states rest on one tier, where the update runs. Copy the present ones, and free the old memory only after
        # the copies have ended.
        if leaves:
            moves = [(taken[name], Region(self.tier, flat)) for name, flat in self.flats.items()]
            for to, source in moves:
                params.memory.transfer.copy(to, source)
            wait_on_tier(*(region for pair in moves for region in pair))
            # `free` gives the memory back to `self.tier`, which must still be the old tier here.
            self.free(list(self.flats), params)
            self.tier = tier
        self.flats.update((name, region.flat) for name, region in taken.items())

    def _taken(self, names: Sequence[str], tier: Tier, params: ParamStore) -> dict[str, Region]:
        """Allocate all of these states. Raises BudgetError, and holds none of them then."""
        taken: dict[str, Region] = {}
        try:
            for name in names:
                taken[name] = params.memory.allocate(tier, self.chunk.optim_numel, self.dtype, Kind.OPTIM)
        except BudgetError:
            for region in taken.values():
                params.memory.free(region, Kind.OPTIM)
            raise
        return taken

    def discard(self, managed: ManagedParameter) -> None:
        """Reset one parameter's state to that before its first update."""
        self.wait_for_readers()
        position = managed.position
        self.scalars[position], self.made[position] = None, ()
        # Only the parameter's own elements are reset: the rest of each flat tensor is state of the chunk's other
        # parameters.
        for flat in self.flats.values():
            for part in managed.own_parts(flat):
                part.zero_()

    def set_scalars(self, position: int, scalars: dict[str, Any]) -> None:
        """Give the parameter scalars of its own, as a state dict has them. Call `discard` before."""
        self.scalars[position] = scalars

    def regroup(self, groups: Sequence[int | None]) -> None:
        """The parameters are in these param groups now, by position."""
        self.groups[:] = groups

    def names(self, position: int) -> tuple[str, ...]:
        """The flat states of a parameter. Adam's exist from the start, a torch optimizer's once it has created them."""
        return tuple(self.flats) if self.counts_steps else self.made[position]

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
            of_its_kind = next((its for other, its in alike if _share(other, shared)), None)
            if of_its_kind is None:
                alike.append((shared, [position]))
            else:
                of_its_kind.append(position)
        # The usual case: all parameters alike, so one run of all elements, paddings included.
        if len(alike) == 1 and len(active) == len(self.groups):
            return [Run(0, self.chunk.optim_numel, tuple(active), alike[0][0][0])]
        in_one = self.counts_steps  # only our own Adam takes runs with spans
        return [run for (group, *_), its in alike for run in runs_of(self.chunk, its, group, in_one)]

    def are_all(self, runs: Sequence[Run]) -> bool:
        """Whether the runs cover all elements of this rank, paddings included."""
        return len(runs) == 1 and runs[0].numel == self.chunk.optim_numel and runs[0].spans is None

    def start(self, run: Run, weights: ShardView | None = None, grad: Tensor | None = None) -> RunUpdate:
        """The update of one run.

        weights, grad: of the whole chunk, `grad` with shape (optim_numel,). None for a run without elements.
        """
        # Parameters of one run have equal scalars and states, so the first one stands for all of them.
        scalars, part = self.scalars[run.positions[0]], slice(run.start, run.start + run.numel)
        names = self.names(run.positions[0])
        flat = {name: self.flats[name][part] for name in names if name in self.flats}
        # States that these parameters lack and that have memory already: if the update creates one, its values go
        # there.
        room = {name: each[part] for name, each in self.flats.items() if name not in names}
        grad = self._no_gradient() if grad is None else grad[part]
        # The scalars are copied, because a parameter that this step passes over may share the dict, and its step count
        # must not grow.
        return RunUpdate(run, weights, grad, flat, dict(scalars or {}), is_new=scalars is None, room=room)

    def _no_gradient(self) -> Tensor:
        """The gradient of a run without elements. It tells the update which dtype the weights have, and where."""
        # Torch's optimizers refuse a gradient on another device than their states, though neither has an element.
        device = next((flat.device for flat in self.flats.values()), torch.device("cpu"))
        return torch.zeros(0, dtype=self.dtype, device=device)

    def store_updates(self, updates: Sequence[RunUpdate], params: ParamStore) -> None:
        """Store the states and scalars that the updates of a step have made."""
        # A torch optimizer creates its states in its first update: allocate them in the chunk's state then. Ranks that
        # hold no elements of the parameter do so too, since all of them have one plan.
        for each in updates:
            part = slice(each.run.start, each.run.start + each.run.numel)
            for name, value in each.made.items():
                if name not in self.flats:
                    self.allocate([name], params)
                if name not in each.room:  # else it was made there
                    self.flats[name][part].copy_(value)
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
