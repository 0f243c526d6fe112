"""Ranks in another library's loop: whether it counts all of them, and failures of which all must hear."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch.distributed as dist

from gemini.errors import UnsupportedError
from gemini.model.sharded_model import ShardedModel


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
