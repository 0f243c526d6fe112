"""`save_checkpoint`: all states of a training as one directory, complete or not there."""

from __future__ import annotations

import os
import platform
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gemini.checkpoint.contents import Contents, num_files
from gemini.checkpoint.directory import Directory, Keep, check_tag
from gemini.checkpoint.manifest import (
    MANIFEST,
    VERSION,
    FileSummary,
    Manifest,
    RankFile,
    RankSummary,
    dump,
    write_durably,
)
from gemini.checkpoint.parts import states_of
from gemini.checkpoint.random_state import random_state
from gemini.checkpoint.tensor_files import SUFFIX, Part, TensorFile
from gemini.checkpoint.values import encode
from gemini.checkpoint.verifying import verify_rank
from gemini.errors import CheckpointError
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.ranks.communicator import Communicator

_ALIKE = "All ranks must save alike"


def save_checkpoint(
    directory: str | os.PathLike[str],
    model: ShardedModel,
    optimizer: ShardedOptimizer | None = None,
    *,
    scheduler: Any = None,
    data: Any = None,
    extra: Any = None,
    tag: str | None = None,
    keep: int | Keep | None = None,
) -> Path:
    """Save a training between two steps, so that `load_checkpoint` goes on with the same bits. Collective.

    It loads on any number of ranks, at any stage, budget, chunk size and strategy. It holds weights, with fp32 masters
    of 16-bit ones, the optimizer's states and loss scale, gradients that no step has used yet, buffers, and the random
    number generators. Each rank writes its own shards, chunk by chunk: nothing is gathered, and besides the states
    there is at most one parameter's part of one in memory.

    Args:
        directory: of this training's checkpoints. All ranks must see the same one. It is created.
        model: the sharded model.
        optimizer: its optimizer. None: weights and buffers alone.
        scheduler: an object with `state_dict()`, or a list or dict of such.
        data: the same, for the position in the data: torchdata's `StatefulDataLoader`, a sampler. Each rank's own.
        extra: plain values of the script's, rank 0's: numbers, text, tensors, and lists and dicts of these.
        tag: the checkpoint's name. None: "step_" and the number of the optimizer's steps.
        keep: how many of the newest checkpoints stay, or a `Keep`. None: all. Others are removed once every rank has
            read its part of this one again and found it right.

    Returns the checkpoint's folder. Raises CheckpointError on all ranks if it cannot be written, with the rank and its
    reason, and ValueError or GeminiError for arguments that are not valid or inside a step; earlier checkpoints are as
    they were.

    Example:
        >>> import tempfile
        >>> save_checkpoint(tempfile.mkdtemp(), model, optimizer, extra={"epoch": 3}).name
        'step_1'
    """
    keep = Keep(keep) if isinstance(keep, int) else keep
    manager = model.chunk_manager
    communicator = manager.communicator
    manager.step.check_idle("save_checkpoint()")
    with communicator.publishing(), torch.no_grad():
        _refuse_unsynced(model)
        contents = Contents(model, optimizer)
        with together(communicator, "save_checkpoint()"):
            step = contents.step_number()
            tag = check_tag(f"step_{step}" if tag is None else tag)
            state = {
                "scheduler": encode(states_of(scheduler, "scheduler"), "scheduler"),
                "extra": encode(extra, "extra"),
                "data": encode(states_of(data, "data"), "data"),
                "random": encode(random_state(manager.memory.device.device), "random numbers"),
            }
        communicator.agree(f"{Path(directory).name} {tag}".encode(), "the checkpoint", remedy=_ALIKE)
        return _Save(Directory(directory), tag, contents, communicator).run(state, step, keep)


class _Save:
    """One save."""

    def __init__(self, directory: Directory, tag: str, contents: Contents, communicator: Communicator) -> None:
        self._directory = directory
        self._tag = tag
        self._contents = contents
        self._communicator = communicator
        self._rank = communicator.rank
        self._folder = directory.partial(tag)

    def run(self, state: Mapping[str, Any], step: int | None, keep: Keep | None) -> Path:
        """Write everything. Collective. Raises CheckpointError."""
        ranks = self._communicator
        try:
            with together(ranks, f"save_checkpoint({str(self._directory.path)!r})"):
                if self._rank == 0:
                    self._directory.begin(self._tag)
            with together(ranks, f"save_checkpoint({str(self._directory.path)!r})"):
                if not self._folder.is_dir():
                    raise CheckpointError(
                        f"{self._folder.parent} is another directory on this rank than on rank 0: a checkpoint needs "
                        "one that all ranks see, such as a network file system"
                    )
            with together(ranks, f"save_checkpoint({str(self._directory.path)!r})"):
                summary = self._write_rank(state)
            summaries = ranks.all_gather_bytes(dump(summary), "files of a checkpoint")
            with together(ranks, f"save_checkpoint({str(self._directory.path)!r})"):
                if self._rank == 0:
                    found = [RankSummary.model_validate_json(each) for each in summaries]
                    manifest = self._manifest(state, step, found)
                    write_durably(self._folder / MANIFEST, dump(manifest))
                    self._directory.commit(self._tag)
        except BaseException:
            if self._rank == 0:
                self._directory.abandon(self._tag)
            raise
        final = self._directory.path / self._tag
        if keep is not None:
            self._remove_old(final, keep)
        return final

    def _write_rank(self, state: Mapping[str, Any]) -> RankSummary:
        files = write_tensors(self._contents, self._folder, self._rank)
        own = RankFile(files=files, random=state["random"], data=state["data"], own_buffers=self._contents.own_buffers)
        data, name = dump(own), f"rank-{self._rank:05d}.json"
        write_durably(self._folder / name, data)
        return RankSummary(file=name, num_bytes=len(data), crc32=zlib.crc32(data))

    def _manifest(self, state: Mapping[str, Any], step: int | None, ranks: Sequence[RankSummary]) -> Manifest:
        contents = self._contents
        return Manifest(
            version=VERSION,
            versions={
                "gemini": sys.modules["gemini"].__version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            created=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime()) + f".{time.time_ns() % 10**9:09d}Z",
            tag=self._tag,
            step=step,
            world_size=self._communicator.world_size,
            settings=contents.settings(),
            parameters=contents.parameters(),
            buffers=contents.buffers(),
            extra_states=contents.extra_states(),
            optimizer=contents.optimizer(),
            gradients=contents.gradients(),
            scheduler=state["scheduler"],
            extra=state["extra"],
            ranks=list(ranks),
        )

    def _remove_old(self, final: Path, keep: Keep) -> None:
        """Remove older checkpoints, after every rank has verified its files of this one. Collective."""
        ranks = self._communicator
        goes = b""
        with together(ranks, "removing old checkpoints"):
            if self._rank == 0:
                goes = "\n".join(self._directory.outdated(keep, self._tag)).encode()
        names = ranks.all_gather_bytes(goes, "old checkpoints")[0].decode().split("\n")
        if names == [""]:
            return
        with together(ranks, f"verifying {final}, after which older checkpoints would go"):
            verify_rank(final, self._rank)
        with together(ranks, "removing old checkpoints"):
            if self._rank == 0:
                for name in names:
                    self._directory.remove(name)


def write_tensors(contents: Contents, folder: Path, rank: int) -> dict[str, FileSummary]:
    """Write this rank's tensors. Local. Raises OSError."""
    parts = list(contents.parts())
    by_file: dict[int, list[Part]] = {number: [] for number in range(num_files(parts))}
    for number, part in parts:
        by_file[number].append(part)
    files: list[TensorFile] = []
    try:
        for number, its in by_file.items():
            files.append(TensorFile(folder / f"states-{rank:05d}-{number}{SUFFIX}", its))
        for number, key, value in contents.values():
            files[number].write(key, value.to("cpu"))
        for file in files:
            file.finish()
    finally:
        for file in files:
            file.close()
    return {file.path.name: FileSummary(num_bytes=file.num_bytes, crc32=file.crc32) for file in files}


@contextmanager
def together(communicator: Communicator, what: str) -> Iterator[None]:
    """Around what each rank does on its files alone: if one fails, all raise. Collective at the end of the block.

    Raises CheckpointError with the first rank's reason on all ranks. Errors of arguments leave as they are, if all
    ranks have them.
    """
    failure: Exception | None = None
    try:
        yield
    except (OSError, CheckpointError, ValueError, TypeError) as error:
        failure = error
    words = "" if failure is None else _reason(failure)
    every = communicator.all_gather_bytes(words.encode(), "files of a checkpoint")
    failed = [(rank, each.decode()) for rank, each in enumerate(every) if each]
    if not failed:
        return
    if failure is not None and communicator.world_size == len(failed) and not isinstance(failure, OSError):
        raise failure
    rank, reason = failed[0]
    who = "" if communicator.world_size == 1 else f"rank {rank}: "
    raise CheckpointError(f"{what}: {who}{reason}") from failure


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno}): {error.filename or 'a file of the checkpoint'}"
    return str(error) or repr(error)


def _refuse_unsynced(model: ShardedModel) -> None:
    if any(each.is_behind for each in model.chunk_manager.grads.memory.gradients.values()):
        raise CheckpointError(
            "save_checkpoint() between backwards under no_sync() and the reduction of their sums: save after the next "
            "backward outside of it, or after the step"
        )
