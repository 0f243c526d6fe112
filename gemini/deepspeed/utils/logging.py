"""`deepspeed.utils.logging`: DeepSpeed's logger, which a script may also use for itself."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch.distributed as dist

from gemini.log import get_dist_logger

get_dist_logger("DeepSpeed")  # gives it a handler and a level, where the script has not
logger = logging.getLogger("DeepSpeed")
"""A logger of the standard library, which knows no ranks. What gemini says is in the logger "gemini"."""


def log_dist(message: str, ranks: Collection[int] | None = None, level: int = logging.INFO) -> None:
    """Log on the given ranks. Local.

    Args:
        message: what is logged, with the rank in front.
        ranks: [-1]: all of them. None: none, as in DeepSpeed, but for a process without a process group, which logs.
        level: of the standard library.
    """
    is_alone = not dist.is_initialized()
    rank = -1 if is_alone else dist.get_rank()
    wanted = ranks or []
    if is_alone or -1 in wanted or rank in wanted:
        logger.log(level, "[Rank %d] %s", rank, message)
