"""What a command shows while it works: a line on stderr that is there at once, and one in logs after two seconds."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_SILENT_S = 2.0
"""Seconds for which a pipe is told nothing: most commands are done by then, and their logs stay short."""


@contextmanager
def working(console: Console, words: str) -> Iterator[None]:
    """Show `words` while the block runs. console: of stderr, so that stdout has nothing but the answer."""
    if console.is_terminal:
        with console.status(f"{words} ..."):
            yield
        return
    # A file or a pipe shows no moving line. One line says that the command works and did not hang.
    timer = threading.Timer(_SILENT_S, lambda: console.print(f"{words} ...", markup=False, soft_wrap=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
