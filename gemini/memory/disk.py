"""The disk as a tier: one file a rank and model, read and written past the page cache while chunks are updated."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import tempfile
import threading
import weakref
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol, cast

import psutil
import torch
from torch import Tensor

from gemini.checksum import crc32
from gemini.errors import BudgetError, GeminiError, UnsupportedError, closed
from gemini.memory.direct import BLOCK_BYTES, DirectFile, in_blocks
from gemini.memory.tier import MemoryTier
from gemini.memory.workers import Workers, WorkPiece, give_up
from gemini.observe import Feed, Span
from gemini.placement.demand import in_units


class DiskFailure(GeminiError):
    """A request that the disk did not carry out. It may end in the middle of a fetch, unlike a refusal."""


# -- The file behind the tier.
#
# [Note: The tier's file] It has no name: a process that ends in whatever way, killed ones included, leaves nothing
# behind, and nobody else can open it. Its blocks are reserved before they are used, so that no update meets a full
# disk. Every buffer is mapped too. So whatever reads or writes a state now and then, such as a checkpoint, an edit or a
# hash, finds a tensor in place. Updates, which touch every byte in every step, read and write past the page cache
# (O_DIRECT): through it a step would go at a third of the disk's rate, and push out of memory what training needs.
# The system keeps both views of the file the same, as long as nobody uses a range in two ways at once; the tickets of
# its region see to that.


_REQUEST_BYTES = 2**22
_NUM_REQUESTS = 4
"""On their way at once. Requests of 4 MiB by four threads read and write at the disk's rate: `benchmarks/disk.py`."""


class StateOwner(Protocol):
    """Whose a buffer is: a chunk."""

    @property
    def index(self) -> int: ...

    def names(self) -> str:
        """Those of its parameters."""


class _Tickets(Protocol):
    """For what users of a buffer wait: see `Tickets` in transfer.py."""

    def note_write(self, ticket: Any) -> None: ...


class DiskTier(MemoryTier):
    """A file as memory of this rank."""

    def __init__(self, folder: Path, capacity_bytes: int | None = None, checks: bool = False) -> None:
        """folder: where the file lies. checks: what a request reads is what was there before: see `_RangeOfFile`.

        Raises ValueError if no file can be made there.
        """
        super().__init__("disk", torch.device("cpu"), capacity_bytes, "disk_memory=")
        self.folder = folder
        self.lost = ""
        """Why the file lacks something that was to be written there; "": it lacks nothing."""
        self._file = DirectFile(-1)
        try:
            self._file = DirectFile(_unnamed_file(folder))
        except OSError as error:
            raise ValueError(
                f"disk_path={str(folder)!r} takes no file: {error.strerror} (errno {error.errno}). Name a folder on a "
                "local disk that this user may write to"
            ) from None
        self._end = 0
        self._free: list[tuple[int, int]] = []  # (start, bytes) of ranges whose last tensor has died
        self._places: dict[int, _RangeOfFile] = {}  # by the address of a buffer
        self._addresses: list[int] = []  # the same addresses, sorted
        self._workers = Workers(_NUM_REQUESTS)
        self._checks = checks
        self._forked_from = 0  # the process whose file this is; 0: this one
        _all_tiers.add(self)

    @property
    def requests(self) -> Feed:
        """Tells of every request that a thread has carried out."""
        return self._workers.heard

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        self.refuse_if_ended()
        length = max(BLOCK_BYTES, in_blocks(num_bytes))
        start = self._range_of(length)
        was_used = start is not None
        if start is None:
            start = self._end
            try:
                os.posix_fallocate(self._file.number, start, length)
            except OSError as error:
                self.num_shortages += 1
                raise self._no_room(num_bytes, kind, error) from None
            self._end += length
        mapped = _mapped(self._file.number, start, length)
        buffer = torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes]
        # A view that somebody still has must not show what is there next. A buffer may die without `free`, with the
        # weights that a user drops while a model is built.
        weakref.finalize(mapped, self._note_end, buffer.data_ptr(), start, length).atexit = False
        if was_used:
            buffer.zero_()
        if num_bytes:
            self._places[buffer.data_ptr()] = _RangeOfFile(start, num_bytes, kind)
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
            f"no room for {num_bytes} bytes of {kind} in {self.folder}, where {free} bytes{in_units(free)} are "
            f"free and this rank holds {self._end}: {error.strerror} (errno {error.errno}). Free some, or name another "
            "folder with disk_path=",
            self.ledger.total_bytes + num_bytes,
            self.capacity_bytes,
            is_shortage=True,
        )

    def note_owner(self, buffer: Tensor, owner: StateOwner, tickets: _Tickets) -> None:
        """Say whose a buffer of `allocate` is, for messages, and the tickets for which its users wait."""
        place = self._places.get(buffer.data_ptr())
        if place is not None:  # an empty one has none
            place.owner, place.tickets = weakref.ref(owner), weakref.ref(tickets)

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
        if self._file.is_open:
            self._workers.close()
            self._file.close()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """A model that is dropped without `close` leaves no open file. No request is under way: they hold the tier."""
        # The process closes the files of a model that lives as long as its script. `os` may be None by then.
        if not is_ending():
            self.close()

    def note_fork(self) -> None:
        """This process is a child that shares the file with its parent: whoever waits for a part of it is refused.

        The parent goes on writing there, and a copy of the file, as the system makes one of memory, would take as much
        of the disk again. So the child is told at its first use, whatever that is, and a child that uses nothing of the
        model, such as most workers of a DataLoader, goes on.
        """
        self._forked_from = self._forked_from or os.getppid()
        for place in self._places.values():
            tickets = None if place.tickets is None else place.tickets()
            if tickets is not None:
                tickets.note_write(_OfParent(self))

    def refuse_if_ended(self) -> None:
        """Raises GeminiError behind `close`, and UnsupportedError in a forked child."""
        if self._forked_from:
            raise UnsupportedError(
                f"this process was forked from process {self._forked_from}, whose model keeps states in a file in "
                f"{self.folder}: both processes would read and write that one file. Use the model in the process that "
                "has wrapped it; a child may use a copy of what it needs (model.state_dict() before the fork), or wrap "
                "a model of its own"
            )
        if not self._file.is_open:
            raise closed(f"its file in {self.folder} has ended with it")

    # -- requests

    def read(self, into: Tensor, source: Tensor) -> Sequence[WorkPiece]:
        """Start to fill host memory with as many bytes of the tier. The results of what is begun raise DiskFailure."""
        return self._begun(self.reading(into, source))

    def write(self, to: Tensor, source: Tensor) -> Sequence[WorkPiece]:
        """Start to write host memory to as many bytes of the tier. The results of what is begun raise DiskFailure."""
        return self._begun(self.writing(to, source))

    def reading(self, into: Tensor, source: Tensor) -> list[WorkPiece]:
        """The requests of `read`, of which none is begun."""
        return self._requests(False, into, source)

    def writing(self, to: Tensor, source: Tensor) -> list[WorkPiece]:
        """The requests of `write`, of which none is begun."""
        return self._requests(True, source, to)

    def begin(self, requests: Sequence[WorkPiece]) -> None:
        """Begin requests. Whoever calls this gives them up if it is interrupted."""
        self._workers.begin(requests)

    def _begun(self, requests: Sequence[WorkPiece]) -> Sequence[WorkPiece]:
        try:
            self.begin(requests)
        except BaseException as error:
            self.give_up(requests, error)
            raise
        return requests

    def give_up(self, requests: Sequence[WorkPiece], why: BaseException) -> None:
        """Nobody waits for requests that were not begun, because of `why`, and the others are over."""
        error = DiskFailure(f"disk: a request was not begun: {type(why).__name__}: {why}")
        error.__cause__ = why
        if any(isinstance(each, _Write) and not each.is_over for each in requests):
            self.lost = self.lost or str(error)
        give_up(requests, error)

    def _requests(self, writes: bool, memory: Tensor, there: Tensor) -> list[WorkPiece]:
        self.refuse_if_ended()
        place, start = self._place_of(there)
        is_last = start + there.nbytes == place.start + place.num_bytes
        # Whole blocks go past the cache: nothing else is in the last one, and staging memory has room for it.
        data = _bytes_of(memory, in_blocks(memory.nbytes) if is_last else memory.nbytes)
        if data is None or start % BLOCK_BYTES:
            data = _bytes_of(memory, memory.nbytes)
            assert data is not None
        parts = (slice(first, first + _REQUEST_BYTES) for first in range(0, len(data), _REQUEST_BYTES))
        of, function = (_Write, self._write) if writes else (WorkPiece, self._read)
        return [of(partial(function, place, data[part], start + part.start, there._version)) for part in parts]

    def _read(self, place: _RangeOfFile, data: memoryview, position: int, version: int) -> None:
        try:
            _check_whole(self._file.read(data, position), data)
            if self._checks and not place.check(position, data, version, self._file.number):
                raise OSError(0, "they are not the bytes that were written (checksum)")
        except OSError as error:
            raise self._failed("reading", place, len(data), position, error) from error

    def _write(self, place: _RangeOfFile, data: memoryview, position: int, version: int) -> None:
        try:
            _check_whole(self._file.write(data, position), data)
        except OSError as error:
            failed = self._failed("writing", place, len(data), position, error)
            self.lost = self.lost or str(failed)
            raise failed from error
        if self._checks:
            place.note_written(position, data, version)

    def _failed(self, doing: str, place: _RangeOfFile, num_bytes: int, position: int, error: OSError) -> DiskFailure:
        why = f"{error.strerror} (errno {error.errno})" if error.errno else error.strerror
        owner = None if place.owner is None else place.owner()
        whose = "" if owner is None else f" of chunk {owner.index} ({owner.names()})"
        where = f"at {position} of the file in {self.folder}"
        return DiskFailure(f"disk: {doing} {num_bytes} bytes of {place.kind}{whose} {where} failed: {why}")

    def _place_of(self, buffer: Tensor) -> tuple[_RangeOfFile, int]:
        """The place of a buffer, or of a part of one, and the part's start in the file."""
        address = buffer.data_ptr()
        base = self._addresses[bisect_right(self._addresses, address) - 1]
        place = self._places[base]
        return place, place.start + address - base


def _check_whole(done: int, data: memoryview) -> None:
    if done < len(data):
        raise OSError(0, f"it ended after {done} bytes")


class _Write(WorkPiece):
    """A request that writes: without it the file lacks something."""

    __slots__ = ()


class _Checksum(NamedTuple):
    """The checksum of a part of the file."""

    start: int
    end: int
    crc: int


@dataclass(eq=False)
class _RangeOfFile:
    """Where a buffer lies in the file, whose it is, and the checksums of what requests have written and read there.

    A checksum is of the bytes of one request. A read may end elsewhere than the write before it did: the rest of the
    write's bytes are read beside it then. What has no checksum, as what came through the mapping has none, gets one at
    its first read.
    """

    start: int
    num_bytes: int
    kind: str
    owner: weakref.ref[StateOwner] | None = None
    tickets: weakref.ref[_Tickets] | None = None
    _sums: list[_Checksum] = field(default_factory=list)
    _version: int = -1  # of the buffer when the sums were made: a write through the mapping raises it
    _lock: threading.Lock = field(default_factory=threading.Lock)  # several requests end at once

    def note_written(self, position: int, data: memoryview, version: int) -> None:
        """A request has written."""
        new = self._sum(position, self._own(position, data))
        with self._lock:
            self._keep_sums(version)
            self._sums = [each for each in self._sums if each.end <= new.start or new.end <= each.start]
            self._sums.append(new)

    def check(self, position: int, data: memoryview, version: int, file: int) -> bool:
        """Whether a request has read what was there before. Raises OSError."""
        data = self._own(position, data)
        end = position + len(data)
        with self._lock:
            self._keep_sums(version)
            known = sorted(each for each in self._sums if each.start < end and position < each.end)
        for each in known:
            first, last = max(each.start, position), min(each.end, end)
            crc = crc32(_read_at(file, each.start, first))
            crc = crc32(data[first - position : last - position], crc)
            if crc32(_read_at(file, last, each.end), crc) != each.crc:
                return False
        starts, ends = [position, *(each.end for each in known)], [*(each.start for each in known), end]
        gaps = [(first, last) for first, last in zip(starts, ends, strict=True) if first < last]
        new = [self._sum(first, data[first - position : last - position]) for first, last in gaps]
        with self._lock:
            if self._version == version:
                self._sums += new
        return True

    def _own(self, position: int, data: memoryview) -> memoryview:
        """The data without what fills the last block."""
        return data[: self.start + self.num_bytes - position]

    def _sum(self, position: int, data: memoryview) -> _Checksum:
        return _Checksum(position, position + len(data), crc32(data))

    def _keep_sums(self, version: int) -> None:
        """Keep the checksums if nothing was written through the mapping since they were made."""
        if self._version != version:
            self._sums, self._version = [], version


def _read_at(file: int, start: int, end: int) -> bytes:
    """What a file has there. Raises OSError."""
    found = b""
    while start + len(found) < end:
        more = os.pread(file, end - start - len(found), start + len(found))
        if not more:
            raise OSError(0, f"it ends at {start + len(found)}")
        found += more
    return found


class _OfParent:
    """The `Ticket` of a part of the disk in a child that was forked from the tier's process."""

    number = -1  # it is no copy of a stream's

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier

    def wait(self) -> None:
        """Raises UnsupportedError."""
        self._tier.refuse_if_ended()

    def order(self) -> None:
        """Raises UnsupportedError."""
        self.wait()

    def implies(self, earlier: Any) -> bool:
        """Whether `earlier` is done with it: nothing is."""
        return earlier is self


_all_tiers: weakref.WeakSet[DiskTier] = weakref.WeakSet()


def _after_fork() -> None:
    for each in list(_all_tiers):
        each.note_fork()


os.register_at_fork(after_in_child=_after_fork)


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


def _bytes_of(memory: Tensor, length: int) -> memoryview | None:
    """`length` bytes from the tensor's first one on. None: its memory ends before, or is not aligned to blocks."""
    storage, address = memory.untyped_storage(), memory.data_ptr()
    if length != memory.nbytes and (address % BLOCK_BYTES or address + length > storage.data_ptr() + storage.nbytes()):
        return None
    # The view keeps the memory alive: a request may be on its way when its model is dropped, and would read into memory
    # that belongs to another tensor by then.
    whole = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, address - storage.data_ptr(), (length,), (1,))
    return memoryview(cast(Any, whole.numpy()))


class DiskTicket:
    """A copy between the disk and host memory. It is the `Ticket` of both regions."""

    number = -1  # it is no copy of a stream's

    def __init__(self, requests: Sequence[WorkPiece], heard: Feed, is_of_reader: bool = False) -> None:
        """is_of_reader: of memory that was only read, whose content is right however the copy ends.

        heard: is told how long somebody has waited.
        """
        self._heard = heard
        self._requests = requests
        self._raises = not is_of_reader

    def wait(self) -> None:
        """See `Ticket`. Raises DiskFailure if the disk has failed."""
        # All of them before the first error: nobody may use the memory while a request is on its way.
        begin_s = perf_counter() if self._heard else 0.0
        for each in self._requests:
            each.wait()
        if begin_s:
            self._heard.tell(Span("disk", begin_s, perf_counter()))
        if self._raises:
            for each in self._requests:
                each.result()

    def order(self) -> None:
        """Do what `wait` does: no stream can wait for the disk."""
        self.wait()

    def implies(self, earlier: Any) -> bool:
        """Whether `earlier` is done with it. Of another copy that is told only once it is over."""
        return earlier is self or (isinstance(earlier, DiskTicket) and all(each.is_over for each in earlier._requests))
