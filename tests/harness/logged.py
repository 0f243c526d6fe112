"""What gemini's logger writes while a test runs."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged() -> Iterator[io.StringIO]:
    """The text so far, of whichever handlers there are besides."""
    text = io.StringIO()
    handler, logger = logging.StreamHandler(text), logging.getLogger("gemini")
    logger.addHandler(handler)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
