"""Python's cycle collector, switched off where many long-lived objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, the cycle collector of this process does not run.

    A collection starts whenever the number of objects has grown by a quarter, and visits all of them. For a plan of
    thousands of chunks, all of whose objects are kept, the collections would take more time than making the objects.
    Our tensors are part of no cycle and are freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
