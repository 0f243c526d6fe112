"""Files that are read and written past the page cache: those of the disk tier and of checkpoints.

[Note: Past the page cache] Large pieces go with O_DIRECT from and to memory that is aligned for it. Through the page
cache they would go at the rate at which the system happens to write back, wait for the rest of it in `fsync`, and push
out of memory what training uses. Where a file system has no O_DIRECT (a tmpfs, for example), and for bytes that are no
whole blocks, the ordinary way is taken: both see the same file.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import torch
from torch import Tensor

BLOCK_BYTES = 4096
"""To which O_DIRECT aligns positions, lengths and memory: a multiple of every usual sector."""
_MOST_BYTES = 2**26  # at once: a signal or an error is noticed between two of these


def in_blocks(num_bytes: int) -> int:
    """The length of the blocks that hold so many bytes."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def aligned_bytes(num_bytes: int, pins: bool) -> Tensor:
    """(num_bytes,) uint8 on the host with undefined content, where O_DIRECT may read from and write to."""
    length = in_blocks(num_bytes) + BLOCK_BYTES
    memory = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pins)
    start = -memory.data_ptr() % BLOCK_BYTES
    return memory[start : start + num_bytes]


class DirectFile:
    """An open file, and the same one past the page cache. Any thread may use it."""

    def __init__(self, number: int, is_direct: bool = True) -> None:
        """number: the file's descriptor, which this object closes; -1: there is none. is_direct: it gets a second."""
        self.number = number
        self._direct = _past_the_cache(number) if is_direct else number

    @property
    def is_direct(self) -> bool:
        """Whether whole blocks go past the page cache."""
        return self._direct != self.number

    @property
    def is_open(self) -> bool:
        return self.number >= 0

    def read(self, into: memoryview, position: int) -> int:
        """Read bytes. Returns how many: fewer than those of `into` where the file ends. Raises OSError."""
        return self._carry_out(os.preadv, into, position)

    def write(self, data: memoryview, position: int) -> int:
        """Write bytes. Returns how many: fewer than those of `data` if the disk takes no more. Raises OSError."""
        return self._carry_out(os.pwritev, data, position)

    def _carry_out(self, function: _Call, data: memoryview, position: int) -> int:
        are_blocks = position % BLOCK_BYTES == len(data) % BLOCK_BYTES == 0
        return _carry_out(function, self._direct if are_blocks else self.number, self.number, data, position)

    def close(self) -> None:
        """Close the file. Closing it again does nothing."""
        for number in {self.number, self._direct}:
            if number >= 0:
                os.close(number)
        self.number = self._direct = -1


def write_all(file: int, data: memoryview, position: int) -> None:
    """Write bytes to a place in a file, the ordinary way. Raises OSError."""
    check_written(_carry_out(os.pwritev, file, file, data, position), data)


def read_some(file: int, into: memoryview, position: int) -> int:
    """Read bytes, the ordinary way. Returns how many: fewer than `into` has where the file ends. Raises OSError."""
    return _carry_out(os.preadv, file, file, into, position)


def check_written(done: int, data: memoryview) -> None:
    """Raises OSError if not all of the data was written."""
    if done < len(data):
        raise OSError(0, f"the disk took {done} of {len(data)} bytes")


def _past_the_cache(file: int) -> int:
    """The same file, opened with O_DIRECT; `file` itself where that does not exist."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):
        return file


_Call = Callable[[int, list[memoryview], int], int]  # `os.preadv` or `os.pwritev`


def _carry_out(function: _Call, file: int, ordinary: int, data: memoryview, position: int) -> int:
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
