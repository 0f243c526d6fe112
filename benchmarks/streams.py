"""What the machine's memory gives: benchmark-only C++ loops, compiled when they are first asked for.

`update_streams` walks over an update's own tensors (each read, written or both) with an add for arithmetic;
`read_stream` only reads. An update cannot be expected to be faster than the first, nor a norm than the second.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

SOURCE = Path(__file__).parent / "csrc" / "streams.cpp"
FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-pthread")
GRANULE = 64
"""Every number of elements must be a multiple of this."""


class CompilerMissing(RuntimeError):
    """There is no g++, or it did not compile the loops; the message says what to do."""


class Mode(IntEnum):
    """What an update does with a tensor."""

    READ = 0
    READ_WRITE = 1
    WRITE = 2

    @property
    def num_touches(self) -> int:
        """How often each byte crosses the memory bus; a line that is fetched only to be overwritten is not counted."""
        return 2 if self is Mode.READ_WRITE else 1


class Stream(NamedTuple):
    """A flat tensor and what is done with it."""

    tensor: Tensor
    mode: Mode

    @property
    def traffic_bytes(self) -> int:
        return self.tensor.nbytes * self.mode.num_touches


class _CStream(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("itemsize", ctypes.c_int64), ("mode", ctypes.c_int64))


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled loops. Raises CompilerMissing."""
    compiler = shutil.which("g++")
    if compiler is None:
        raise CompilerMissing("the machine's bandwidth is measured with a C++ loop, but no g++ is on PATH; install it")
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        target = Path(folder) / "streams.so"
        done = subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(target)], capture_output=True, text=True)
        if done.returncode:
            raise CompilerMissing(f"g++ {' '.join(FLAGS)} did not compile {SOURCE.name}:\n{done.stderr}")
        return ctypes.CDLL(str(target))


def has_nontemporal() -> bool:
    """The loops can store past the cache on this machine."""
    return bool(library().has_nontemporal())


def update_streams(
    streams: Sequence[Stream], *, num_threads: int, block: int = 64, ahead_bytes: int = 0, nontemporal: bool = False
) -> None:
    """Walk over all streams together, `block` elements of each at a time; what is read and written keeps its content.

    All have one length. `ahead_bytes`: how far ahead to prefetch, 0 for not at all.
    """
    numel = streams[0].tensor.numel()
    for tensor, _ in streams:
        _check(tensor, numel)
    if block % GRANULE:
        raise ValueError(f"block must be a multiple of {GRANULE}, found {block}")
    array = (_CStream * len(streams))(*(_CStream(s.tensor.data_ptr(), s.tensor.itemsize, s.mode) for s in streams))
    numbers = [ctypes.c_int64(number) for number in (len(streams), numel, num_threads, block, ahead_bytes)]
    library().update_streams(array, *numbers, ctypes.c_int(nontemporal))


def read_stream(tensor: Tensor, *, num_threads: int, lanes: int = 1, ahead_bytes: int = 0) -> None:
    """Read `tensor`, each thread at `lanes` places at once."""
    _check(tensor, tensor.numel())
    numbers = [ctypes.c_int64(number) for number in (tensor.nbytes, num_threads, lanes, ahead_bytes)]
    library().read_stream(ctypes.c_void_p(tensor.data_ptr()), *numbers)


def _check(tensor: Tensor, numel: int) -> None:
    if tensor.numel() != numel or numel % GRANULE or not tensor.is_contiguous() or tensor.data_ptr() % 64:
        raise ValueError(
            f"streams must be contiguous, aligned to 64 bytes and of one length, a multiple of {GRANULE}; "
            f"found {tensor.numel()} elements"
        )
