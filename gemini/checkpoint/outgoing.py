"""A whole training out of a checkpoint: as FSDP2 loads it by `torch.distributed.checkpoint`, and as DeepSpeed does.

The opposite of `foreign.py`. Weights are those of the files: fp32 masters of what was trained in 16 bits. Tensors are
read one after the other, each compared with its checksum. No model is built, and no DeepSpeed is needed.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX as _EXTRA

from gemini.checkpoint.directory import Directory
from gemini.checkpoint.exporting import empty_folder
from gemini.checkpoint.loading import SavedCheckpoint, whole_of_bytes
from gemini.checkpoint.manifest import OPTIM, WEIGHT, ParameterFact, scale_key, state_key, write_durably
from gemini.checkpoint.tensor_files import OpenFiles, whole
from gemini.checkpoint.values import decode, dtype_named
from gemini.errors import CheckpointError
from gemini.log import warn_at_script
from gemini.optimizer.averages import AVERAGE
from gemini.optimizer.several import WHOSE

_OURS = ("adamw_mode", "bias_correction")  # keys of HybridAdam's groups that torch's Adam does not have
_DEEPSPEED = "0.19.8"
"""The version whose layout is written: DeepSpeed compares it with the oldest that it reads."""


# -- What both layouts take from a checkpoint.


@dataclass(frozen=True)
class _Group:
    """A param group in the keys of torch's optimizers, and the names of its parameters."""

    settings: dict[str, Any]
    names: list[str]
    trained: list[str]  # those of them that have states, or will have
    optimizer: str  # whose it is, of several
    is_ours: bool  # a HybridAdam's
    states: tuple[str, ...]  # the tensors that its optimizer has of a parameter


class _Training:
    """A checkpoint that is read for another library."""

    def __init__(self, source: SavedCheckpoint, files: OpenFiles, told: Callable[[int], None] | None) -> None:
        """Raises CheckpointError without an optimizer, and with open micro-batches, which nobody else goes on with."""
        manifest = source.manifest
        if manifest.optimizer is None:
            raise CheckpointError(
                f"{source.folder} has no optimizer: save one with save_checkpoint(directory, model, optimizer), or "
                "write the weights alone (gemini checkpoint export without --to)"
            )
        if manifest.gradients is not None:
            raise CheckpointError(
                f"{source.folder} has gradients of {manifest.gradients.num_backwards} micro-batches that no step has "
                "used, which other libraries' checkpoints have no place for: save after optimizer.step()"
            )
        self._source = source
        self._files = files
        self._told = told
        self.manifest = manifest
        self.optimizer = manifest.optimizer
        self.facts = {fact.name: fact for fact in manifest.parameters}
        self.groups = [self._group(group) for group in manifest.optimizer.groups]
        scalars = {name: decode(its) for name, its in manifest.optimizer.scalars.items()}
        # A parameter that had no gradient yet has no state, and other libraries have states of all or of none.
        fresh: dict[str, Any] = {"step": torch.zeros((), device="cpu")}
        self.scalars: dict[str, dict[str, Any]] = {
            # Some optimizers, such as SGD, count no steps, of what they have updated either.
            name: scalars.get(name) or ({} if name in self.optimizer.states else fresh)
            for group in self.groups
            for name in group.trained
        }
        if manifest.optimizer.ema is not None:
            warn_at_script(
                f"{source.folder} has averages of the weights (ema), for which other libraries' optimizers have no "
                "place: they are left out. gemini checkpoint export --ema writes them as a model's weights"
            )

    def weight(self, fact: ParameterFact) -> Tensor:
        """A parameter, its master, or a buffer, whole."""
        return self._read(WEIGHT + fact.name, fact)

    def state(self, name: str, state: str) -> Tensor:
        """A state of a parameter in a group, whole; zeros, with which it starts, if no step has made it."""
        return self._read(state_key(name, state), self.facts[name])

    def dtype_of(self, key: str, otherwise: torch.dtype = torch.float32) -> torch.dtype:
        """Of a tensor in the files."""
        stored = self._source.tensors.get(key)
        is_small = key.startswith(OPTIM) and stored is not None and stored.dtype in (torch.uint8, torch.bfloat16)
        return otherwise if stored is None or is_small else stored.dtype

    def aliases(self) -> Iterator[tuple[str, ParameterFact]]:
        """Every name of every parameter and buffer."""
        for fact in (*self.manifest.parameters, *self.manifest.buffers):
            for name in (fact.name, *fact.aliases):
                yield name, fact

    def _read(self, key: str, fact: ParameterFact) -> Tensor:
        stored = self._source.tensors.get(key)
        if stored is None:
            if key.startswith(WEIGHT) and whole(fact.shape).numel:
                raise CheckpointError(f"{self._source.folder} lacks {fact.name}: it is damaged")
            dtype = dtype_named(fact.dtype) if key.startswith(WEIGHT) else torch.float32
            return torch.zeros(fact.shape, dtype=dtype, device="cpu")
        scales = self._source.tensors.get(scale_key(key))
        if scales is not None:
            found = whole_of_bytes(stored, scales, self._files, key.rpartition(".")[2])
        else:
            found = stored.whole(self._files)
        if key.startswith(OPTIM) and found.dtype is torch.bfloat16:
            # Other libraries' Adam has moments in fp32.
            found = found.float()
        if self._told is not None:
            self._told(found.nbytes)
        return found

    def _group(self, encoded: dict[str, Any]) -> _Group:
        names: list[str] = encoded["params"]
        settings = {key: decode(value) for key, value in encoded.items() if key != "params"}
        whose = settings.pop(WHOSE, self.optimizer.kind)
        is_ours = whose.split(" ")[0] in ("HybridAdam", "CPUAdam")
        if is_ours:
            # Every key of a group of torch's: who loads it into torch's optimizer looks for each.
            theirs = torch.optim.AdamW([torch.zeros((), device="cpu")]).param_groups[0]
            missing = {key: value for key, value in theirs.items() if key not in ("params", *settings)}
            settings |= missing | {"decoupled_weight_decay": settings["adamw_mode"]}
        # A schedule that is made before the checkpoint is loaded has put it into the group that is loaded into.
        settings.setdefault("initial_lr", settings.get("lr"))
        states = self.optimizer.states
        trained = [name for name in names if self.facts[name].trained or name in states]
        its = [each["params"] for each in self.optimizer.groups if each.get(WHOSE) == encoded.get(WHOSE)]
        made = {state: None for params in its for name in params for state in states.get(name, ()) if state != AVERAGE}
        return _Group(settings, names, trained, whose, is_ours, tuple(made))


@contextmanager
def _written(
    directory: str | os.PathLike[str], out: str | os.PathLike[str], tag: str | None, told: Callable[[int], None] | None
) -> Iterator[tuple[_Training, Path]]:
    """The checkpoint, and the folder to write, which is empty; and empty again after an error."""
    source = SavedCheckpoint(Directory(directory).find(tag))
    folder = empty_folder(out)
    with source.checked_files() as files:
        training = _Training(source, files, told)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            yield training, folder
        except BaseException:
            for each in folder.iterdir():  # it was empty
                shutil.rmtree(each) if each.is_dir() else each.unlink()
            raise


# -- torch.distributed.checkpoint


class _Reading(DefaultSavePlanner):
    """Plans a state dict of tensors without memory, each of which is read when its turn to be written comes."""

    def __init__(self, reads: dict[Tensor, Callable[[], Tensor]]) -> None:
        super().__init__()
        self._reads = reads

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        read = self._reads.get(object) if isinstance(object, Tensor) else None
        return super().transform_object(write_item, object if read is None else read())


def export_dcp(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    told: Callable[[int], None] | None = None,
) -> Path:
    """Write a training as `torch.distributed.checkpoint` does the two state dicts of `get_state_dict`. Local.

    FSDP2 goes on from it: `dcp.load` into the state dicts of its model and optimizer, then `set_state_dict`. Names are
    those of the plain module, tied parameters under each of theirs.

    Args:
        directory: of the checkpoints, or one of them.
        out: the folder, which must be empty or not there.
        tag: which checkpoint. None: the newest.
        told: called with numbers of bytes as they are read.

    Groups have the keys of torch's optimizers, those of `HybridAdam` the keys of `torch.optim.AdamW`. Returns the
    folder. Raises OSError, and CheckpointError also for a checkpoint without an optimizer, or with an Adam without bias
    correction, which torch's cannot have; nothing is in the folder then.
    """
    with _written(directory, out, tag, told) as (training, folder):
        reads: dict[Tensor, Callable[[], Tensor]] = {}

        def later(shape: tuple[int, ...], dtype: torch.dtype, read: Callable[[], Tensor]) -> Tensor:
            reads[stand_in := torch.empty(shape, dtype=dtype, device="meta")] = read
            return stand_in

        model: dict[str, Any] = {
            name: later(fact.shape, training.dtype_of(WEIGHT + fact.name), partial(training.weight, fact))
            for name, fact in training.aliases()
        }
        model |= {name: decode(its) for name, its in training.manifest.extra_states.items() if name.endswith(_EXTRA)}
        optim: dict[str, Any] = {"state": {}, "param_groups": []}
        for group in training.groups:
            if not group.settings.pop("bias_correction", True):
                raise CheckpointError("bias_correction=False has no form in torch's Adam, which corrects its moments")
            settings = {key: value for key, value in group.settings.items() if key not in _OURS}
            optim["param_groups"].append({**settings, "params": group.names})
            for name in group.trained:
                states: dict[str, Any] = dict(training.scalars[name])
                if not isinstance(states.get("step"), Tensor | None):
                    # torch's optimizers count in a tensor, to which they add in place.
                    states["step"] = torch.tensor(float(states["step"]), device="cpu")
                for state in group.states:
                    dtype = training.dtype_of(state_key(name, state))
                    states[state] = later(training.facts[name].shape, dtype, partial(training.state, name, state))
                optim["state"][name] = states
        # A file for each tensor: the writer holds all of one file's tensors until that file is written.
        writer = FileSystemWriter(folder, single_file_per_rank=False)
        try:
            save_dcp({"model": model, "optim": optim}, storage_writer=writer, planner=_Reading(reads), no_dist=True)
        except CheckpointException as error:
            # torch's wrapper of what a read or a write has raised, which is no `Exception`.
            raise error.failures[0][0] from None
    return folder


# -- DeepSpeed's universal checkpoint


def export_universal(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    told: Callable[[int], None] | None = None,
) -> Path:
    """Write a training as a universal checkpoint of DeepSpeed's, which any of its stages and world sizes loads. Local.

    DeepSpeed loads it with `{"checkpoint": {"load_universal": true}}` in its config and `engine.load_checkpoint(out)`.
    It takes masters, moments, steps and groups. What it takes from no universal checkpoint it does not take from this
    one: frozen weights and buffers, which are in the file of model states, and the loss scale.

    Args:
        directory: of the checkpoints, or one of them.
        out: the folder, which must be empty or not there: `latest_universal`, and a folder of the checkpoint's tag.
        tag: which checkpoint. None: the newest.
        told: called with numbers of bytes as they are read.

    One tensor is held in memory at a time, and all frozen weights and buffers together, which are in one file. Returns
    the folder. Raises OSError, and CheckpointError also for a checkpoint without an optimizer, and for parameters of
    one group with different numbers of steps, of which DeepSpeed keeps one; nothing is in the folder then.
    """
    with _written(directory, out, tag, told) as (training, folder):
        whose = {group.optimizer: None for group in training.groups}
        if len(whose) > 1 and not all(group.is_ours for group in training.groups):
            raise CheckpointError(
                f"this training has several optimizers, {', '.join(whose)}, and DeepSpeed one for all param groups: "
                "export for FSDP2, whose get_state_dict takes a list of them"
            )
        steps = [_step_of(group, training) for group in training.groups]
        step_folder = folder / training.manifest.tag
        for group, step in zip(training.groups, steps, strict=True):
            for name in group.trained:
                its = step_folder / "zero" / name
                its.mkdir(parents=True)
                _save(its / "fp32.pt", {"param": training.weight(training.facts[name]).float()})
                for state in group.states:
                    _save(its / f"{state}.pt", {"param": training.state(name, state).float()})
                _save(its / "step.pt", step)
        _save(step_folder / "zero" / "optimizer_state.pt", _optimizer_of(training, steps))
        # At stage 3 DeepSpeed looks for the first name, below it for the second.
        first, second = (step_folder / f"{rank}mp_rank_00_model_states.pt" for rank in ("zero_pp_rank_0_", ""))
        _save(first, _model_of(training, steps))
        try:
            os.link(first, second)
        except OSError:
            shutil.copyfile(first, second)
        write_durably(folder / "latest_universal", training.manifest.tag.encode())
    return folder


def _save(path: Path, value: Any) -> None:
    """A file of `torch.save`, on the disk before the next one is begun."""
    with open(path, "wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())


def _step_of(group: _Group, training: _Training) -> Any:
    """The number of steps of a group, in the type in which the optimizer keeps it."""
    found = {name: int(training.scalars[name].get("step", 0)) for name in group.trained}
    # One that has had no gradient so far counts as the others: DeepSpeed steps it with them, by moments of zeros.
    taken = {name: step for name, step in found.items() if step}
    if len({*taken.values()}) > 1:
        least, most = min(taken, key=lambda name: taken[name]), max(taken, key=lambda name: taken[name])
        raise CheckpointError(
            f"{least} was updated {taken[least]} times and {most} {taken[most]} times: DeepSpeed has one number of "
            "steps for a param group. Put them into two groups, or export for FSDP2"
        )
    step = max(taken.values(), default=0)
    # FusedAdam and DeepSpeedCPUAdam, ours by another name, count in an int, torch's optimizers in a tensor.
    return step if group.is_ours else torch.tensor(float(step), device="cpu")


def _optimizer_of(training: _Training, steps: list[Any]) -> dict[str, Any]:
    """What DeepSpeed has beside the tensors: at stage 3 it reads the inner dict, below the outer one."""
    groups = [
        {**{key: value for key, value in group.settings.items() if key != "adamw_mode"}, "params": [number]}
        for number, group in enumerate(training.groups)
    ]
    inner = {"state": {number: {"step": step} for number, step in enumerate(steps)}, "param_groups": groups}
    return {
        "zero_stage": 3,
        "partition_count": 1,
        "overflow": False,
        "ds_version": _DEEPSPEED,
        "param_groups": groups,
        "optimizer_state_dict": inner,
    }


def _model_of(training: _Training, steps: list[Any]) -> dict[str, Any]:
    """The file of model states: what is in no folder of `zero`, and the shapes of what is."""
    named = {name for group in training.groups for name in group.trained}
    module: dict[str, Tensor] = {}
    for name, fact in training.aliases():
        own = dtype_named(fact.dtype)
        # Of a trained parameter its dtype alone: its values are in `zero`.
        module[name] = torch.empty(0, dtype=own, device="cpu") if fact.name in named else training.weight(fact).to(own)
    taken = max((int(step) for step in steps), default=0)
    num_steps = training.optimizer.num_steps
    return {
        "module": module,
        "buffer_names": [fact.name for fact in training.manifest.buffers],
        "param_shapes": [
            OrderedDict((name, torch.Size(training.facts[name].shape)) for name in group.trained)
            for group in training.groups
        ],
        "frozen_param_shapes": OrderedDict(
            (fact.name, torch.Size(fact.shape)) for fact in training.manifest.parameters if fact.name not in named
        ),
        "shared_params": {alias: fact.name for fact in training.manifest.parameters for alias in fact.aliases},
        "optimizer": None,
        # Of DeepSpeed's own schedules it is the whole state.
        "lr_scheduler": {"last_batch_iteration": taken - 1},
        "global_steps": num_steps,
        "skipped_steps": max(0, num_steps - taken),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_version": _DEEPSPEED,
    }
