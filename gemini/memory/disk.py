"""The disk as a tier: one file a rank and model, read and written past the page cache while chunks are updated."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import weakref
import zlib
from bisect import bisect_right, insort
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from torch import Tensor

from gemini.errors import BudgetError, GeminiError
from gemini.memory.tier import MemoryTier
from gemini.placement.demand import format_bytes


class DiskFailure(GeminiError):
    """A request that the disk did not carry out. It may end in the middle of a fetch, unlike a refusal."""


_Then = Callable[[int, memoryview, int], None]  # what follows a request: (position, its bytes, version of the buffer)


# -- The file behind the tier.
#
# [Note: The tier's file] It has no name: a process that ends in whatever way, killed ones included, leaves nothing
# behind, and nobody else can open it. Its blocks are reserved before they are used, so that no update meets a full
# disk. Every buffer is mapped too. So whatever reads or writes a state now and then, such as a checkpoint, an edit or a
# hash, finds a tensor in place. Updates, which touch every byte in every step, read and write past the page cache
# (O_DIRECT): through it a step would go at a third of the disk's rate, and push out of memory what training needs.
# The system keeps both views of the file the same, as long as nobody uses a range in two ways at once; the tickets of
# its region see to that.


BLOCK_BYTES = 4096
"""To which O_DIRECT aligns positions, lengths and memory: a multiple of every usual sector."""
_REQUEST_BYTES = 2**22
_NUM_REQUESTS = 4
"""On their way at once. Requests of 4 MiB by four threads read and write at the disk's rate: `benchmarks/disk.py`."""


class DiskTier(MemoryTier):
    """A file as memory of this rank."""

    def __init__(self, folder: Path, capacity_bytes: int | None = None, checks: bool = False) -> None:
        """folder: where the file lies. checks: what a request reads is what the last one wrote there.

        Raises ValueError if no file can be made there.
        """
        super().__init__("disk", torch.device("cpu"), capacity_bytes, "disk_memory=")
        self.folder = folder
        self._file = self._direct = -1
        try:
            self._file = _unnamed_file(folder)
        except OSError as error:
            raise ValueError(
                f"disk_path={str(folder)!r} takes no file: {error.strerror} (errno {error.errno}). Name a folder on a "
                "local disk that this user may write to"
            ) from None
        self._direct = _past_the_cache(self._file)
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (start, bytes) of ranges whose last tensor has died
        self._places: dict[int, tuple[int, int]] = {}  # by the address of a buffer: (start in the file, bytes)
        self._addresses: list[int] = []  # the same addresses, sorted
        self._threads = ThreadPoolExecutor(_NUM_REQUESTS, "gemini-disk")
        # By position of a request that has written: the version of the buffer, which a write through the mapping
        # raises, the length, and the checksum. None: nothing is checked.
        self._written: dict[int, tuple[int, int, int]] | None = {} if checks else None

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        length = max(BLOCK_BYTES, _in_blocks(num_bytes))
        start = self._range_of(length)
        was_used = start is not None
        if start is None:
            start = self._end
            try:
                os.posix_fallocate(self._file, start, length)
            except OSError as error:
                self.num_shortages += 1
                raise self._no_room(num_bytes, kind, error) from None
            self._end += length
        mapped = _mapped(self._file, start, length)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]
        # A view that somebody still has must not show what is there next. A buffer may die without `free`, with the
        # weights that a user drops while a model is built.
        weakref.finalize(mapped, self._note_end, buffer.data_ptr(), start, length).atexit = False
        if was_used:
            buffer.zero_()
            if self._written is not None:
                for position in [each for each in self._written if start <= each < start + length]:
                    del self._written[position]
        if num_bytes:
            self._places[buffer.data_ptr()] = start, num_bytes
            insort(self._addresses, buffer.data_ptr())
        return buffer

    def _range_of(self, length: int) -> int | None:
        """Take a range that is free again."""
        for number, (start, there) in enumerate(self._free):
            if there >= length:
                del self._free[number]
                if there > length:
                    self._free.append((start + length, there - length))
                return start
        return None

    def _no_room(self, num_bytes: int, kind: str, error: OSError) -> BudgetError:
        free = psutil.disk_usage(str(self.folder)).free
        return self._refusal(
            f"no room for {num_bytes} bytes of {kind} in {self.folder}, where {free} bytes ({format_bytes(free)}) are "
            f"free and this rank holds {self._end}: {error.strerror} (errno {error.errno}). Free some, or name another "
            "folder with disk_path=",
            self.ledger.total_bytes + num_bytes,
            self.capacity_bytes,
            is_shortage=True,
        )

    def free(self, buffer: Tensor, kind: str) -> None:
        """Free a buffer of `allocate`. Its range of the file is free when its last tensor has died."""
        super().free(buffer, kind)
        self._forget_place(buffer.data_ptr())

    def _note_end(self, address: int, start: int, length: int) -> None:
        """The last tensor of a buffer has died."""
        self._forget_place(address)
        self._free.append((start, length))

    def _forget_place(self, address: int) -> None:
        if self._places.pop(address, None) is not None:
            self._addresses.remove(address)

    def close(self) -> None:
        """Give the file back, with all that is in it. Closing it again does nothing."""
        if self._file < 0:
            return
        self._threads.shutdown()
        for number in {self._file, self._direct}:
            if number >= 0:
                os.close(number)
        self._file = self._direct = -1

    def __del__(self) -> None:
        """A model that is dropped without `close` leaves no open file. No request is under way: they hold the tier."""
        self.close()

    # -- requests

    def read(self, into: Tensor, source: Tensor) -> list[Future[None]]:
        """Start to fill host memory with as many bytes of the tier. Their futures raise DiskFailure."""
        return self._requests(os.preadv, "reading", into, source, self._check)

    def write(self, to: Tensor, source: Tensor) -> list[Future[None]]:
        """Start to write host memory to as many bytes of the tier. Their futures raise DiskFailure."""
        return self._requests(os.pwritev, "writing", source, to, self._note_written)

    def _requests(
        self, function: Callable[..., int], doing: str, memory: Tensor, there: Tensor, then: _Then
    ) -> list[Future[None]]:
        start, is_last = self._place_of(there)
        # Whole blocks go past the cache: nothing else is in the last one, and staging memory has room for it.
        file, data = self._direct, _bytes_of(memory, _in_blocks(memory.nbytes) if is_last else memory.nbytes)
        if data is None or start % BLOCK_BYTES or len(data) % BLOCK_BYTES:
            file, data = self._file, _bytes_of(memory, memory.nbytes)
            assert data is not None
        parts = (slice(first, first + _REQUEST_BYTES) for first in range(0, len(data), _REQUEST_BYTES))
        return [
            self._threads.submit(
                self._carry_out, function, doing, file, data[part], start + part.start, then, there._version
            )
            for part in parts
        ]

    def _carry_out(
        self,
        function: Callable[..., int],
        doing: str,
        file: int,
        data: memoryview,
        position: int,
        then: _Then,
        version: int,
    ) -> None:
        done = 0
        while done < len(data):
            try:
                count = function(file, [data[done:]], position + done)
            except OSError as error:
                # A file system may want another alignment, or have O_DIRECT in name only.
                if error.errno == errno.EINVAL and file != self._file:
                    file = self._file
                    continue
                raise self._failed(doing, len(data), position, f"{error.strerror} (errno {error.errno})") from error
            if not count:
                raise self._failed(doing, len(data), position, f"it ended after {done} bytes")
            done += count
            # What is left of a request that ended early may be unaligned.
            file = file if not done % BLOCK_BYTES else self._file
        if self._written is not None:
            then(position, data, version)

    def _note_written(self, position: int, data: memoryview, version: int) -> None:
        assert self._written is not None
        self._written[position] = version, len(data), zlib.crc32(data)

    def _check(self, position: int, data: memoryview, version: int) -> None:
        """Raises DiskFailure if other bytes were read than were written."""
        assert self._written is not None
        written_version, length, checksum = self._written.get(position, (-1, 0, 0))
        # What was written through the mapping since then has no checksum.
        if (written_version, length) == (version, len(data)) and zlib.crc32(data) != checksum:
            raise self._failed("reading", length, position, "they are not the bytes that were written (checksum)")

    def _failed(self, doing: str, num_bytes: int, position: int, why: str) -> DiskFailure:
        return DiskFailure(f"disk: {doing} {num_bytes} bytes at {position} of the file in {self.folder} failed: {why}")

    def _place_of(self, buffer: Tensor) -> tuple[int, bool]:
        """The place in the file of a buffer, or of a part of one, and whether it is the last part."""
        address = buffer.data_ptr()
        base = self._addresses[bisect_right(self._addresses, address) - 1]
        start, num_bytes = self._places[base]
        return start + address - base, address + buffer.nbytes == base + num_bytes


def _unnamed_file(folder: Path) -> int:
    """A file, of this user only, that ends with the last process that has it open. Raises OSError."""
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE, 0o600)
    except (OSError, AttributeError) as error:
        # Not every file system makes files without a name: one that is deleted at once is as good.
        if isinstance(error, OSError) and error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    file, path = tempfile.mkstemp(prefix="gemini-", dir=folder)
    os.unlink(path)
    return file


def _past_the_cache(file: int) -> int:
    """The same file, opened with O_DIRECT; `file` itself where that does not exist."""
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT)
    except (OSError, AttributeError):
        return file


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def _mapped(file: int, start: int, length: int) -> Any:
    """A part of the file as a buffer, until nothing refers to it. Raises OSError."""
    # Python's `mmap` keeps a descriptor open for each mapping: a model of a thousand chunks would run out of them.
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, start)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

    buffer = _array_type(length).from_address(address)
    weakref.finalize(buffer, _libc.munmap, address, length).atexit = False
    return buffer


@cache
def _array_type(length: int) -> Any:
    """An array of so many bytes that may have a finalizer, which ctypes' own type may not."""
    return type("Mapped", (ctypes.c_uint8 * length,), {})


def _in_blocks(num_bytes: int) -> int:
    """The length of the blocks that hold so many bytes."""
    return -(-num_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _bytes_of(memory: Tensor, length: int) -> memoryview | None:
    """`length` bytes from the tensor's first one on. None: its memory ends before, or is not aligned to blocks."""
    storage, address = memory.untyped_storage(), memory.data_ptr()
    if length != memory.nbytes and (address % BLOCK_BYTES or address + length > storage.data_ptr() + storage.nbytes()):
        return None
    # The view keeps the memory alive: a request may be on its way when its model is dropped, and would read into memory
    # that belongs to another tensor by then.
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, address - storage.data_ptr(), (length,), (1,))
    return memoryview(cast(Any, whole.numpy()))


def aligned_bytes(num_bytes: int, pins: bool) -> Tensor:
    """(num_bytes,) uint8 on the host with undefined content, where O_DIRECT may read from and write to."""
    length = _in_blocks(num_bytes) + BLOCK_BYTES
    memory = torch.empty(length, dtype=torch.uint8, device="cpu", pin_memory=pins)
    start = -memory.data_ptr() % BLOCK_BYTES
    return memory[start : start + num_bytes]


class DiskTicket:
    """A copy between the disk and host memory. It is the `Ticket` of both regions."""

    number = -1  # it is no copy of a stream's

    def __init__(self, requests: list[Future[None]], is_of_reader: bool = False) -> None:
        """is_of_reader: of memory that was only read, whose content is right however the copy ends."""
        self._requests = requests
        self._raises = not is_of_reader

    def wait(self) -> None:
        """See `Ticket`. Raises DiskFailure if the disk has failed."""
        wait(self._requests)
        if self._raises:
            for each in self._requests:
                each.result()

    def order(self) -> None:
        """Do what `wait` does: no stream can wait for the disk."""
        self.wait()

    def implies(self, earlier: Any) -> bool:
        """Whether `earlier` is done with it. Of another copy that is told only once it is over."""
        return earlier is self or (isinstance(earlier, DiskTicket) and all(each.done() for each in earlier._requests))
