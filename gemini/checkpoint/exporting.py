"""Whole weights out of a checkpoint, and into one, tensor by tensor: Hugging Face's files, state dicts of torch's.

No process holds more than one tensor. No model is built: names, shapes and ties are those of the checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gemini.checkpoint.directory import Directory
from gemini.checkpoint.loading import SavedCheckpoint
from gemini.checkpoint.manifest import (
    WEIGHT,
    ParameterFact,
    state_key,
    write_durably,
)
from gemini.checkpoint.tensor_files import SUFFIX, OpenFiles, Part, TensorFile, whole
from gemini.checkpoint.values import dtype_named, name_of
from gemini.errors import CheckpointError
from gemini.optimizer.averages import AVERAGE
from gemini.settings import SHORT_DTYPES
from optim import HALF_DTYPES, round_master_

INDEX = "model.safetensors.index.json"
_ONE_FILE = f"model{SUFFIX}"


def weights(
    directory: str | os.PathLike[str], tag: str | None = None, dtype: str = "own"
) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a checkpoint, whole, one after the other, under its first name. Local.

    dtype: "own" is that of the model which was saved; "fp32" keeps masters as they are; or "bf16", "fp16". Buffers keep
        theirs. Raises CheckpointError, also for a tensor that is not as it was written, and OSError, and ValueError for
        another dtype.
    """
    source = SavedCheckpoint(Directory(directory).find(tag))
    with source.checked_files() as files:
        for fact, target in _targets(source, dtype):
            yield fact.name, _weight(source, fact, target, files)


def export_weights(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tag: str | None = None,
    dtype: str = "own",
    max_file_bytes: int = 5 * 10**9,
    only_trained: bool = False,
    config: str | os.PathLike[str] | None = None,
    averages: bool = False,
    told: Callable[[int], None] | None = None,
) -> Path:
    """Write the weights of a checkpoint as a folder of safetensors files that `from_pretrained` loads. Local.

    A tied parameter is written once, under its first name, as Hugging Face's own files have it: the config ties it.

    Args:
        directory: of the checkpoints, or one of them.
        out: the folder, which must be empty or not there.
        tag: which checkpoint. None: the newest.
        dtype: as of `weights`.
        max_file_bytes: of tensors in one file, if it has more than one tensor.
        only_trained: leave parameters out that were not trained.
        config: a folder whose `config.json`, tokenizer and other small files are copied, or one such file.
        averages: write the exponential moving averages of the weights in their place. What is not averaged, as buffers
            and what was never trained, is written as it is.
        told: called with numbers of bytes as they are written.

    Every tensor is compared with its checksum. Returns the folder. Raises CheckpointError, also for averages that the
    checkpoint has not, and OSError, and ValueError for another dtype; nothing is in the folder then.
    """
    source = SavedCheckpoint(Directory(directory).find(tag))
    if averages:
        _check_averages(source)
    folder = empty_folder(out)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if config is not None:
            _copy_config(Path(config), folder)
            _say_dtype(folder / "config.json", _targets(source, dtype))
        _write_weights(source, folder, dtype, max_file_bytes, only_trained, averages, told)
    except BaseException:
        for each in folder.iterdir():  # it was empty
            each.unlink()
        raise
    return folder


def empty_folder(out: str | os.PathLike[str]) -> Path:
    """The folder to write, which need not be there yet. Raises CheckpointError for a file, or a folder with files."""
    folder = Path(out)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is there and not empty: name another folder")
    return folder


def _write_weights(
    source: SavedCheckpoint,
    folder: Path,
    dtype: str,
    max_file_bytes: int,
    only_trained: bool,
    averages: bool,
    told: Callable[[int], None] | None,
) -> None:
    left_out = {fact.name for fact in source.manifest.parameters if only_trained and not fact.trained}
    wanted = [(fact, target) for fact, target in _targets(source, dtype) if fact.name not in left_out]
    files = _divided(wanted, max_file_bytes)
    names = (
        [_ONE_FILE]
        if len(files) == 1
        else [f"model-{number + 1:05d}-of-{len(files):05d}{SUFFIX}" for number in range(len(files))]
    )
    index: dict[str, str] = {}
    total = 0
    with source.checked_files() as opened:
        for name, its in zip(names, files, strict=True):
            parts = [Part(fact.name, whole(fact.shape), target) for fact, target in its]
            file = TensorFile(folder / name, parts, is_sharded=False)
            try:
                for fact, target in its:
                    file.write(fact.name, _weight(source, fact, target, opened, averages).reshape(-1))
                    index[fact.name] = name
                    if told is not None:
                        told(whole(fact.shape).numel * target.itemsize)
                file.finish()
            finally:
                file.close()
            total += sum(part.num_bytes for part in parts)
    if len(files) > 1:
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
        write_durably(folder / INDEX, text.encode())


def num_bytes(directory: str | os.PathLike[str], tag: str | None = None, dtype: str = "own") -> int:
    """How many bytes `export_weights` will write. Local. Raises as it does."""
    source = SavedCheckpoint(Directory(directory).find(tag))
    return sum(whole(fact.shape).numel * target.itemsize for fact, target in _targets(source, dtype))


def _targets(source: SavedCheckpoint, dtype: str) -> Iterator[tuple[ParameterFact, torch.dtype]]:
    if dtype not in (*SHORT_DTYPES, "own"):
        raise ValueError(f"dtype must be one of own, {', '.join(SHORT_DTYPES)}, found {dtype!r}")
    for fact in source.manifest.parameters:
        own = dtype_named(fact.dtype)
        yield fact, SHORT_DTYPES.get(dtype, own) if own.is_floating_point else own
    for fact in source.manifest.buffers:
        yield fact, dtype_named(fact.dtype)


def _check_averages(source: SavedCheckpoint) -> None:
    """Raises CheckpointError if the checkpoint has no averages of weights."""
    optimizer = source.manifest.optimizer
    if optimizer is None or optimizer.ema is None:
        raise CheckpointError(
            f"{source.folder} has no averages of weights: save one with save_checkpoint(directory, model, optimizer) "
            "of a ShardedOptimizer(..., ema=0.999), or export the weights themselves"
        )
    if not optimizer.ema["num_averaged"]:
        raise CheckpointError(
            f"{source.folder} was saved after {optimizer.ema['num_steps']} steps, before the first averaging: export a "
            "later checkpoint, or the weights themselves"
        )


def _weight(
    source: SavedCheckpoint, fact: ParameterFact, dtype: torch.dtype, files: OpenFiles, averages: bool = False
) -> Tensor:
    optimizer = source.manifest.optimizer
    is_averaged = averages and optimizer is not None and AVERAGE in optimizer.states.get(fact.name, ())
    stored = source.tensors.get(state_key(fact.name, AVERAGE) if is_averaged else WEIGHT + fact.name)
    if stored is None:
        if whole(fact.shape).numel:
            raise CheckpointError(f"{source.folder} lacks {fact.name}: it is damaged")
        return torch.empty(fact.shape, dtype=dtype, device="cpu")
    value = stored.whole(files)
    if value.dtype is torch.float32 and dtype in HALF_DTYPES:
        # As a step rounds masters: the exported weights are those that the model used.
        rounded = torch.empty(value.numel(), dtype=dtype, device="cpu")
        round_master_(rounded, value.reshape(-1))
        return rounded.view(value.shape)
    return value.to(dtype)


def _divided(tensors: list[Any], max_file_bytes: int) -> list[list[Any]]:
    """The tensors of each file, in order."""
    files: list[list[Any]] = [[]]
    taken = 0
    for fact, dtype in tensors:
        size = whole(fact.shape).numel * dtype.itemsize
        if files[-1] and taken + size > max_file_bytes:
            files.append([])
            taken = 0
        files[-1].append((fact, dtype))
        taken += size
    return files


def _copy_config(config: Path, folder: Path) -> None:
    if config.is_file():
        shutil.copy(config, folder / config.name)
        return
    if not (config / "config.json").is_file():
        raise CheckpointError(f"{config} has no config.json: name the folder of the model that was trained")
    for each in sorted(config.iterdir()):
        if each.is_file() and each.suffix in (".json", ".model", ".txt") and each.name != INDEX:
            shutil.copy(each, folder / each.name)


def _say_dtype(path: Path, targets: Iterator[tuple[ParameterFact, torch.dtype]]) -> None:
    """Have the config name the dtype of the weights: `from_pretrained` would cast them to that of the base model."""
    found = {target for fact, target in targets if fact.trained and target.is_floating_point}
    config = json.loads(path.read_text()) if path.is_file() else {}
    key = next((name for name in ("dtype", "torch_dtype") if name in config), None)
    if key is not None and len(found) == 1:
        config[key] = name_of(found.pop())
        path.write_text(json.dumps(config, indent=2) + "\n")
