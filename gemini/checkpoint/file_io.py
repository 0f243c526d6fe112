"""Bytes to files and from files at the disk's rate: several requests are on their way while the next bytes are made."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gemini.checksum import crc32
from gemini.errors import CheckpointError
from gemini.memory.direct import BLOCK_BYTES, DirectFile, aligned_bytes, check_written, read_some, write_all
from gemini.memory.workers import Workers, WorkPiece, give_up

PIECE_BYTES = 2**23
_NUM_REQUESTS = 2  # on their way at once: more did not read or write faster
_NUM_BUFFERS = 4


class DiskIO:
    """The threads and buffers of one save or load. Use it as a context: it waits for what is on its way.

    One thread uses it. It holds up to `_NUM_BUFFERS` buffers of `PIECE_BYTES`, from the first large piece on.
    """

    def __init__(self) -> None:
        self._workers = Workers(_NUM_REQUESTS + 1, holds_forks_up=False)  # one more for checksums
        self._free: list[memoryview] = []
        self._num_buffers = 0
        self._under_way: deque[tuple[WorkPiece, memoryview]] = deque()

    def __enter__(self) -> DiskIO:
        return self

    def __exit__(self, *_: object) -> None:
        self.await_requests()
        self._workers.close()

    def await_requests(self) -> None:
        """Wait for what is on its way, however it ends, before a file is closed. Raises nothing.

        A thread that still writes must not meet a closed file, nor one that others open under the same number.
        """
        while self._under_way:
            # It leaves the queue behind the wait: an interrupted one is waited for again.
            piece, buffer = self._under_way[0]
            piece.wait()
            self._under_way.popleft()
            self._give_back(buffer)

    # -- writing

    def write(self, file: OutputFile, data: memoryview, position: int) -> int:
        """Write bytes to a place in a file. Returns their CRC-32. They are copied or written then.

        Raises OSError, also of an earlier piece.
        """
        if len(data) < PIECE_BYTES:
            write_all(file.number, data, position)
            return crc32(data)
        found: list[int] = []
        crc = WorkPiece(lambda: found.append(crc32(data)))
        # Nothing may read `data` behind it any more.
        with self._workers.carrying_out([crc]):
            self._write(file, data, position)
            crc.result()
        return found[0]

    def _write(self, file: OutputFile, data: memoryview, position: int) -> None:
        start = -position % BLOCK_BYTES
        end = len(data) - (position + len(data)) % BLOCK_BYTES
        if not file.is_direct or end <= start:
            write_all(file.number, data, position)
            return
        file.keep_edge(data[:start], position)
        file.keep_edge(data[end:], position + end)
        for at in range(start, end, PIECE_BYTES):
            piece = data[at : min(at + PIECE_BYTES, end)]
            buffer = self._buffer()[: len(piece)]
            np.copyto(_array(buffer), _array(piece))  # without holding other threads up, unlike a slice's assignment
            self._begin(partial(file.write_piece, buffer, position + at), buffer)

    def finish_writes(self) -> None:
        """Wait for all writes. Raises OSError."""
        while self._under_way:
            self._wait_for_oldest()

    # -- reading

    def read(self, file: int, path: Path, start: int, into: memoryview) -> None:
        """Fill `into` from position `start` of a file. Raises OSError, or CheckpointError if the file ends before."""
        if len(into) < 2 * PIECE_BYTES:
            read_exactly(file, path, start, into)
            return
        pieces = [
            WorkPiece(partial(read_exactly, file, path, start + at, into[at : at + PIECE_BYTES]))
            for at in range(0, len(into), PIECE_BYTES)
        ]
        # Nothing may be written to `into` behind it any more.
        with self._workers.carrying_out(pieces):
            for piece in pieces:
                piece.result()

    # -- buffers and threads

    def _buffer(self) -> memoryview:
        """Memory that nothing uses. Waits for the oldest request if there is none."""
        if not self._free and self._num_buffers < _NUM_BUFFERS:
            self._num_buffers += 1
            memory: Any = aligned_bytes(PIECE_BYTES, pins=False).numpy()
            return memoryview(memory)
        while not self._free:
            self._wait_for_oldest()
        return self._free.pop()

    def _begin(self, work: Callable[[], None], buffer: memoryview) -> None:
        piece = WorkPiece(work)
        self._under_way.append((piece, buffer))  # first: an interrupt leaves nothing under way that nobody awaits
        try:
            self._workers.begin([piece])
        except BaseException as error:
            give_up([piece], error)
            raise

    def _wait_for_oldest(self) -> None:
        piece, buffer = self._under_way[0]
        piece.result()
        self._under_way.popleft()
        self._give_back(buffer)

    def _give_back(self, buffer: memoryview) -> None:
        whole: Any = buffer.obj  # a shorter view stands for it
        self._free.append(memoryview(whole))


class OutputFile:
    """A file that is written in pieces, in any order."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Makes the file, with room for all bytes. Raises OSError, for a full disk before any of them is written."""
        # Files of small pieces alone need no second descriptor.
        self._file = DirectFile(
            os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644), is_direct=num_bytes >= PIECE_BYTES
        )
        self._edges: list[tuple[bytes, int]] = []
        try:
            if hasattr(os, "posix_fallocate") and num_bytes:
                os.posix_fallocate(self.number, 0, num_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def number(self) -> int:
        """The file's descriptor."""
        return self._file.number

    @property
    def is_direct(self) -> bool:
        """Whether large pieces go past the page cache."""
        return self._file.is_direct

    def write_piece(self, data: memoryview, position: int) -> None:
        """Write whole blocks past the page cache, from aligned memory. Raises OSError."""
        check_written(self._file.write(data, position), data)

    def keep_edge(self, data: memoryview, position: int) -> None:
        """Take bytes beside a large piece, of less than a block. `finish` writes them.

        A write through the page cache waits for all that are past it in the same file.
        """
        if data:
            self._edges.append((bytes(data), position))

    def finish(self) -> None:
        """Have everything on the disk, after the large pieces. Raises OSError."""
        for data, position in self._edges:
            write_all(self.number, memoryview(data), position)
        self._edges.clear()
        os.fsync(self.number)

    def close(self) -> None:
        """Close the file, complete or not. Closing it again does nothing."""
        self._file.close()


def _array(data: memoryview) -> Any:
    return np.frombuffer(data, dtype=np.uint8)


def read_exactly(file: int, path: Path, start: int, into: memoryview) -> None:
    """Fill `into` from position `start` of a file. Raises OSError, or CheckpointError if the file ends before."""
    done = read_some(file, into, start)
    if done < len(into):
        raise CheckpointError(f"{path} ends after {start + done} bytes, {len(into) - done} more were expected")
