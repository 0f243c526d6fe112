"""What each rank does on files by itself: all ranks learn of a failure, and none waits for one that has failed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gemini.errors import CheckpointError
from gemini.ranks.communicator import Communicator


@contextmanager
def together(communicator: Communicator, what: str) -> Iterator[None]:
    """Around what each rank does on its files alone: if one fails, all raise. Collective at the end of the block.

    Raises CheckpointError with the first rank's reason on all ranks. Errors of arguments leave as they are, if all
    ranks have them. As all ranks raise, their states stay as they are for whoever catches it. Any other exception is
    published, as one that the others do not expect.
    """
    failure: Exception | None = None
    with communicator.publishing():
        try:
            yield
        except (OSError, CheckpointError, ValueError, TypeError, KeyError) as error:
            failure = error
    words = "" if failure is None else reason_of(failure)
    every = communicator.all_gather_bytes(words.encode(), "files of a checkpoint")
    failed = [(rank, each.decode()) for rank, each in enumerate(every) if each]
    if not failed:
        return
    if failure is not None and communicator.world_size == len(failed) and not isinstance(failure, OSError):
        raise failure
    rank, reason = failed[0]
    who = "" if communicator.world_size == 1 else f"rank {rank}: "
    raise CheckpointError(f"{what}: {who}{reason}") from failure


def reason_of(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} (errno {error.errno}): {error.filename or 'a file of the checkpoint'}"
    return str(error) or repr(error)
