"""Whether another library counts the ranks as torch.distributed does."""

from __future__ import annotations

import torch.distributed as dist

from gemini.errors import UnsupportedError


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
