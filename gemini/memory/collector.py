"""The garbage collector of cycles, where many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Inside, in this process, cycles are not searched for.

    A search starts whenever the objects have grown by a quarter, and goes through all of them. For a plan of thousands
    of chunks, whose every object is kept, the searches would take more time than the objects. Tensors of ours are in no
    cycle and are freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
