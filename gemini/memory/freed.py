"""Has malloc give back what it keeps of weights that moved into chunks.

glibc serves blocks of up to 32 MiB from its heap once some were freed, and an aligned block, as torch's are, does not
fit into the hole that an equal one has left. Weights that are freed one by one stay resident: 3 bytes a parameter were
measured for a model built on shards (`benchmarks/resident_memory.py`).
"""

from __future__ import annotations

import ctypes

_TRIM_BYTES = 2**25  # trimming takes milliseconds
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


class Freed:
    """Counts what was freed, and has malloc give it back from time to time."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """About so many bytes of tensors were freed, on whatever device."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _TRIM_BYTES and _malloc_trim is not None:
            self._num_bytes = 0
            _malloc_trim(0)
