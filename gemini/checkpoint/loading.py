"""`load_checkpoint`: a saved training, on these ranks, in these chunks, on these tiers.

Nothing changes before all is known to fit: names and shapes, the optimizer's groups and states, and every byte's
checksum. Then each rank reads, of each state, the elements that it holds, into the memory where they rest.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA

from gemini.access.link import link_of
from gemini.access.states import FlatAccess, FullPrecisionAccess, States, StoredAccess, take_masters
from gemini.checkpoint.contents import inside
from gemini.checkpoint.directory import Directory, together
from gemini.checkpoint.manifest import (
    GRADIENT,
    WEIGHT,
    Manifest,
    OptimizerFact,
    RankFile,
    rank_files,
    rank_key,
    read_manifest,
    scale_key,
    state_key,
    verify_files,
    verify_headers,
)
from gemini.checkpoint.tensor_files import Box, OpenFiles, Order, StoredTensor, tensors_in
from gemini.checkpoint.values import decode, load_into, pairs, set_random_state
from gemini.errors import CheckpointError
from gemini.log import get_dist_logger
from gemini.memory.transfer import Region
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.averages import AVERAGE, OTHERS
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.optimizer.state_dict import CheckedState, check_optimizer_state, load_optimizer_state, numbers_of
from gemini.placement.demand import Tier
from gemini.progress import progress
from gemini.ranks.parts import AllRanks
from gemini.runtime.binding import round_as_master
from gemini.runtime.chunk import Chunk, ManagedParameter
from optim import EIGHT_BIT, HALF_DTYPES, StoredRun
from sharding import ALIGNMENT

_SHOWN = 5  # names in an error


@dataclass(frozen=True)
class LoadedCheckpoint:
    """What `load_checkpoint` has loaded.

    Args:
        path: the checkpoint's folder.
        tag: its name.
        step: the optimizer's number of steps; None if no optimizer was saved, or it counts none.
        extra: what the script gave `save_checkpoint`.
        world_size: the number of ranks that saved it.
    """

    path: Path
    tag: str
    step: int | None
    extra: Any
    world_size: int


def load_checkpoint(
    directory: str | os.PathLike[str],
    model: ShardedModel,
    optimizer: ShardedOptimizer | None = None,
    *,
    scheduler: Any = None,
    data: Any = None,
    tag: str | None = None,
    strict: bool = True,
    weights_only: bool = False,
    verify: bool = True,
    masters: bool = True,
) -> LoadedCheckpoint:
    """Load what `save_checkpoint` has saved, on any number of ranks, at any stage and budget. Collective.

    On as many ranks as saved it the training goes on with the same bits. On others the states are the same, and random
    numbers and positions in the data are those of the ranks that there were; further ranks keep their own.

    Args:
        directory: of the checkpoints, or one checkpoint's folder.
        model: the sharded model; its present weights, and gradients, are lost.
        optimizer: its optimizer, of the same kind and with the same parameters in its groups.
        scheduler, data: as in `save_checkpoint`.
        tag: which checkpoint. None: the newest one that is complete.
        strict: False passes over parameters and buffers that only the model or only the checkpoint has.
        weights_only: load weights and buffers, and leave optimizer and random numbers alone.
        verify: compare every byte with its checksum before anything changes, the ranks each a part.
        masters: False makes fp32 masters of the 16-bit weights again, and leaves those of the files.

    Returns a `LoadedCheckpoint`, with `extra`. Raises CheckpointError on all ranks if there is none, if it is damaged,
    or if it is another model's, with every name; ValueError for an optimizer of another kind, and BudgetError without
    room for its states. Nothing has changed then.

    Example:
        >>> import tempfile
        >>> path = save_checkpoint(tempfile.mkdtemp(), model, optimizer, extra={"epoch": 3})
        >>> load_checkpoint(path, model, optimizer).extra
        {'epoch': 3}
    """
    manager = model.chunk_manager
    communicator = manager.communicator.everyone
    # Weights, states and step counts are all set, and gradients dropped: nothing of the backward remains.
    manager.step.check_idle("load_checkpoint()", after_updates=optimizer is not None and not weights_only)
    what = f"load_checkpoint({str(directory)!r})"
    with torch.no_grad():
        with together(communicator, what):
            source = SavedCheckpoint(Directory(directory).find(tag))
        words = f"{source.manifest.tag} of {source.manifest.created}"
        communicator.agree(words.encode(), "the checkpoint", remedy="All ranks must see the same directory")
        if verify:
            with together(communicator, what):
                source.verify(communicator)
        load = _Load(model, None if weights_only else optimizer, source, strict, masters)
        with together(communicator, what):
            fits = load.check(scheduler, data)
        with communicator.publishing():
            return load.run(fits, scheduler, data, weights_only)


class SavedCheckpoint:
    """A checkpoint that is being read."""

    def __init__(self, folder: Path) -> None:
        """Raises OSError and CheckpointError."""
        self.folder = folder
        self.manifest: Manifest = read_manifest(folder)
        self.ranks: list[RankFile] = rank_files(folder, self.manifest)
        self.tensors: dict[str, StoredTensor] = tensors_in(folder / name for each in self.ranks for name in each.files)

    def checked_files(self) -> OpenFiles:
        """Files for whole tensors, which are compared with their checksums as they are read.

        Raises OSError and CheckpointError.
        """
        for rank_file in self.ranks:
            verify_headers(self.folder, rank_file)
        return OpenFiles({self.folder / name: its.crc32 for each in self.ranks for name, its in each.files.items()})

    def verify(self, communicator: AllRanks) -> None:
        """Verify this rank's part of the files."""
        own = self.ranks[communicator.rank :: communicator.world_size]
        total = sum(summary.num_bytes for each in own for summary in each.files.values())
        with progress(f"verifying {self.manifest.tag}", total) as told:
            for rank_file in own:
                verify_files(self.folder, rank_file, told)


@dataclass(frozen=True)
class _Fitting:
    """What a checkpoint has for a training that it fits."""

    extra: Any
    schedule: Any
    own: RankFile | None  # of this rank, if one of its number has saved
    position: Any  # in the data
    optimizer: tuple[ShardedOptimizer, OptimizerFact, CheckedState] | None


class _Load:
    """One load."""

    def __init__(
        self,
        model: ShardedModel,
        optimizer: ShardedOptimizer | None,
        source: SavedCheckpoint,
        strict: bool,
        masters: bool,
    ) -> None:
        self._masters = masters
        self._model = model
        self._optimizer = optimizer
        self._source = source
        self._manifest = source.manifest
        self._manager = model.chunk_manager
        self._everyone = self._manager.communicator.everyone
        self._states = States(self._manager)
        self._first_names = self._tied_names()
        self._names = self._names_in_file()
        self._strict = strict

    def check(self, scheduler: Any, data: Any) -> _Fitting:
        """See whether everything fits. Local; changes nothing. Raises CheckpointError, ValueError or KeyError."""
        manifest, rank = self._manifest, self._everyone.rank
        self._check_tensors()
        self._check_expanded()
        its = self._source.ranks[rank] if rank < manifest.world_size else None
        fits = _Fitting(
            extra=decode(manifest.extra),
            schedule=decode(manifest.scheduler),
            own=its,
            position=None if its is None else decode(its.data),
            optimizer=None if self._optimizer is None else self._check_optimizer(self._optimizer),
        )
        pairs(scheduler, fits.schedule, "scheduler")
        if its is not None:
            pairs(data, fits.position, "data")
        return fits

    def run(self, fits: _Fitting, scheduler: Any, data: Any, weights_only: bool) -> LoadedCheckpoint:
        """Load what `check` has found to fit. Collective."""
        manifest, manager, its = self._manifest, self._manager, fits.own
        # Whole tensors, of which this rank reads its part.
        weights = sum(tensor.num_bytes for name, tensor in self._source.tensors.items() if name.startswith(WEIGHT))
        states = sum(tensor.num_bytes for tensor in self._source.tensors.values()) - weights
        total = weights if fits.optimizer is None else weights + states
        with OpenFiles() as files, progress(f"loading {manifest.tag}", total) as told:
            if fits.optimizer is not None:
                self._load_optimizer(*fits.optimizer, files, told)
            # Not before: without room for its states nothing has changed.
            manager.grads.discard_all()
            self._load_weights(files, told)
            self._load_plain(files)
            if fits.optimizer is not None and manifest.gradients is not None:
                manager.grads.resume(manifest.gradients.num_backwards, self._gradients(files))
        for path, module in self._model.module.named_modules():
            name = f"{path}.{_EXTRA}" if path else _EXTRA
            if name in manifest.extra_states:
                module.set_extra_state(decode(manifest.extra_states[name]))
        load_into(scheduler, fits.schedule, "scheduler")
        if its is not None:
            load_into(data, fits.position, "data")
            if not weights_only and its.random is not None:
                set_random_state(decode(its.random), manager.memory.device.device)
        elif not weights_only:
            get_dist_logger().warning(
                f"the checkpoint was saved on {manifest.world_size} ranks: this one keeps its own random numbers and "
                "position in the data"
            )
        return LoadedCheckpoint(self._source.folder, manifest.tag, manifest.step, fits.extra, manifest.world_size)

    # -- what fits

    def _tied_names(self) -> dict[str, str]:
        """The model's names of tied parameters that are no first ones, and their first ones."""
        firsts: dict[int, str] = {}
        found: dict[str, str] = {}
        for name, parameter in self._model.module.named_parameters(remove_duplicate=False):
            link = link_of(parameter)
            if link is not None and firsts.setdefault(link.managed.index, link.managed.name) != name:
                found[name] = link.managed.name
        return found

    def _names_in_file(self) -> dict[str, str]:
        """The name under which the file has each name of a parameter or buffer: tied ones are in it once."""
        facts = [*self._manifest.parameters, *self._manifest.buffers]
        names = {name: fact.name for fact in facts for name in (fact.name, *fact.aliases)}
        # Other libraries' files may have a tied parameter under the name that is no first one here.
        for alias, first in self._first_names.items():
            if alias in names:
                names.setdefault(first, names[alias])
        return names

    def _check_tensors(self) -> None:
        """Raises CheckpointError with all names that are missing, unexpected, or of other shapes. Local."""
        shapes = {fact.name: fact.shape for fact in (*self._manifest.parameters, *self._manifest.buffers)}
        problems, missing, used = [], [], set()
        for name, value in self._tensors():
            its = self._names.get(name)
            if its is None:
                missing.append(name)
                continue
            used.add(its)
            stored = self._source.tensors.get(WEIGHT + its)
            if shapes[its] != tuple(value.shape):
                problems.append(f"{name} has shape {tuple(value.shape)}, in the checkpoint {shapes[its]}")
            elif value.numel() and (stored is None or stored.shape != tuple(value.shape) or stored.missing()):
                problems.append(f"the files lack a part of {name}: they are damaged")
        if self._strict and missing:
            problems.append(f"the checkpoint lacks {_listed(missing)}")
        unexpected = [name for name in shapes if name not in used and name not in self._first_names]
        if self._strict and unexpected:
            problems.append(f"the model lacks {_listed(unexpected)}")
        if problems:
            raise CheckpointError(
                f"{self._source.folder} is of another model: {'; '.join(problems)}. Nothing was loaded"
                + ("; strict=False passes over names that only one of both has" if missing or unexpected else "")
            )

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        """The parameters and buffers of the model; a tied one under its first name."""
        for managed in self._manager.parameters:
            yield managed.name, torch.empty(managed.whole_shape, dtype=managed.dtype, device="meta")
        yield from self._plain_tensors()

    def _plain_tensors(self) -> Iterator[tuple[str, Tensor]]:
        seen: dict[Tensor, None] = {}
        for name, value in nn.Module.state_dict(self._model.module, keep_vars=True).items():
            if isinstance(value, Tensor) and link_of(value) is None and value not in seen:
                seen[value] = None
                yield name, value.detach()

    # -- weights

    def _load_weights(self, files: OpenFiles, told: Callable[[int], None]) -> None:
        """Set weights and masters, chunk by chunk. Collective only in taking memory for masters."""
        step = self._manager.step
        self._model.trainability.apply_unfrozen()
        found = [(managed, stored) for managed in self._manager.parameters if (stored := self._stored(managed.name))]
        take_masters(step, ((each, torch.empty(0, dtype=stored.dtype, device="meta")) for each, stored in found))
        by_chunk: dict[int, list[tuple[ManagedParameter, StoredTensor]]] = {}
        for managed, stored in found:
            by_chunk.setdefault(managed.chunk.index, []).append((managed, stored))
        # As before an update: prefetches would bring the old weights, and edits that are not at home yet are lost.
        step.before_update()
        with step.failures.tearing():
            for index, its in by_chunk.items():
                chunk = self._manager.chunks[index]
                step.params.make_stale(chunk)
                access = self._states.full_precision(chunk)
                for managed, stored in its:
                    read = _Reader(managed, stored, files).read
                    if not self._masters and managed.dtype in HALF_DTYPES:
                        read = partial(_rounded, read, managed.dtype)
                    elif stored.dtype.itemsize > managed.dtype.itemsize and managed.owns_master:
                        managed.note_fractions()
                    access.fill(managed, read)
                    told(stored.num_bytes)
                step.params.after_update(chunk)
        step.end_update()

    def _stored(self, name: str) -> StoredTensor | None:
        """The weights or masters of a parameter in the files."""
        return self._source.tensors.get(WEIGHT + self._names.get(name, name))

    def _gradients(self, files: OpenFiles) -> Iterator[tuple[Chunk, Region, list[int]]]:
        """This rank's part of every chunk's gradients, one chunk at a time, and whose they are."""
        for chunk in self._manager.chunks:
            if not chunk.trainable:
                continue
            found = {
                each.position: stored
                for each in chunk.parameters
                if (stored := self._source.tensors.get(GRADIENT + self._names.get(each.name, each.name)))
            }
            if not found:
                continue
            # A sum of several micro-batches is wider than one gradient, see `ReducedState.WIDE`.
            is_wide = chunk.widens and any(stored.dtype is torch.float32 for stored in found.values())
            dtype = torch.float32 if is_wide else chunk.gradient_dtype
            region = Region(Tier.HOST, torch.zeros(chunk.optim_numel, dtype=dtype, device="cpu"))
            for position, stored in found.items():
                managed = chunk.parameters[position]
                FlatAccess(self._manager.step, chunk, region).fill(managed, _Reader(managed, stored, files).read_into)
            yield chunk, region, sorted(found)

    def _check_expanded(self) -> None:
        """Raises CheckpointError for a buffer whose elements share memory, and cannot take what was saved. Local."""
        with OpenFiles() as files:
            for name, value, stored in self._plain_stored():
                if not torch._debug_has_internal_overlap(value):
                    continue
                saved = stored.whole(files)
                one = _without_repeats(saved, value).expand_as(saved).contiguous()
                shares = torch._debug_has_internal_overlap(_without_repeats(value, value)) == 1
                if shares or not torch.equal(one.view(torch.uint8), saved.contiguous().view(torch.uint8)):
                    raise CheckpointError(
                        f"{name} is a buffer whose elements share memory, as after expand(), and the checkpoint has "
                        "different values for them: register a contiguous() copy. Nothing was loaded"
                    )

    def _load_plain(self, files: OpenFiles) -> None:
        """Set buffers, and parameters in no chunk."""
        for _, value, stored in self._plain_stored():
            _without_repeats(value, value).copy_(_without_repeats(stored.whole(files), value))

    def _plain_stored(self) -> Iterator[tuple[str, Tensor, StoredTensor]]:
        """Tensors in no chunk, and what they become: this rank's own, where it has saved others than rank 0's."""
        rank, is_alike = self._everyone.rank, self._manifest.world_size == self._everyone.world_size
        for name, value in self._plain_tensors():
            key = WEIGHT + self._names.get(name, name)
            own = self._source.tensors.get(rank_key(rank, key)) if is_alike else None
            stored = own or self._source.tensors.get(key)
            if stored is not None:
                yield name, value, stored

    # -- the optimizer

    def _check_optimizer(self, optimizer: ShardedOptimizer) -> tuple[ShardedOptimizer, OptimizerFact, CheckedState]:
        fact = self._manifest.optimizer
        if fact is None:
            raise CheckpointError(
                f"{self._source.folder} was saved without an optimizer: load it with weights_only=True"
            )
        optimizer.refuse_exchanged("load_checkpoint()")
        optimizer.follow_param_groups()  # the groups that are shown are those that the files are compared with
        chunk_optimizer = optimizer.chunk_optimizer
        if chunk_optimizer.scaling.active is not None and (scale := decode(fact.loss_scale)) is not None:
            chunk_optimizer.scaling.active.check_state(scale)
        saved = self._state_dict(optimizer, fact)
        checked = check_optimizer_state(self._model, chunk_optimizer.states, optimizer.param_groups, saved)
        return optimizer, fact, checked

    def _load_optimizer(
        self,
        optimizer: ShardedOptimizer,
        fact: OptimizerFact,
        checked: CheckedState,
        files: OpenFiles,
        told: Callable[[int], None],
    ) -> None:
        chunk_optimizer = optimizer.chunk_optimizer
        values = _FromFiles(self._source, self._names, files, told)
        load_optimizer_state(self._model, chunk_optimizer.states, optimizer.param_groups, checked, values)
        if chunk_optimizer.scaling.active is not None and (scale := decode(fact.loss_scale)) is not None:
            chunk_optimizer.scaling.active.load_state_dict(scale)
        chunk_optimizer.count_from(fact.num_steps)
        if chunk_optimizer.states.averages is not None:
            chunk_optimizer.states.averages.count_from(fact.ema)

    def _state_dict(self, optimizer: ShardedOptimizer, fact: OptimizerFact) -> dict[str, Any]:
        """The optimizer's state as torch has it, with tensors on the device meta for those in the files."""
        numbers = numbers_of(optimizer.param_groups)
        state: dict[int, dict[str, Any]] = {}
        masters: dict[int, Tensor] = {}
        groups_of = {name: number for number, group in enumerate(fact.groups) for name in group["params"]}
        groups: list[int | None] = [None] * len(optimizer.param_groups)
        group_numbers = [number for number, group in enumerate(optimizer.param_groups) for _ in group["params"]]
        for managed in self._manager.parameters:
            number, name = numbers.get(managed.index), self._names.get(managed.name, managed.name)
            if number is None:
                continue
            group = group_numbers[number]
            if name not in groups_of:
                raise CheckpointError(
                    f"the optimizer has {managed.name!r} in group {group}, the checkpoint's has it in none"
                )
            if groups[group] not in (None, groups_of[name]):
                raise CheckpointError(
                    f"the optimizer's group {group} has parameters of groups {groups[group]} and {groups_of[name]} of "
                    f"the checkpoint, among them {managed.name!r}: make the same groups"
                )
            groups[group] = groups_of[name]
            scalars = decode(fact.scalars.get(name))
            names = fact.states.get(name, [])
            stored = self._stored(name)
            if scalars is not None:
                state[number] = {**scalars, **{each: _meta(managed, self._dtype(name, each)) for each in names}}
            if stored is not None and managed.dtype in HALF_DTYPES and stored.dtype not in HALF_DTYPES:
                masters[number] = _meta(managed, stored.dtype)
        count = iter(range(len(group_numbers)))
        packed = [
            {
                **({} if theirs is None else _settings(fact.groups[theirs])),
                "params": [next(count) for _ in group["params"]],
            }
            for group, theirs in zip(optimizer.param_groups, groups, strict=True)
        ]
        whole = {"state": state, "param_groups": packed, "masters": masters}
        return whole if fact.ema is None else {**whole, AVERAGE: {**fact.ema, OTHERS: self._averages(numbers, state)}}

    def _averages(self, numbers: Mapping[int, int], state: Mapping[int, Any]) -> dict[int | str, Tensor]:
        """Of parameters that have no entry in `state`, as a state dict has them."""
        found: dict[int | str, Tensor] = {}
        for managed in self._manager.parameters:
            key, name = numbers.get(managed.index, managed.name), self._names.get(managed.name, managed.name)
            if key not in state and state_key(name, AVERAGE) in self._source.tensors:
                found[key] = _meta(managed, self._dtype(name, AVERAGE))
        return found

    def _dtype(self, name: str, state: str) -> torch.dtype:
        stored = self._source.tensors.get(state_key(name, state))
        # Bytes and 16 bits are read as fp32.
        return torch.float64 if stored is not None and stored.dtype is torch.float64 else torch.float32


def _without_repeats(value: Tensor, like: Tensor) -> Tensor:
    """Of `value` what is left when the dimensions along which `like` repeats one element have that one alone."""
    return value[tuple(slice(None) if stride else slice(0, 1) for stride in like.stride())]


def _rounded(read: Callable[[int, int], Tensor], dtype: torch.dtype, start: int, numel: int) -> Tensor:
    """Elements as the 16-bit weights have them, from which masters are made again."""
    return round_as_master(read(start, numel), dtype)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = decode({name: value for name, value in group.items() if name != "params"})
    return settings


def _meta(managed: ManagedParameter, dtype: torch.dtype) -> Tensor:
    return torch.empty(managed.shape, dtype=dtype, device="meta")


class _FromFiles:
    """The states of parameters, read where they are set (`load_state.StateValues`)."""

    def __init__(
        self, source: SavedCheckpoint, names: Mapping[str, str], files: OpenFiles, told: Callable[[int], None]
    ) -> None:
        self._told = told
        self._source = source
        self._names = names
        self._files = files

    def fill_state(self, access: FlatAccess, managed: ManagedParameter, name: str, value: Tensor) -> None:
        """Set this rank's part of one state. Local."""
        key = state_key(self._names.get(managed.name, managed.name), name)
        stored, scales = self._source.tensors.get(key), self._source.tensors.get(scale_key(key))
        if stored is None:  # the parameter has no elements
            return
        if scales is None:
            access.fill(managed, _Reader(managed, stored, self._files).read_into)
            self._told(stored.num_bytes)
        elif not Order.of(managed.stride, managed.shape).is_natural:
            # Blocks follow the order in memory, which is another one here.
            access.set_whole(managed, managed.laid_out(whole_of_bytes(stored, scales, self._files, name)))
        else:
            reader = _BytesReader(managed, stored, scales, self._files, name)
            if isinstance(access, StoredAccess) and access.format_of(managed).has_scales:
                access.fill_stored(managed, reader.read_stored)
            else:
                access.fill(managed, reader.read_into)

    def fill_master(self, access: FullPrecisionAccess, managed: ManagedParameter, value: Tensor) -> None:
        """Do nothing: masters are set with the weights."""


class _Reader:
    """Reads runs of one parameter's elements, in the order of its memory."""

    def __init__(self, managed: ManagedParameter, stored: StoredTensor, files: OpenFiles) -> None:
        self._managed = managed
        self._shape = tuple(managed.shape)
        self._order = Order.of(managed.stride, managed.shape)
        self._stored = stored
        self._files = files

    def read(self, start: int, numel: int) -> Tensor:
        """(numel,) elements from `start` on, on the CPU, in the file's dtype."""
        out = torch.empty(numel, dtype=self._stored.dtype, device="cpu")
        self.read_into(start, out)
        return out

    def read_into(self, start: int, out: Tensor) -> None:
        """Fill `out`, 1-D, with elements from `start` on."""
        at = 0
        for box, sizes in self._order.boxes(self._shape, start, start + out.numel()):
            piece = out[at : at + box.numel].view(sizes)
            self._stored.read(
                inside(self._managed, box), self._files, piece.permute(self._order.back) if sizes else piece
            )
            at += box.numel


class _BytesReader:
    """Reads runs of a state that the files have as bytes and scales. The first element of each is that of a block."""

    def __init__(
        self, managed: ManagedParameter, stored: StoredTensor, scales: StoredTensor, files: OpenFiles, name: str
    ) -> None:
        self._reader = _Reader(managed, stored, files)
        self._scales = scales
        self._files = files
        self._name = name

    def read_stored(self, start: int, out: StoredRun) -> None:
        """Fill elements and scales from element `start` on."""
        self._reader.read_into(start, out.elements)
        assert out.scales is not None
        self._read_scales(start, out.scales)

    def read_into(self, start: int, out: Tensor) -> None:
        """Fill `out` with what the bytes mean."""
        scales = torch.empty(-(-out.numel() // ALIGNMENT), dtype=torch.float32, device="cpu")
        self._read_scales(start, scales)
        out.copy_(EIGHT_BIT.read(self._reader.read(start, out.numel()), scales, self._name))

    def _read_scales(self, start: int, out: Tensor) -> None:
        self._scales.read(Box((start // ALIGNMENT,), (out.numel(),)), self._files, out)


def whole_of_bytes(stored: StoredTensor, scales: StoredTensor, files: OpenFiles, name: str) -> Tensor:
    """A state that files have as bytes and scales, in fp32 and in its shape."""
    elements = stored.whole(files)
    return EIGHT_BIT.read(elements.view(-1), scales.whole(files), name).view(elements.shape)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
