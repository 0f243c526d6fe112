"""Reads and writes past the page cache: in whole blocks, or the ordinary way where a file system does without."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

BLOCK_BYTES = 4096
"""To which O_DIRECT aligns positions, lengths and memory: a multiple of every usual sector."""
_MOST_BYTES = 2**26  # at once: a signal or an error is noticed between two of these

Call = Callable[[int, list[memoryview], int], int]
"""`os.preadv` or `os.pwritev`."""


def in_blocks(num_bytes: int) -> int:
    """The length of the blocks that hold so many bytes."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def past_the_cache(file: int) -> int:
    """The same file, opened with O_DIRECT; `file` itself where that does not exist."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):
        return file


def carry_out(function: Call, file: int, ordinary: int, data: memoryview, position: int) -> int:
    """Read or write bytes of a file. Returns how many: fewer than those of `data` where the file ends. Raises OSError.

    file: opened with O_DIRECT if everything is aligned, else `ordinary`.
    """
    done = 0
    while done < len(data):
        try:
            count = function(file, [data[done : done + _MOST_BYTES]], position + done)
        except OSError as error:
            # A file system may want another alignment, or have O_DIRECT in name only.
            if error.errno == errno.EINVAL and file != ordinary:
                file = ordinary
                continue
            raise
        if not count:
            break
        # A call may do less than it was told, as a disk that fills up does; the next one then raises.
        done += count
        # What is left of a request that ended early may be unaligned.
        file = file if not done % BLOCK_BYTES else ordinary
    return done
