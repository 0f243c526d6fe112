"""The libraries that a front end is over: one that is not installed is named with the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(*libraries: str) -> Iterator[None]:
    """Inside, `libraries` are imported. Local.

    Raises ModuleNotFoundError that says how to install one that is missing. What is missing inside of an installed one
    is raised as it is.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in libraries:
            raise
        raise ModuleNotFoundError(
            f"this needs {error.name}, which is not installed: pip install {error.name}", name=error.name
        ) from None
