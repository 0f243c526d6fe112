"""What the library tells its users while a test runs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def told() -> Iterator[list[str]]:
    """What the library's logger says."""
    lines: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()
    logging.getLogger("gemini").addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger("gemini").removeHandler(handler)
