"""One save on one rank: writes this rank's files, and on rank 0 makes the whole a checkpoint.

[Note: Commit] Ranks agree through the folder, so that a save in the background needs no collective. Each writes its
tensors, then its rank file, which says that all of them are there. Rank 0 waits for all rank files, writes the manifest
and gives the folder its name, for which the others wait. A rank that fails says so in the store of the process group
(`Others`), since it may be the disk that fails; rank 0 then removes the folder, and nobody waits any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from torch import Tensor

from gemini.checkpoint.contents import ChunkEntry, Plain
from gemini.checkpoint.directory import Directory, Draft, Keep, reason_of
from gemini.checkpoint.file_io import DiskIO
from gemini.checkpoint.manifest import (
    MANIFEST,
    FileSummary,
    Manifest,
    RankFile,
    RankSummary,
    dump,
    dump_manifest,
    verify_files,
    write_durably,
)
from gemini.checkpoint.tensor_files import SUFFIX, Part, TensorFile
from gemini.checksum import crc32
from gemini.errors import CheckpointError
from gemini.memory.transfer import Loan
from gemini.progress import progress
from gemini.ranks.watchdog import Watchdog

_POLL_S = 0.01
_SLOWEST_POLL_S = 0.5


@dataclass(frozen=True)
class Task:
    """What one rank writes. Everything but the tensors themselves is known."""

    directory: Directory
    tag: str
    folder: Path  # where it is written
    draft: Draft | None  # the same on rank 0, which makes it a checkpoint
    rank: int
    world_size: int
    parts: Sequence[tuple[int, Part]]  # with the number of the file that each goes to
    rank_file: RankFile  # without the files
    manifest: Manifest | None  # of rank 0, without the ranks
    keep: Keep | None
    timeout_s: float  # for which a rank waits for the slowest one

    @property
    def final(self) -> Path:
        """Where it is in the end."""
        return self.directory.path / self.tag


class Others:
    """The other ranks of a save, for a thread that waits for them beside the one that trains."""

    def __init__(self, watch: Watchdog | None, folder: Path) -> None:
        """watch: None on one rank. folder: in which this save is written, and no other one ever."""
        self._watch = watch
        self._topic = folder.name

    def tell_failure(self, words: str) -> None:
        """Tell them that this rank's part has failed. Raises nothing."""
        if self._watch is not None:
            self._watch.tell(self._topic, words)

    def reason_lost(self) -> str | None:
        """Why one of them will not come, or has failed in this save; None if nothing is known against it."""
        if self._watch is None:
            return None
        return self._watch.told(self._topic) or self._watch.reason_lost()


class TensorQueue:
    """The tensors of a save, one after the other, as they are handed over by the thread that trains."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[ChunkEntry, Loan] | Plain | None] = SimpleQueue()
        self._has_ended = False
        self._failure: BaseException | None = None

    def hand_over(self, item: tuple[ChunkEntry, Loan] | Plain) -> None:
        """There is another state to write."""
        self._queue.put(item)

    def close(self, failure: BaseException | None = None) -> None:
        """There are no more: `failure` has come before all were handed over, if any has."""
        self._failure = failure
        self._queue.put(None)

    def values(self) -> Iterator[tuple[int, str, Tensor]]:
        """The elements of each part, 1-D, and the file that it goes to. A state is given back when its parts are.

        Raises CheckpointError at the end if not all states were handed over: the files would lack what is missing.
        """
        for item in self._items():
            if isinstance(item, Plain):
                yield 0, item.key, item.value.contiguous().reshape(-1)
                continue
            entry, loan = item
            try:
                yield from entry.values(loan.read())
            finally:
                loan.end()
        if self._failure is not None:
            raise CheckpointError(f"not all states could be read: {reason_of(self._failure)}") from self._failure

    def give_up(self) -> None:
        """Give back everything that is handed over and not written. `close` was called, or will be."""
        for item in self._items():
            if not isinstance(item, Plain):
                item[1].end()

    def _items(self) -> Iterator[tuple[ChunkEntry, Loan] | Plain]:
        while not self._has_ended:
            item = self._queue.get()
            if item is None:
                self._has_ended = True
            else:
                yield item


def write(task: Task, source: TensorQueue, others: Others, shows: bool = False) -> Path:
    """Write this rank's files, and have the whole complete. Returns the checkpoint's folder.

    shows: whether progress is shown.

    Raises OSError and CheckpointError, and whatever else may happen here: all ranks learn of it then.
    """
    try:
        try:
            num_bytes = sum(part.num_bytes for _, part in task.parts)
            with progress(f"saving {task.tag}", num_bytes, shows) as told:
                files = _write_tensors(task, source, told)
            rank_file = task.rank_file.model_copy(update={"files": files})
            if task.keep is not None:
                # Older checkpoints may go for this one: what is on the disk has to be right, not what is in memory.
                for name in files:
                    _forget_cached(task.folder / name)
                with progress(f"verifying {task.tag}", num_bytes, shows) as told:
                    verify_files(task.folder, rank_file, told)
            data = dump(rank_file)
            _publish(task.folder / rank_name(task.rank), data)
            if task.draft is None or task.manifest is None:
                _wait_for_commit(task, data, others)
            else:
                _commit(task, task.draft, task.manifest, others)
        except BaseException as error:
            # Of any class: the other ranks would wait for this one until `rank_timeout`.
            others.tell_failure(reason_of(error))
            if task.draft is not None:
                task.draft.abandon()
            raise
        if task.draft is not None and task.keep is not None:
            task.directory.remove_old(task.keep, task.tag)
    finally:
        source.give_up()
    return task.final


def rank_name(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.json"


def _write_tensors(task: Task, source: TensorQueue, told: Callable[[int], None]) -> dict[str, FileSummary]:
    by_file: dict[int, list[Part]] = {number: [] for number in range(1 + max((n for n, _ in task.parts), default=0))}
    for number, part in task.parts:
        by_file[number].append(part)
    files: list[TensorFile] = []
    try:
        with DiskIO() as io:
            for number, its in by_file.items():
                files.append(TensorFile(task.folder / f"states-{task.rank:05d}-{number}{SUFFIX}", its, io))
            for number, key, value in source.values():
                files[number].write(key, value.to("cpu"))
                told(value.nbytes)
            for file in files:
                file.finish()
    finally:
        for file in files:
            file.close()
    return {file.path.name: FileSummary(num_bytes=file.num_bytes, crc32=file.crc32) for file in files}


def _publish(path: Path, data: bytes) -> None:
    """Write a file that others wait for: they see all of it or none."""
    beside = path.with_name(f"{path.name}.new")
    write_durably(beside, data)
    os.replace(beside, path)


def _commit(task: Task, draft: Draft, manifest: Manifest, others: Others) -> None:
    """Rank 0: wait for all ranks, and make the folder a checkpoint."""
    ranks = [_summary(task, rank, others) for rank in range(task.world_size)]
    write_durably(task.folder / MANIFEST, dump_manifest(manifest.model_copy(update={"ranks": ranks})))
    draft.commit()


def _summary(task: Task, rank: int, others: Others) -> RankSummary:
    path = task.folder / rank_name(rank)
    _wait(path.exists, task, others, f"rank {rank} has not written its part")
    data = path.read_bytes()
    return RankSummary(file=path.name, num_bytes=len(data), crc32=crc32(data))


def _wait_for_commit(task: Task, data: bytes, others: Others) -> None:
    _wait(lambda: not task.folder.exists(), task, others, "rank 0 has not completed the checkpoint")
    # A folder that is gone has its own name by now, or was removed by rank 0: an older one may have the same name.
    own = task.final / rank_name(task.rank)
    if not own.is_file() or own.read_bytes() != data:
        raise CheckpointError("rank 0 has given the checkpoint up, and says why itself")


def _wait(is_there: Callable[[], bool], task: Task, others: Others, words: str) -> None:
    deadline, pause = time.monotonic() + task.timeout_s, _POLL_S
    while not is_there():
        reason = others.reason_lost()
        # A rank that is through may end between the two looks.
        if reason is not None and not is_there():
            raise CheckpointError(f"{words}: {reason}")
        if time.monotonic() > deadline:
            raise CheckpointError(f"{words} within {task.timeout_s:.0f} s")
        time.sleep(pause)
        pause = min(pause * 1.5, _SLOWEST_POLL_S)


def _forget_cached(path: Path) -> None:
    """Have the system read the file from its disk again, where it can be asked to."""
    if hasattr(os, "posix_fadvise"):
        file: Any = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(file)
