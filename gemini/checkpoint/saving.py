"""`save_checkpoint`: all states of a training as one directory, complete or not there, now or in the background.

[Note: In the background] A thread writes the states while training goes on. It reads them where they rest: an update
that comes before the thread has read its chunk copies the chunk's state first, or waits for the thread if there is no
room for the copy (memory/transfer.py). What may be written to without notice, such as weights on the device, is
copied before `save_checkpoint` returns. Torch's own asynchronous save reads tensors on the CPU while they are updated
(pytorch/pytorch#144657).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, Literal, overload

import torch

from gemini.checkpoint.contents import Contents, Plain
from gemini.checkpoint.directory import Directory, Draft, Keep, check_tag, reason_of, together
from gemini.checkpoint.manifest import Manifest, RankFile, about
from gemini.checkpoint.values import encode, random_state, states_of
from gemini.checkpoint.writing import Others, Task, TensorQueue, write
from gemini.errors import CheckpointError
from gemini.log import get_dist_logger
from gemini.memory.transfer import CopyRoom, Loan, spare_bytes
from gemini.model.sharded_model import ShardedModel
from gemini.monitor.readings import HostSource, share_of_host
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.ranks.parts import AllRanks

_ALIKE = "All ranks must save alike"


@overload
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
    asynchronous: Literal[False] = False,
) -> Path: ...


@overload
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
    asynchronous: bool,
) -> Path | PendingCheckpoint: ...


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
    asynchronous: bool = False,
) -> Path | PendingCheckpoint:
    """Save a training between two steps, so that `load_checkpoint` goes on with the same bits. Collective.

    It loads on any number of ranks, at any stage, budget, chunk size and strategy. It holds weights, with fp32 masters
    of 16-bit ones, the optimizer's states and loss scale, gradients that no step has used yet, buffers, and the random
    number generators. Each rank writes its own shards, chunk by chunk: nothing is gathered, and besides the states
    there is at most one parameter's part of one in memory.

    Args:
        directory: of this training's checkpoints. All ranks must see the same one. It is created. Nothing in it is
            replaced or removed but what gemini has written; another process, or model, may save there too.
        model: the sharded model.
        optimizer: its optimizer. None: weights and buffers alone.
        scheduler: an object with `state_dict()`, or a list or dict of such.
        data: the same, for the position in the data: torchdata's `StatefulDataLoader`, a sampler. Each rank's own.
        extra: plain values of the script's, rank 0's: numbers, text, tensors, and lists and dicts of these.
        tag: the checkpoint's name. None: "step_" and the number of the optimizer's steps.
        keep: how many of the newest checkpoints stay, or a `Keep`. None: all. Others are removed once every rank has
            read its part of this one again and found it right.
        asynchronous: return while a thread writes, and train on. States that an update changes meanwhile are copied
            into host memory before, as far as half of what is free there reaches; beyond it the update waits. A save
            that is still under way is completed first. A failure is raised once, by the next step or by `wait()`; a
            save that comes before these says it in a warning, and is made.

    Returns the checkpoint's folder, or a `PendingCheckpoint`. Raises CheckpointError on all ranks if it cannot be
    written, with the rank and its reason, and ValueError or GeminiError for arguments that are not valid or inside a
    step; earlier checkpoints are as they were.

    Example:
        >>> import tempfile
        >>> save_checkpoint(tempfile.mkdtemp(), model, optimizer, extra={"epoch": 3}).name
        'step_1'
    """
    keep = Keep(keep) if isinstance(keep, int) else keep
    manager = model.chunk_manager
    communicator = manager.communicator.everyone
    manager.step.check_idle("save_checkpoint()")
    if optimizer is not None:
        optimizer.refuse_exchanged("save_checkpoint() with the optimizer")
    with torch.no_grad():
        # Two saves at once would share the disk, and the second might remove what the first one writes.
        failure = manager.background.finish()
        if failure is not None:  # no reason to lose this one, too
            get_dist_logger().warning(failure, ranks=[0])
        with together(communicator, "save_checkpoint()"):
            _refuse_unsynced(model)
        with communicator.publishing():
            contents = Contents(model, optimizer)
        rank, step = communicator.rank, contents.step_number()
        where = Directory(directory)
        with together(communicator, "save_checkpoint()"):
            name = check_tag(f"step_{step}" if tag is None else tag)
            rank_file = RankFile(
                files={},
                random=encode(random_state(manager.memory.device.device), "random numbers"),
                data=encode(states_of(data, "data"), "data"),
                own_buffers=contents.own_buffers,
            )
            schedule, values = encode(states_of(scheduler, "scheduler"), "scheduler"), encode(extra, "extra")
            manifest = _manifest(contents, name, step, schedule, values, communicator.world_size) if rank == 0 else None
        communicator.agree(f"{name} {keep} {asynchronous}".encode(), "the checkpoint", remedy=_ALIKE)
        with communicator.publishing():
            parts, timeout_s = list(contents.parts()), model.settings.rank_timeout
        folder, draft = _begin(where, name, communicator)
        with communicator.publishing():
            world_size = communicator.world_size
            task = Task(where, name, folder, draft, rank, world_size, parts, rank_file, manifest, keep, timeout_s)
            pending = PendingCheckpoint(task, communicator, contents, _copy_room(model), asynchronous)
            manager.background.begin(pending)
    if asynchronous:
        return pending
    return pending.wait()


class PendingCheckpoint:
    """A checkpoint that a thread writes while training goes on. `save_checkpoint(..., asynchronous=True)` returns it.

    Every rank makes one alike. It raises nothing itself: failures are raised by `wait()`, and by the next step.

    Args:
        task: what this rank writes.
        communicator: of the ranks that write together.
        contents: the states as they are now.
        room: for copies of states.
        asynchronous: whether training goes on, so that some are copied first.

    Example:
        >>> import tempfile
        >>> pending = save_checkpoint(tempfile.mkdtemp(), model, optimizer, asynchronous=True)
        >>> pending.wait().name
        'step_1'
    """

    def __init__(
        self, task: Task, communicator: AllRanks, contents: Contents, room: CopyRoom, asynchronous: bool
    ) -> None:
        self.path = task.final
        """Where the checkpoint is once it is complete."""
        self._task = task
        self._communicator = communicator
        self._room = room
        self._source = TensorQueue()
        self._shows = not asynchronous  # a bar would stand over what training prints
        self._failure: BaseException | None = None
        self._is_told = False
        self._is_waited_for = False
        self._thread = threading.Thread(target=self._write, name=f"gemini checkpoint {task.tag}")
        try:
            self._thread.start()
        except BaseException:
            if task.draft is not None:
                task.draft.abandon()
            raise
        self._hand_over(contents, asynchronous)

    @property
    def is_done(self) -> bool:
        """Whether this rank's thread has ended, with the whole checkpoint complete or with a failure. Local."""
        return not self._thread.is_alive()

    @property
    def copied_bytes(self) -> int:
        """The most bytes that copies of states have taken at once."""
        return self._room.most_taken

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Returns its folder. Collective.

        Raises CheckpointError on all ranks if it could not be written.
        """
        self._is_told = self._is_waited_for = True
        with self._communicator.publishing():  # an interrupt, which the other ranks would wait for
            self.join()
        with together(self._communicator, f"save_checkpoint({str(self._task.directory.path)!r})"):
            if self._failure is not None:
                raise self._failure if isinstance(self._failure, Exception) else _ended(self._failure)
        return self.path

    def finish(self) -> str | None:
        """Wait until it is over. Returns why it has failed, if no rank has said so to its script yet. Collective.

        Raises nothing of its own.
        """
        was_waited_for, was_told = self._is_waited_for, self._is_told
        self._is_told = self._is_waited_for = True
        with self._communicator.publishing():
            self.join()
        if was_waited_for:  # by all ranks alike
            return None
        words = "" if self._failure is None else f"rank {self._communicator.rank}: {reason_of(self._failure)}"
        said = self._communicator.all_gather_bytes(f"{int(was_told)}{words}".encode(), "files of a checkpoint")
        failed = [each.decode()[1:] for each in said if len(each) > 1]
        if not failed or any(each[:1] == b"1" for each in said):
            return None
        return f"the checkpoint {str(self.path)!r}, which was written in the background, is not complete: {failed[0]}"

    def join(self) -> None:
        """Wait until this rank's thread has ended, with the whole complete or with a failure. Local; raises nothing."""
        self._thread.join()

    def raise_failure(self) -> None:
        """Raise the CheckpointError of a save that has failed, once. Local."""
        if self._failure is not None and not self._is_told:
            self._is_told = True
            raise CheckpointError(
                f"the checkpoint {str(self.path)!r}, which was being written in the background, is not complete: "
                f"{reason_of(self._failure)}"
            ) from self._failure

    def _hand_over(self, contents: Contents, asynchronous: bool) -> None:
        failure: BaseException | None = None
        try:
            lent = [(entry, Loan(entry.access.regions, self._room)) for entry in contents.chunk_entries]
            # What must be copied goes first: its room is free again once it is written.
            for entry, loan in sorted(lent, key=lambda each: not each[0].changes_unseen):
                self._source.hand_over((entry, loan))
                if asynchronous and entry.changes_unseen:
                    loan.copy()
            for key, value in contents.plain:
                self._source.hand_over(Plain(key, value.to("cpu", copy=True)))
        except BaseException as error:
            failure = error
            raise
        finally:
            self._source.close(failure)

    def _write(self) -> None:
        try:
            with torch.inference_mode(False), torch.no_grad():
                write(self._task, self._source, Others(self._communicator.watch, self._task.folder), self._shows)
        except BaseException as error:  # of a thread: `wait` and the next step raise it
            self._failure = error


def _ended(error: BaseException) -> CheckpointError:
    """The error for an exception that would end the thread which trains, such as SystemExit, in the one that writes."""
    return CheckpointError(reason_of(error))


def _begin(directory: Directory, tag: str, communicator: AllRanks) -> tuple[Path, Draft | None]:
    """Make the folder, and see that it is the same one on all ranks: with the draft, on rank 0. Collective."""
    what = f"save_checkpoint({str(directory.path)!r})"
    draft: Draft | None = None
    try:
        with together(communicator, what):
            if communicator.rank == 0:
                draft = directory.begin(tag)
        name = b"" if draft is None else draft.path.name.encode()
        folder = directory.path / communicator.all_gather_bytes(name, "files of a checkpoint")[0].decode()
        with together(communicator, what):
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder.parent} is another directory on this rank than on rank 0: a checkpoint needs one that "
                    "all ranks see, such as a network file system"
                )
    except BaseException:
        if draft is not None:
            draft.abandon()
        raise
    return folder, draft


def _manifest(contents: Contents, tag: str, step: int | None, scheduler: Any, extra: Any, world_size: int) -> Manifest:
    return Manifest(
        **about(tag, step, world_size),
        settings=contents.settings(),
        parameters=contents.parameters(),
        buffers=contents.buffers(),
        extra_states=contents.extra_states(),
        optimizer=contents.optimizer(),
        gradients=contents.gradients(),
        scheduler=scheduler,
        extra=extra,
        ranks=[],
    )


def _copy_room(model: ShardedModel) -> CopyRoom:
    host = model.chunk_manager.memory.host
    free = share_of_host(HostSource().read().available_bytes)
    return CopyRoom(spare_bytes(host.capacity_bytes, host.ledger.total_bytes, free))


def _refuse_unsynced(model: ShardedModel) -> None:
    gradients = model.chunk_manager.grads
    if any(gradients.is_behind(chunk) for chunk in model.chunk_manager.chunks):
        raise CheckpointError(
            "save_checkpoint() between backwards under no_sync() and the reduction of their sums: save after the next "
            "backward outside of it, or after the step"
        )
