"""What is said to users: by one rank, once, at the line of their script."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import warnings
from collections.abc import Collection, Iterable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

# -- Warnings that name the user's line, however many of our functions lie between.


# torch wraps what it calls of ours: the `step` of an optimizer, and what it decorates with `no_grad`. contextlib stands
# around functions that are decorated with a context manager. The separator keeps a folder beside ours, such as
# `gemini_scripts`, from passing for a part of it.
_NOT_SCRIPTS = *(f"{Path(module).parent}{os.sep}" for module in (__file__, torch.__file__)), contextlib.__file__


def warn_at_script(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the innermost line outside gemini and torch. A fixed `stacklevel` is right for one way here only."""
    # From Python 3.12 on `warnings.warn(skip_file_prefixes=...)` does the same.
    frame, level = sys._getframe(), 1
    while frame.f_code.co_filename.startswith(_NOT_SCRIPTS) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def rank_of_process() -> int:
    """This process's rank in the default process group; 0 without one. Local."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


# -- A logger that knows its rank: `get_dist_logger().info(text, ranks=[0])`.


class DistributedLogger:
    """Writes to the logger `name` of the standard library, with the rank in front."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)
        if self._logger.level == logging.NOTSET:  # else the user has chosen one
            self._logger.setLevel(logging.INFO)
        if not self._logger.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s %(name)s: %(message)s"))
            self._logger.addHandler(handler)
            # A handler of the root logger would print every message a second time.
            self._logger.propagate = False

    def debug(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Write `message` at level DEBUG on the given ranks. None: on all of them."""
        self._log(logging.DEBUG, message, ranks)

    def info(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Write `message` at level INFO on the given ranks. None: on all of them."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Write `message` at level WARNING on the given ranks. None: on all of them."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: str, ranks: Collection[int] | None = None) -> None:
        """Write `message` at level ERROR on the given ranks. None: on all of them."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: str, ranks: Collection[int] | None) -> None:
        # Asked for at each message: a logger may be older than the process group.
        rank = rank_of_process()
        if ranks is None or rank in ranks:
            self._logger.log(level, "rank %d: %s", rank, message)


@cache
def get_dist_logger(name: str = "gemini") -> DistributedLogger:
    """The logger `name` of the standard library, which puts this process's rank in front of each message.

    Its `debug`, `info`, `warning` and `error` take `ranks=`, the ranks that write; None: all of them. Local; every call
    with the same name returns the same object. Raises nothing.

    Example:
        >>> get_dist_logger().debug("epoch 3", ranks=[0])
    """
    return DistributedLogger(name)


def disable_existing_loggers(include: Iterable[str] | None = None, exclude: Iterable[str] = ("gemini",)) -> None:
    """Set loggers of the standard library that exist now to write warnings and errors only. Local; raises nothing.

    Args:
        include: names of the loggers. None: all that exist.
        exclude: names of loggers that are left as they are.

    Example:
        >>> disable_existing_loggers(include=["urllib3"])
    """
    names = list(logging.root.manager.loggerDict) if include is None else list(include)
    for name in names:
        if name not in set(exclude):
            logging.getLogger(name).setLevel(logging.WARNING)
