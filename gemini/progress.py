"""Progress of long work at a terminal: what is done, how much of it, how long it has taken and still takes.

Work on few bytes shows nothing: it is done before anyone could read a bar. Nor does work inside other work that is
shown, because two bars would overwrite each other.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gemini.log import rank_of_process

LEAST_BYTES = 2**29
"""Work on fewer bytes takes less than a second or two."""
_is_shown = threading.Lock()


@contextmanager
def progress(what: str, total_bytes: int, shows: bool = True) -> Iterator[Callable[[int], None]]:
    """Show on rank 0 how far the block is, if stderr is a terminal. Yields what is told of each part that is done.

    total_bytes: of all parts. shows: False shows nothing, as of work in the background. Local; raises nothing.
    """
    if not (shows and total_bytes >= LEAST_BYTES and rank_of_process() == 0 and sys.stderr.isatty()):
        yield lambda num_bytes: None
        return
    with the_only_bar() as is_alone:
        if not is_alone:
            yield lambda num_bytes: None
            return
        # Imported here: most processes never show a bar.
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (TextColumn(what), BarColumn(24), DownloadColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what, total=total_bytes)
            yield lambda num_bytes: bar.advance(task, num_bytes)


@contextmanager
def the_only_bar() -> Iterator[bool]:
    """Inside, no other bar is shown. Yields whether there is none yet. Local; raises nothing."""
    is_alone = _is_shown.acquire(blocking=False)
    try:
        yield is_alone
    finally:
        if is_alone:
            _is_shown.release()
