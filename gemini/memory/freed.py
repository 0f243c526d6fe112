"""Makes malloc return the memory of weights that have moved into chunks.

Once some blocks were freed, glibc serves blocks of up to 32 MiB from its heap, and an aligned block, as torch
allocates, does not fit into the hole that an equal one has left. Weights that are freed one by one therefore stay
resident: 3 bytes a parameter were measured for a model built on shards (`benchmarks/resident_memory.py`).
"""

from __future__ import annotations

import ctypes

# Trimming takes milliseconds, so it waits for this many freed bytes.
_TRIM_BYTES = 2**25
# glibc has it, other C libraries do not.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)


class Freed:
    """Counts freed bytes and trims malloc's heap now and then."""

    def __init__(self) -> None:
        self._num_bytes = 0

    def note(self, num_bytes: int) -> None:
        """Tensors of about `num_bytes` were freed, on whatever device."""
        self._num_bytes += num_bytes
        if self._num_bytes >= _TRIM_BYTES and _malloc_trim is not None:
            self._num_bytes = 0
            _malloc_trim(0)
