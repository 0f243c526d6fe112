"""Which optimizers update each element by itself, torch's and ours, and their settings in words."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemini.errors import UnsupportedError
from gemini.optimizer.given import kind_of
from gemini.optimizer.shards import EntryNames, GradientFactors, Run, RunUpdate
from gemini.optimizer.worker import Worker
from gemini.runtime.chunk import ManagedParameter
from optim import (
    FP32,
    AdamPiece,
    AdamScalars,
    CPUAdam,
    HybridAdam,
    StateFormat,
    adam_scalars,
    format_of_tensor,
    hyperparameters,
    update_pieces,
)

# -- What all ranks must have alike in an optimizer, as text that they compare.
#
# The text is exact: torch prints four digits of a tensor, so that learning rates of two ranks could differ unseen.


def in_words(value: Any) -> str:
    """`repr(value)`, with all digits of tensors in it."""
    if isinstance(value, Tensor):
        if value.is_meta:  # of a state that is read from a file later
            return f"tensor of {tuple(value.shape)}, {value.dtype}"
        # Every step comes here: for a learning rate that is a tensor on the device the host waits.
        return f"tensor({value.tolist()}, {value.dtype})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(in_words, value))})"
    return repr(value)


def settings_in_words(group: Mapping[str, Any]) -> str:
    """The hyperparameters of a param group."""
    return ", ".join(
        [f"{name}={in_words(value)}" for name, value in group.items() if name not in ("params", "param_names")]
    )


def group_in_words(number: int, members: Sequence[ManagedParameter], group: Mapping[str, Any]) -> str:
    """A param group with the names of its members."""
    return f"param group {number} of {', '.join(each.name for each in members)} with {settings_in_words(group)}"


def state_in_words(saved: Mapping[str, Any]) -> str:
    """Which entries an optimizer's state dict has, with everything but the values of whole tensors."""
    return "\n".join(_lines_of(saved))


def _lines_of(saved: Mapping[str, Any]) -> Iterator[str]:
    for number, group in enumerate(saved["param_groups"]):
        yield f"param group {number} with {settings_in_words(group)}"
    for number, entry in sorted(saved["state"].items()):
        # Step counts and other tensors without dimensions are shown with their values, by which updates would differ.
        names = (
            name if isinstance(its, Tensor) and its.dim() else f"{name}={in_words(its)}" for name, its in entry.items()
        )
        yield f"state of parameter {number}: {', '.join(names)}"
    yield f"masters of parameters {sorted(saved.get('masters', {}))}"


# -- The update of runs by a torch optimizer that works element by element.
#
# [Note: Tiles of an update] A torch optimizer makes temporaries as large as what it updates, which no plan counts. So
# it is given tiles of at most `TILE_NUMEL` elements, one after another: temporaries are of that size whatever the size
# of a chunk, and a step finds room for them before anything has changed (`ChunkUpdates.room`). No bit depends on where
# tiles end, as every element is updated by itself.


TILE_NUMEL = {"cpu": 2**20, "cuda": 2**22}
"""Elements that are updated at once, by the type of their device. On the CPU temporaries stay in its caches then, which
takes half of the time that 16 times as many take. On a fast GPU launches would take more time than kernels."""
MOST_TEMPORARIES = 8
"""Tensors of its tile's size that an update by one of `TESTED` has at once at most, fp32 gradients included."""
_SCALARS = 2**12
"""Bytes for tensors of one element."""

TESTED: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.RMSprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Rprop,
    torch.optim.ASGD,
)
"""Optimizers whose updates of flat runs are tested to equal those of separate parameters."""


@dataclass(frozen=True)
class _Tile:
    """Elements [start, start + numel) of a run."""

    each: RunUpdate
    start: int
    numel: int
    after: dict[str, Any]  # scalars after the update, of the whole run

    def note_scalar(self, name: str, value: Any) -> None:
        """The tile's update has left this scalar: every tile of a run leaves the same."""
        self.after[name] = value

    @property
    def is_whole(self) -> bool:
        return self.numel == self.each.run.numel

    def of(self, tensor: Tensor, first: int = 0) -> Tensor:
        """The tile's elements of a tensor whose element `first` is the first of the run."""
        return tensor[first + self.start : first + self.start + self.numel]


def _most(device: torch.device) -> int:
    return TILE_NUMEL.get(device.type, TILE_NUMEL["cuda"])


def _in_tiles(updates: Sequence[RunUpdate], after: Sequence[dict[str, Any]]) -> Iterator[list[_Tile]]:
    """All elements of the runs in groups of tiles, each group of at most `TILE_NUMEL` elements."""
    group: list[_Tile] = []
    # In a chunk without states, a run without elements has its gradient on the CPU, though the chunk may be updated on
    # the device: the largest size is that of the chunk's device.
    most = room = max((_most(each.grad.device) for each in updates), default=1)
    for each, its in zip(updates, after, strict=True):
        start = 0
        # A run without elements makes a tile too, because its step must be counted.
        while True:
            numel = min(room, each.run.numel - start)
            group.append(_Tile(each, start, numel, its))
            start, room = start + numel, room - numel
            # A group may have tiles of several runs, so that many small runs share one call of the optimizer.
            if not room:
                yield group
                group, room = [], most
            if start == each.run.numel:
                break
    if group:
        yield group


class TorchUpdate:
    """A `torch.optim` optimizer to which the runs of one chunk are passed as its parameters, in tiles.

    It uses the optimizer's loop over parameters, not its `foreach` and `fused` forms, whose bits differ and would
    depend on how parameters are cut into runs.
    """

    is_fused = False
    always_has: tuple[str, ...] | None = None  # see `AdamUpdate`: of SGD it depends on the momentum

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        kind = kind_of(optimizer)
        accepted = inspect.signature(kind.__init__).parameters
        # AdamW has a default that its constructor does not take: `decoupled_weight_decay`.
        settings = {name: value for name, value in optimizer.defaults.items() if name in accepted}
        self._make = lambda parameter: kind([parameter], **settings)
        # Those of torch have all that counts in their groups. None: it is one of them.
        self._copy = None if kind in TESTED else Worker(optimizer)
        self._worker = self._make(torch.zeros(1, device="cpu")) if self._copy is None else self._copy.optimizer
        # Adagrad creates its state in the constructor.
        self._starts_with_state = bool(optimizer.state if self._copy else self._worker.state)
        self._tries = False  # what is stepped now is nobody's

    def format_of(self, group: Mapping[str, Any], numel: int = 0, is_embedding: bool = False) -> StateFormat:
        """See `AdamUpdate.format_of`: torch's optimizers update fp32 in place."""
        return FP32

    def flat_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> tuple[str, ...]:
        """See `AdamUpdate.flat_names`."""
        return tuple(self._probe(group).made)

    def entry_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> EntryNames:
        """See `AdamUpdate.entry_names`."""
        if type(self._worker) not in TESTED:
            return EntryNames((), (), None)
        # SGD creates a missing momentum buffer in any step, so none is needed.
        if isinstance(self._worker, torch.optim.SGD):
            return EntryNames((), ("momentum_buffer",), ("momentum_buffer",))
        probe = self._probe(group)
        names = (*probe.scalars, *probe.made)
        return EntryNames(names, tuple(probe.made), names)

    def _probe(self, group: Mapping[str, Any]) -> RunUpdate:
        """A first update of no elements, which shows the states and scalars that the optimizer creates."""
        first = RunUpdate(Run(0, 0, (), 0), None, torch.zeros(0, device="cpu"), {}, {}, is_new=True)
        # An optimizer that is not on the tested list may draw random numbers, which must not change the user's.
        with torch.random.fork_rng(devices=[]):
            self._tries = True
            try:
                self.update([first], [group], GradientFactors())
            finally:
                self._tries = False
        return first

    def temporary_bytes(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        """See `AdamUpdate.temporary_bytes`. Of an optimizer that is not in `TESTED` a guess."""
        return MOST_TEMPORARIES * min(numel, _most(device)) * dtype.itemsize + _SCALARS

    def update(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """See `AdamUpdate.update`, for the runs of one chunk. Raises what the optimizer raises."""
        # A run that is cut into several tiles starts each of them with the scalars from before the update.
        after: list[dict[str, Any]] = [{} for _ in updates]
        for tiles in _in_tiles(updates, after):
            self._update_tiles(tiles, groups, factors)
        for each, scalars in zip(updates, after, strict=True):
            each.note_scalars(scalars)

    def _update_tiles(
        self, tiles: Sequence[_Tile], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        worker = self._worker
        worker.state.clear()
        worker.param_groups.clear()
        parameters = [self._parameter_of(tile, factors) for tile in tiles]
        for number, group in enumerate(groups):
            pairs = zip(tiles, parameters, strict=True)
            members = [parameter for tile, parameter in pairs if tile.each.run.group == number]
            if members:
                # The value is not None, because torch then chooses `foreach` by itself for parameters on a GPU.
                options = {name: False if name in ("foreach", "fused") else value for name, value in group.items()}
                worker.param_groups.append({**options, "params": members})
        if self._copy is None:
            worker.step()
        elif self._tries:
            self._copy.trial_step()
        else:
            self._copy.step()
        for tile, parameter in zip(tiles, parameters, strict=True):
            for name, value in worker.state.get(parameter, {}).items():
                # Per-element states have the tile's shape. Everything else, such as a step count of shape (), belongs
                # to the whole run.
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.dim() == 1:
                    _store(tile, name, value)
                else:
                    tile.note_scalar(name, _copy(value))
        # The worker has views of the chunk's states, and of a slot where the update found its staging memory there.
        # The worker must not keep that memory alive, nor the slot from its next payload.
        worker.state.clear()
        worker.param_groups.clear()

    def _parameter_of(self, tile: _Tile, factors: GradientFactors) -> Tensor:
        """The tile's weights as a parameter of the worker, with their gradient and state."""
        each = tile.each
        # A run without weights gets a parameter without elements: the optimizer then counts a step and writes nothing.
        parameter = (
            torch.zeros_like(each.grad) if each.weights is None else tile.of(each.weights.load(), first=each.run.start)
        )
        parameter = parameter.detach()
        # The gradient is widened before it is unscaled, because small values times 1 / loss scale underflow in 16 bits.
        parameter.grad = factors.applied(tile.of(each.grad).to(parameter.dtype))
        if not each.is_new:
            # Flat states are views, which the optimizer updates in place. Scalars are copies, because it also adds to
            # `step` in place, and the run's next tile needs the count from before.
            flat = {name: tile.of(state) for name, state in each.flat.items()}
            self._worker.state[parameter] = flat | {name: _copy(value) for name, value in each.scalars.items()}
        elif self._starts_with_state:
            self._worker.state[parameter] = self._make(parameter).state[parameter]
        return parameter


def _store(tile: _Tile, name: str, value: Tensor) -> None:
    """Store a state that the optimizer updated in place, created or replaced."""
    each = tile.each
    if name in each.flat:
        its = tile.of(each.flat[name])
        # An optimizer may put a new tensor in the place of the view that it was given.
        if its.data_ptr() != value.data_ptr():
            its.copy_(value)
    elif name in each.room:
        tile.of(each.create(name, each.room[name])).copy_(value)
    # The chunk has no memory for this state. `ChunkOptimizerState.store_updates` allocates it and copies what was made.
    elif tile.is_whole:
        each.create(name, value)
    else:
        tile.of(each.create(name, value.new_empty(each.run.numel))).copy_(value)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


# -- The update of a run of elements: by our Adam, or by a torch optimizer that works element by element.
#
# A run is a piece of a flat shard whose parameters share group, step count and scalars. An elementwise optimizer gives
# the same bits on a run as on its parameters one by one, so one call updates hundreds of parameters.


class AdamUpdate:
    """The Adam of `optim.reference`, over any number of chunks at once."""

    is_fused = True  # one call takes runs with spans, of several chunks; step counts are plain numbers
    always_has: tuple[str, ...] | None = ("exp_avg", "exp_avg_sq")
    """The flat states of every parameter, if no setting changes them."""

    def __init__(self, default: StateFormat = FP32) -> None:
        """default: the format of moments whose param group does not say another one."""
        self._default = default

    def format_of(self, group: Mapping[str, Any], numel: int = 2**62, is_embedding: bool = False) -> StateFormat:
        """How each flat state of a tensor of this param group is stored. numel: of the whole tensor."""
        return format_of_tensor(self._default, group.get("optim_bits"), numel, is_embedding)

    def flat_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> tuple[str, ...]:
        """The per-element states of a parameter of this param group. An elementwise optimizer's depend on no shape."""
        return ("exp_avg", "exp_avg_sq")

    def entry_names(self, group: Mapping[str, Any], shape: Sequence[int] = ()) -> EntryNames:
        """The keys of a state dict's entry for a parameter of this param group that was stepped."""
        flat = self.flat_names(group)
        return EntryNames(("step", *flat), flat, ("step", *flat))

    def temporary_bytes(self, numel: int, dtype: torch.dtype, device: torch.device) -> int:
        """The most bytes that an update of `numel` elements has on the device at once besides its arguments."""
        # The kernels update in place. Plain torch operations, the fallback on CUDA without Triton, take temporaries
        # that are not counted here.
        return 0

    def update(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """Update the runs' weights, states and scalars. Raises what `begin` raises."""
        self.begin(updates, groups, factors)
        self.launch(updates)

    def begin(
        self, updates: Sequence[RunUpdate], groups: Sequence[Mapping[str, Any]], factors: GradientFactors
    ) -> None:
        """Update the runs' scalars, and read everything that `launch` needs beside weights, gradients and moments.

        Raises ValueError for a hyperparameter of `groups` that is not valid, and UnsupportedError for fp64 weights.
        """
        constants: dict[tuple[int, int], AdamScalars] = {}  # by step and param group
        for each in updates:
            if each.grad.dtype is torch.float64:
                raise UnsupportedError("HybridAdam updates fp32 weights; this model has fp64 ones: use AdamW")
            # Runs without elements count their steps as well: their parameters are in other ranks' shards.
            step = each.count_step()
            key = step, each.run.group
            if key not in constants:
                settings = hyperparameters(groups[each.run.group])
                constants[key] = adam_scalars(step=step, **factors._asdict(), **settings)
            each.constants = constants[key]

    def launch(self, updates: Sequence[RunUpdate]) -> None:
        """Update weights and moments of runs that were begun: one launch for all that have the same constants."""
        pieces: dict[AdamScalars, list[AdamPiece]] = {}
        for each in updates:
            if each.weights is not None and each.constants is not None:
                if each.stored is not None:
                    alike = pieces.setdefault(each.constants, [])
                    for part in each.weights.segments():
                        alike += each.stored.pieces(part, each.run, each.grad, each.scalars["step"])
                    continue
                moments = each.flat["exp_avg"], each.flat["exp_avg_sq"]
                # Pieces are collected by constants and not by group, so that groups with equal hyperparameters share a
                # launch.
                alike = pieces.setdefault(each.constants, [])
                for part in each.weights.segments():
                    piece = part.piece(each.run.start, each.grad, *moments, each.run.spans)
                    if piece is not None:
                        alike.append(piece)
        for scalars, alike in pieces.items():
            update_pieces(alike, scalars)


ElementwiseUpdate = AdamUpdate | TorchUpdate


def resolve_update(optimizer: torch.optim.Optimizer, elementwise: bool) -> ElementwiseUpdate:
    """The update of the user's optimizer. Raises UnsupportedError if it is not known to be elementwise.

    elementwise: the user says that it is. Raises TypeError for anything but True and False.
    """
    if not isinstance(elementwise, bool):
        raise TypeError(f"elementwise must be True or False, found {elementwise!r}")
    # The exact type counts: a subclass may update in another way, of which nothing is known.
    kind = kind_of(optimizer)
    if kind in (HybridAdam, CPUAdam):
        return AdamUpdate(getattr(optimizer, "state_format", FP32))
    if kind in TESTED or elementwise:
        return TorchUpdate(optimizer)
    names = ", ".join(["HybridAdam", "CPUAdam", *(kind.__name__ for kind in TESTED)])
    raise UnsupportedError(
        f"{kind.__name__} is not known to treat each element, or each tensor, by itself, which chunks need. Known: "
        f"{names}; of whole tensors Muon and Adafactor. If yours does, say elementwise=True, or "
        "gemini.per_tensor(optimizer)"
    )
