"""Ranks in another library's loop: whether it counts all of them, failures of which all must hear, common files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch.distributed as dist

from gemini.checkpoint.loading import load_checkpoint
from gemini.checkpoint.saving import save_checkpoint
from gemini.errors import CheckpointError, UnsupportedError
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer

_TAG = "state"


def refuse_unknown_ranks(known: int, whose: str, remedy: str) -> None:
    """Raises UnsupportedError if there are other ranks than a library knows of. Local.

    transformers and Accelerate make a process group on a machine without a GPU, and then count each process as the only
    one, unless they are told to use the CPU. Each rank would train on all of the data, and write the same files.

    known: how many processes the library counts. whose: what in it says so. remedy: what to write instead.
    """
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if known != ranks:
        raise UnsupportedError(
            f"there are {ranks} ranks, of which {whose} knows {known}: each would train on all of the data and write "
            f"the same files. On a machine without a GPU {remedy}"
        )


@contextmanager
def publishing_by_all(models: Iterable[ShardedModel]) -> Iterator[None]:
    """Around collectives of several models: an exception that leaves the block is told to the ranks of each of them.

    Another rank may wait in a collective of any of the models, and hears only of failures that this model knows of.
    Local. Raises nothing of its own.
    """
    with ExitStack() as publishing:
        for model in models:
            publishing.enter_context(model.chunk_manager.communicator.publishing())
        yield


@contextmanager
def ending_together(models: Iterable[ShardedModel], done: str) -> Iterator[None]:
    """Around what ranks read or write by themselves: one that fails tells the others, and all end together.

    done: what is over then, for messages. Collective unless there is no model. Raises RemoteRankError.
    """
    models = list(models)
    with publishing_by_all(models):
        yield
        if models:
            models[0].chunk_manager.communicator.wait_for_all(done)


def save_shards(folder: Path, model: ShardedModel, optimizer: ShardedOptimizer | None) -> None:
    """Write a model's and an optimizer's state beside a library's files, each rank its part. Collective.

    Raises CheckpointError on all ranks, also where they see different folders.
    """
    save_checkpoint(folder, model, optimizer, tag=_TAG)


def load_shards(folder: Path, model: ShardedModel, optimizer: ShardedOptimizer | None) -> bool:
    """Load what `save_shards` has written, on any number of ranks; False if it is not there. Collective.

    Raises CheckpointError on all ranks, also if some find it and others do not, and what `load_checkpoint` raises.
    """
    # After a failure that the script caught, ranks start together again before any other collective.
    model.chunk_manager.step.check_idle("loading a checkpoint")
    is_there = bytes([(folder / _TAG).is_dir()])
    found = model.chunk_manager.communicator.all_gather_bytes(is_there, "files of a checkpoint")
    if len({*found}) > 1:
        missing = [str(rank) for rank, its in enumerate(found) if its == b"\0"]
        raise CheckpointError(
            f"ranks {', '.join(missing)} do not find {folder}, and others do: resume from a folder that every rank can "
            "read"
        )
    if found[0] == b"\0":
        return False
    load_checkpoint(folder, model, optimizer, tag=_TAG, weights_only=optimizer is None)
    return True
