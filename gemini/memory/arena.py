"""One block of host memory, pinned where that pays, divided into regions."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from gemini.log import warn_at_script
from gemini.memory.tier import MemoryTier
from gemini.placement.demand import Kind

# -- Host memory that a GPU's driver copies from and to directly: registered exactly, and unregistered before it is
# freed.
#
# [Note: Registered memory] The driver identifies memory by address. If memory were unmapped while it is registered, the
# next block at that address could not be registered or, worse, would pass for pinned while copies still used the old
# pages. So the registration belongs to the `Extent` that holds the mapping. It ends when the last tensor in
# the extent dies, whoever holds that tensor, and right before the memory is unmapped.


# address: (process, bytes). Each change is one dict operation, so threads need no lock.
_registered: dict[int, tuple[int, int]] = {}


def registered_bytes() -> int:
    """Registered bytes of all models of this process whose tensors are alive."""
    # The sum goes over a copy, as another thread may change the dict meanwhile.
    return sum(num_bytes for process, num_bytes in _registered.copy().values() if process == os.getpid())


class Registrar(Protocol):
    """The calls of a GPU's runtime that pinning needs. Return values are the runtime's error codes, 0 is success."""

    def register(self, address: int, num_bytes: int) -> int: ...

    def unregister(self, address: int) -> int: ...

    def launch(self) -> None:
        """Launch a kernel. Raises RuntimeError for this thread's last error, and thereby clears it."""


class CudaRuntime:
    """The CUDA runtime that torch uses, for one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> int:
        # The runtime would otherwise act on the thread's current device, and create a context there: on GPU 0, if the
        # script or the thread has chosen none.
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))

    def unregister(self, address: int) -> int:
        # This runs in a finalizer, so in any thread: the current device is a setting of each thread.
        with torch.cuda.device(self._device):
            return int(torch.cuda.cudart().cudaHostUnregister(address))

    def launch(self) -> None:
        # torch reads and clears the runtime's last error after each kernel that it launches.
        torch.ones(1, device=self._device).neg_()


class Pinning:
    """Registers memory. After the first failure it stops, and training goes on with unpinned memory."""

    def __init__(self, runtime: Registrar) -> None:
        self._runtime = runtime
        self.works = True

    def register(self, owner: object, address: int, num_bytes: int) -> bool:
        """Register memory until `owner`, which keeps it mapped, dies. False, with one warning, if that is refused."""
        if not self.works:
            return False
        error = self._runtime.register(address, num_bytes)
        if error == 0:
            # A forked child inherits this dict but no registration: the process number tells such entries apart.
            _registered[address] = os.getpid(), num_bytes
            ending = weakref.finalize(owner, _unregister, self._runtime, address, os.getpid())
            # The process's registrations end with it.
            ending.atexit = False
            return True
        self.works = False
        _clear_error(self._runtime)
        warn_at_script(
            f"host memory of {num_bytes} bytes could not be pinned (cudaHostRegister error {error}). Training goes on "
            "with unpinned memory, and copies to and from the device will be slower. Raise the locked-memory limit "
            "(ulimit -l), or give host_memory= less than the machine can lock",
        )
        return False


def _unregister(runtime: Registrar, address: int, process: int) -> None:
    """Runs in the finalizer of an extent, so it must not raise. A forked child has no registrations to end."""
    _registered.pop(address, None)
    if os.getpid() == process and runtime.unregister(address) != 0:
        _clear_error(runtime)


def _clear_error(runtime: Registrar) -> None:
    """Clear the runtime's last error: torch returns its code, but the next launch of any kernel would raise it."""
    try:
        runtime.launch()
    except RuntimeError:
        # An error that persists is another one, and must be seen.
        runtime.launch()


# -- Makes malloc return the memory of weights that have moved into chunks.
#
# Once some blocks were freed, glibc serves blocks of up to 32 MiB from its heap, and an aligned block, as torch
# allocates, does not fit into the hole that an equal one has left. Weights that are freed one by one therefore stay
# resident: 3 bytes a parameter were measured for a model built on shards (`benchmarks/resident_memory.py`).


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


# -- Host memory in a few mappings of exactly known size, from which buffers are cut and to which they return.
#
# `malloc` keeps freed blocks, and torch's pinned allocator rounds blocks up to powers of two: resident memory then
# exceeds the buffers in it. An arena maps what a plan puts on the host in one piece, an *extent*. When more is needed
# later, another extent is mapped beside it, so nothing is copied.
#
# [Note: Returned ranges] A range of an extent becomes free when the last tensor in it dies, and not before: a view that
# someone still holds never shows another buffer's content. Each buffer is a storage of its own over a memoryview of the
# mapping, and a weak reference to that memoryview tells of its death. Python runs such callbacks in any thread and,
# through the cycle collector, in the middle of any function, even while the lock is held. So the callback is
# `deque.append`, which waits for no lock and is no Python code that Ctrl-C could interrupt; whoever looks for a free
# range next empties the queue. Pages go back to the system at once, by a second callback that a range may miss.


ALIGNMENT = 64
"""In bytes; every buffer begins on a multiple of it: a cache line, and the widest vector register of a CPU."""


class Arena:
    """Extents for one use. An extent is mapped when it is needed."""

    def __init__(self, pinning: Pinning | None = None, extent_bytes: int = 0, keeps_pages: bool = False) -> None:
        """pinning: registers what `reserve` maps.

        extent_bytes: the least that is mapped for a buffer that finds no room.

        keeps_pages: free memory stays resident, for buffers that come and go in every step. Otherwise whole free pages
            go back to the system, except in registered extents: the driver would go on using the pages of before.
        """
        self._pinning = pinning
        self._extent_bytes = extent_bytes
        self._keeps_pages = keeps_pages
        self._extents: list[Extent] = []

    @property
    def mapped_bytes(self) -> int:
        """Mapped address space: exactly what was reserved, and what was taken without a reservation."""
        return sum(extent.num_bytes for extent in self._extents)

    @property
    def registered_bytes(self) -> int:
        return sum(extent.num_bytes for extent in self._extents if extent.is_registered)

    @property
    def held_bytes(self) -> int:
        """Memory that no one else can use: registered extents whole, of others the pages that were not given back."""
        return sum(extent.held_bytes for extent in self._extents)

    def growth_of(self, num_bytes: int) -> int:
        """Bytes by which `held_bytes` would grow if buffers of `num_bytes` in total were taken."""
        # In other extents free pages went back to the system: a buffer there takes them again. Only registered extents
        # hold their free room already.
        return max(0, num_bytes - sum(extent.free_bytes for extent in self._extents if extent.is_registered))

    def reserve(self, num_bytes: int) -> None:
        """Map in one piece what buffers of `num_bytes` in total need beyond the free room. Raises OSError."""
        missing = num_bytes - sum(extent.free_bytes for extent in self._extents)
        # Free room may lie in ranges that are too small for a buffer: `allocate` then maps another extent.
        if missing > 0:
            self._extents.append(Extent(missing, self._pinning, self._keeps_pages))

    def allocate(self, num_bytes: int) -> Tensor:
        """(num_bytes,) uint8, zeros; from an unregistered extent if nothing was reserved. Raises OSError."""
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        for extent in self._extents:
            buffer = extent.cut(num_bytes)
            if buffer is not None:
                return buffer
        # Registering costs milliseconds and waits for the device, so only reserved extents are registered.
        self._extents.append(Extent(max(_aligned(num_bytes), self._extent_bytes), None, self._keeps_pages))
        buffer = self._extents[-1].cut(num_bytes)
        assert buffer is not None
        return buffer

    def trim(self) -> None:
        """Unmap extents that are entirely free."""
        self._extents = [extent for extent in self._extents if extent.free_bytes < extent.num_bytes]


class Extent(mmap.mmap):
    """One mapping. Every live buffer refers to it; after the last one it is unregistered and unmapped."""

    def __new__(cls, num_bytes: int, pinning: Pinning | None, keeps_pages: bool) -> Extent:
        """Raises OSError if the system has no room for `num_bytes`."""
        # Python's default is MAP_SHARED, by which a forked DataLoader worker would write into the memory of its parent.
        return super().__new__(cls, -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def __init__(self, num_bytes: int, pinning: Pinning | None, keeps_pages: bool) -> None:
        self.num_bytes = num_bytes
        self._keeps_pages = keeps_pages
        self._free = [(0, num_bytes)]  # (start, end) of the free ranges, sorted; adjacent ranges are merged
        self._used_end = 0  # bytes from here on were never in use, so they are still zeros
        self._taken: dict[int, _Taken] = {}  # by start: the ranges of all buffers
        self._returned: deque[_Taken] = deque()  # see [Note: Returned ranges]
        self._is_torn = False  # an exception has left `_free` behind `_taken`
        self._lock = threading.Lock()
        if not keeps_pages and hasattr(mmap, "MADV_HUGEPAGE"):
            self._advise(mmap.MADV_HUGEPAGE, 0, num_bytes)  # fewer faults, and fewer pages to register
        address = ctypes.addressof(ctypes.c_char.from_buffer(self))
        # The attributes of a mapping die before it is unmapped, and a weak reference to the mapping itself after that.
        self._registration = _Registration()
        self.is_registered = pinning is not None and pinning.register(self._registration, address, num_bytes)

    @property
    def free_bytes(self) -> int:
        with self._lock:
            self._merge_returned()
            return sum(end - start for start, end in self._free)

    @property
    def held_bytes(self) -> int:
        """See `Arena.held_bytes`."""
        if self.is_registered:
            return self.num_bytes
        return self._used_end if self._keeps_pages else self.num_bytes - self.free_bytes

    def cut(self, num_bytes: int) -> Tensor | None:
        """(num_bytes,) uint8, zeros, from the first free range that is large enough; None if there is none."""
        size = _aligned(num_bytes)
        with self._lock:
            self._merge_returned()
            at = next((i for i, (start, end) in enumerate(self._free) if end - start >= size), None)
            if at is None:
                return None
            start, last = self._free[at]
            end = start + size
            part = memoryview(self)[start : start + num_bytes]
            self._is_torn = True
            self._taken[start] = _Taken(self, part, start, end)
            self._free[at : at + 1] = [(end, last)] if end < last else []
            used_end, self._used_end = self._used_end, max(self._used_end, end)
            self._is_torn = False
        # The tensor keeps `part` alive, whose death returns the range.
        buffer = torch.frombuffer(part, dtype=torch.uint8)
        # Pages that were never in use are zeros already: writing to them would make them resident.
        if start < used_end:
            buffer.zero_()
        return buffer

    def _merge_returned(self) -> None:
        """Make the ranges free whose buffers have died. The caller holds the lock."""
        if self._is_torn:
            self._find_free()
        self._is_torn = bool(self._returned)
        while self._returned:
            taken = self._returned.popleft()
            if self._taken.get(taken.start) is taken:  # else `_find_free` was first
                del self._taken[taken.start]
                self.return_pages(*self._merge(taken.start, taken.end))
        self._is_torn = False

    def _find_free(self) -> None:
        """Find the free ranges between the buffers that are alive."""
        self._taken = {start: taken for start, taken in self._taken.items() if taken() is not None}
        ranges = sorted((start, taken.end) for start, taken in self._taken.items())
        starts = chain([0], (end for _, end in ranges))
        ends = chain((start for start, _ in ranges), [self.num_bytes])
        self._free = []
        for start, end in zip(starts, ends, strict=True):
            if start < end:
                self.return_pages(*self._merge(start, end))

    def _merge(self, start: int, end: int) -> tuple[int, int]:
        """Add a free range and join it with its neighbours. Returns the range of pages that may go with it."""
        low = high = bisect(self._free, (start, end))
        first, last = start, end
        if low > 0 and self._free[low - 1][1] == start:
            low, first = low - 1, self._free[low - 1][0]
        if high < len(self._free) and self._free[high][0] == end:
            high, last = high + 1, self._free[high][1]
        self._free[low:high] = [(first, last)]
        # The neighbours' whole pages were returned before. Only pages that became free with this range are left: those
        # at its ends may have been shared with a neighbour.
        page = mmap.PAGESIZE
        return max(-(-first // page), start // page) * page, min(last // page, -(-end // page)) * page

    def return_pages(self, start: int, end: int) -> None:
        """Return the whole pages of a range that no tensor lies in to the system, if they may go."""
        first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and not (self._keeps_pages or self.is_registered):
            self._advise(mmap.MADV_DONTNEED, first, last - first)

    def _advise(self, advice: int, start: int, num_bytes: int) -> None:
        try:
            self.madvise(advice, start, num_bytes)
        except OSError:
            # The advice saves memory only: everything works without it.
            return


class _Registration:
    """Its death ends the registration of the extent that has it."""


class _Taken(weakref.ref[memoryview]):
    """The range [start, end) of an extent that a buffer lies in. See [Note: Returned ranges]."""

    __slots__ = ("_pages", "end", "start")

    def __new__(cls, extent: Extent, part: memoryview, start: int, end: int) -> _Taken:
        return super().__new__(cls, part, extent._returned.append)

    def __init__(self, extent: Extent, part: memoryview, start: int, end: int) -> None:
        self.start, self.end = start, end
        # Of two callbacks the younger one runs first: while it gives the pages back nobody can take the range. It knows
        # the extent weakly, which refers to it.
        self._pages = weakref.ref(part, partial(_return_pages, weakref.ref(extent), start, end))


def _return_pages(
    of: weakref.ref[Extent], start: int, end: int, part: object, is_ending: Callable[[], bool] = sys.is_finalizing
) -> None:
    extent = of()
    # A model that lives as long as its script dies while the interpreter takes modules down: `mmap` is None by then.
    if extent is not None and not is_ending():
        extent.return_pages(start, end)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# -- The host tier: plain memory, or memory pinned for an accelerator.
#
# What a plan puts on the host is reserved before it is taken: one mapping of exactly that size when a model is wrapped,
# and one when its optimizer comes. Each is registered once, since registering costs milliseconds and waits for the
# device. Temporaries (spilled gradients, sums under `no_sync()`, weights from before an edit) come from staging memory.
# It grows in the first steps, is kept for later ones, and is never registered: that would happen in the middle of a
# backward.


EXTENT_BYTES = 2**20
"""Default for the least that is mapped for a buffer that was not reserved."""
# These kinds have homes that a plan reserves. Every other kind is a temporary and comes from staging memory.
_STATES = frozenset(Kind)


class HostTier(MemoryTier):
    """Host memory of this rank."""

    def __init__(
        self, capacity_bytes: int | None = None, runtime: Registrar | None = None, extent_bytes: int = EXTENT_BYTES
    ) -> None:
        """runtime: of the GPU that memory is pinned for; None: plain memory.

        extent_bytes: the least that is mapped for states that were not reserved.
        """
        super().__init__("host", torch.device("cpu"), capacity_bytes, "host_memory=")
        self.homes = Arena(None if runtime is None else Pinning(runtime), extent_bytes)
        self.staging = Arena(extent_bytes=EXTENT_BYTES, keeps_pages=True)

    @property
    def mapped_bytes(self) -> int:
        """Mapped bytes of homes, registered or not: the ledger's bytes of all states, if nothing was freed."""
        return self.homes.mapped_bytes

    def reserve(self, num_bytes: int, kind: str) -> None:
        """Map room for states of `num_bytes` that are about to be taken. Raises BudgetError."""
        # Free extents go first: the budget counts what the arenas hold, not only what is in use.
        self.trim()
        growth = self.homes.growth_of(num_bytes)
        self._check_capacity(growth, kind, self.homes.held_bytes + self.staging.held_bytes)
        with self._allocating(growth, kind):
            self.homes.reserve(num_bytes)

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        """Take the buffer from the arena of its kind. Its range becomes free when the last tensor in it dies."""
        return (self.homes if kind in _STATES else self.staging).allocate(num_bytes)

    def trim(self) -> None:
        """Unmap extents that are not in use."""
        self.homes.trim()
        self.staging.trim()
