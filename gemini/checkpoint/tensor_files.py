"""Boxes of tensors in safetensors files: written as a stream, and read by the bytes that are needed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gemini.checkpoint.file_io import DiskIO, OutputFile, read_exactly
from gemini.checksum import crc32
from gemini.errors import CheckpointError
from gemini.memory.direct import write_all

# -- Boxes of named tensors: how a flat run of elements is described without chunks, ranks or stages.
#
# A rank holds a flat interval of each parameter. A checkpoint describes it as boxes of the parameter, as
# `torch.distributed.checkpoint` does: an offset and a size in every dimension. An interval of an n-dimensional tensor
# is at most 2n - 1 boxes: the rest of a row, whole rows, the beginning of a row, in each dimension. Numbers only.


class Box(NamedTuple):
    """The elements [offset, offset + size) in every dimension of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """The elements that both boxes have; None if there are none."""
        firsts = tuple(map(max, self.offsets, other.offsets))
        ends = map(min, self._ends(), other._ends())
        sizes = tuple(end - first for first, end in zip(firsts, ends, strict=True))
        return Box(firsts, sizes) if all(size > 0 for size in sizes) else None

    def inside(self, outer: Box) -> tuple[slice, ...]:
        """The same elements as indices into a tensor that holds the box `outer` alone."""
        starts = (mine - its for mine, its in zip(self.offsets, outer.offsets, strict=True))
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))

    def _ends(self) -> Iterator[int]:
        return (offset + size for offset, size in zip(self.offsets, self.sizes, strict=True))


def whole(shape: Sequence[int]) -> Box:
    """All elements of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def boxes_of(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements [start, end) of a contiguous tensor, in order; each box is contiguous in it. None if empty."""
    if start >= end:
        return
    if not shape:
        yield Box((), ())
        return
    row = prod(shape[1:])
    first, last = start // row, (end - 1) // row
    if first == last:
        yield from _in_row(shape, first, start - first * row, end - first * row)
        return
    if start % row:
        yield from _in_row(shape, first, start - first * row, row)
        first += 1
    whole_rows = end // row - first
    if whole_rows:
        yield Box((first, *(0 for _ in shape[1:])), (whole_rows, *shape[1:]))
    yield from _in_row(shape, last, 0, end - last * row if end % row else 0)


def _in_row(shape: Sequence[int], index: int, start: int, end: int) -> Iterator[Box]:
    for box in boxes_of(shape[1:], start, end):
        yield Box((index, *box.offsets), (1, *box.sizes))


class Order(NamedTuple):
    """How the dimensions of a tensor follow each other in memory, the slowest first.

    Elements of a chunk lie in the order of their strides: those of a transposed weight are not in the order of its
    dimensions. In a checkpoint they are.
    """

    dims: tuple[int, ...]

    @classmethod
    def of(cls, stride: Sequence[int], shape: Sequence[int]) -> Order:
        """The order of a dense tensor with these strides."""
        # A dimension of one element may have any stride: where it stands makes no difference.
        return cls(tuple(sorted(range(len(shape)), key=lambda dim: (-stride[dim], dim))))

    def boxes(self, shape: Sequence[int], start: int, end: int) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """The elements [start, end) in memory, in order: each box of the tensor, with its sizes as they lie."""
        for box in boxes_of([shape[dim] for dim in self.dims], start, end):
            back = self.back
            named = Box(tuple(box.offsets[dim] for dim in back), tuple(box.sizes[dim] for dim in back))
            yield named, box.sizes

    @property
    def is_natural(self) -> bool:
        """The dimensions follow each other in their own order."""
        return self.dims == tuple(range(len(self.dims)))

    @property
    def back(self) -> tuple[int, ...]:
        """The permutation from memory to the tensor's dimensions."""
        return tuple(sorted(range(len(self.dims)), key=self.dims.__getitem__))


# -- Tensors in safetensors files, in parts: written as a stream, and read by the bytes that are needed.
#
# A file holds at most one box of a tensor. Which box it is says the file's header, under the key that
# `torch.distributed.checkpoint` uses for the same purpose, so that its `HuggingFaceStorageReader` reads these files
# too. All sizes are known before anything is written: the header comes first, and each tensor goes to its place when
# its bytes are there. Nothing is held in memory but the tensor that is being written or read.


SUFFIX = ".safetensors"
_SHARDING_KEY = "DCP_SHARDING_INFO"  # of torch/distributed/checkpoint/_hf_utils.py, as are the two next to it
_OFFSETS_KEY = "saved_offsets"
_LENGTH_BYTES = 8  # of the header's own size, at the start of a file
_CHECK_BYTES = 2**18  # read and summed at once: more would leave the processor's cache in between
_MOST_HEADER_BYTES = 100_000_000  # safetensors refuses longer ones, as a file that is none has any number there

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


class Part(NamedTuple):
    """A box of a tensor, as a file holds it."""

    key: str
    box: Box
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.box.numel * self.dtype.itemsize


def check_dtype(key: str, dtype: torch.dtype) -> None:
    """Raises CheckpointError if a file cannot hold tensors of this dtype."""
    if dtype not in _NAMES:
        raise CheckpointError(f"{key} is {dtype}, which safetensors files cannot hold")


# -- writing


class TensorFile:
    """A file that is being written: its header says from the start what it will hold."""

    def __init__(self, path: Path, parts: Iterable[Part], io: DiskIO | None = None, is_sharded: bool = True) -> None:
        """Makes the file, with room for all parts. Raises OSError, for a full disk before any of them is written.

        io: writes the parts; None: one of its own. is_sharded: the header says which boxes the parts are. False: they
            are whole tensors.
        """
        self.path = path
        # Wide elements first: whoever maps the file finds every tensor at a multiple of its element's size.
        ordered = sorted(parts, key=lambda part: -part.dtype.itemsize)
        entries: dict[str, Any] = {}
        self._starts: dict[str, int] = {}
        end = 0
        for part in ordered:
            self._starts[part.key], begin, end = end, end, end + part.num_bytes
            sizes = list(part.box.sizes)
            entries[part.key] = {"dtype": _NAMES[part.dtype], "shape": sizes, "data_offsets": [begin, end]}
        places = {part.key: {_OFFSETS_KEY: list(part.box.offsets)} for part in ordered}
        entries["__metadata__"] = {"format": "pt"} | ({_SHARDING_KEY: json.dumps(places)} if is_sharded else {})
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(_LENGTH_BYTES, "little") + text
        self._data_start = len(header)
        self.num_bytes = self._data_start + end
        self.crc32 = {"": crc32(header)}  # of each tensor's bytes by key; "": of the header
        self._io = io or DiskIO()
        self._file = OutputFile(path, self.num_bytes)
        try:
            write_all(self._file.number, memoryview(header), 0)
        except BaseException:
            self._file.close()
            raise

    def write(self, key: str, value: Tensor) -> None:
        """Write a part, whose elements `value` holds in order, 1-D and on the CPU. Raises OSError."""
        self.crc32[key] = self._io.write(self._file, _bytes_of(value), self._data_start + self._starts[key])

    def finish(self) -> None:
        """Have everything on the disk, and close the file. Raises OSError."""
        try:
            self._io.finish_writes()
            self._file.finish()
        finally:
            self.close()

    def close(self) -> None:
        """Close the file, complete or not. Closing it again does nothing."""
        self._io.await_requests()
        self._file.close()


def _bytes_of(flat: Tensor) -> memoryview:
    """The memory of a dense CPU tensor of one dimension, to read and to write."""
    array: Any = flat.detach().view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(bytearray())


# -- reading


@dataclass(frozen=True)
class Stored:
    """A part of a tensor in a file, and where its bytes are."""

    path: Path
    start: int  # in the file, in bytes
    part: Part


class StoredTensor:
    """A tensor of which one or several files have parts."""

    def __init__(self, key: str, dtype: torch.dtype, shape: tuple[int, ...], parts: Sequence[Stored]) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.parts = list(parts)

    @property
    def num_bytes(self) -> int:
        return whole(self.shape).numel * self.dtype.itemsize

    def missing(self) -> int:
        """How many elements no part has, or, below 0, how many several parts have."""
        return whole(self.shape).numel - sum(stored.part.box.numel for stored in self.parts)

    def read(self, box: Box, files: OpenFiles, out: Tensor | None = None) -> Tensor:
        """The elements of a box, in its shape, on the CPU. out: a tensor of that shape, any strides and dtype, to fill.

        Only bytes between the first and the last element that is needed of each part are read. Raises OSError, and
        CheckpointError for a file that is too short.
        """
        if out is None:
            out = torch.empty(box.sizes, dtype=self.dtype, device="cpu")
        for stored in self.parts:
            common = stored.part.box.overlap(box)
            if common is not None:
                files.read_into(stored, common, out[common.inside(box)])
        return out

    def whole(self, files: OpenFiles) -> Tensor:
        """All elements. Raises as `read`."""
        return self.read(whole(self.shape), files)


class OpenFiles:
    """Files that are being read, each opened once. Use it as a context: it closes them.

    crc32: of parts of tensors, by file and key. A part that is read whole is compared with it.
    """

    def __init__(self, crc32: Mapping[Path, Mapping[str, int]] | None = None) -> None:
        self._io = DiskIO()
        self.crc32 = crc32 or {}
        self._files: dict[Path, int] = {}
        self.num_bytes = 0  # read so far

    def __enter__(self) -> OpenFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._io.__exit__()
        for file in self._files.values():
            os.close(file)
        self._files.clear()

    def read_into(self, stored: Stored, box: Box, out: Tensor) -> None:
        """Fill `out`, of the box's shape, with elements of a stored part that has all of them.

        Raises CheckpointError if the whole part is read, and not as it was written.
        """
        part = stored.part
        strides = _strides_of(part.box.sizes)
        inside = [piece.start for piece in box.inside(part.box)]
        first = sum(start * stride for start, stride in zip(inside, strides, strict=True))
        last = first + sum((size - 1) * stride for size, stride in zip(box.sizes, strides, strict=True))
        itemsize = part.dtype.itemsize
        numel = last - first + 1
        # The usual case: the elements lie side by side in the file and in memory, and are read to where they belong.
        direct = numel == box.numel and out.dtype is part.dtype and out.device.type == "cpu" and out.is_contiguous()
        target = out.view(-1) if direct else torch.empty(numel, dtype=part.dtype, device="cpu")
        self._read(stored.path, stored.start + first * itemsize, target)
        if numel == part.box.numel and (wanted := self.crc32.get(stored.path, {}).get(part.key)) is not None:
            if crc32(_bytes_of(target)) != wanted:
                raise CheckpointError(f"{stored.path} is damaged: tensor {part.key!r} is not as it was written")
        if not direct:
            out.copy_(torch.as_strided(target, box.sizes, strides))

    def _read(self, path: Path, start: int, target: Tensor) -> None:
        self.num_bytes += target.nbytes
        self._io.read(self.open(path), path, start, _bytes_of(target))

    def open(self, path: Path) -> int:
        """The descriptor of a file. Raises OSError."""
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


def _strides_of(sizes: Sequence[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return strides[::-1]


def parts_in(path: Path) -> tuple[list[Stored], int]:
    """The parts of tensors in a safetensors file, in order of their bytes, and the size of its header.

    Raises OSError, and CheckpointError if it is no such file, or its tensors end behind it.
    """
    size = os.stat(path).st_size
    file = os.open(path, os.O_RDONLY)
    try:
        length = bytearray(_LENGTH_BYTES)
        read_exactly(file, path, 0, memoryview(length))
        num_bytes = int.from_bytes(length, "little")
        if num_bytes > min(_MOST_HEADER_BYTES, size - _LENGTH_BYTES):
            raise CheckpointError(f"{path} is no safetensors file: its header would have {num_bytes} bytes")
        text = bytearray(num_bytes)
        read_exactly(file, path, _LENGTH_BYTES, memoryview(text))
    finally:
        os.close(file)
    try:
        entries = json.loads(bytes(text))
        metadata = entries.pop("__metadata__", None) or {}
        places = json.loads(metadata[_SHARDING_KEY]) if _SHARDING_KEY in metadata else {}
        found = [_stored(path, _LENGTH_BYTES + num_bytes, key, its, places) for key, its in entries.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file: its header cannot be read ({error!r})") from error
    found.sort(key=lambda stored: stored.start)
    for stored in found:
        if stored.start + stored.part.num_bytes > size:
            raise CheckpointError(f"{path} has {size} bytes: it ends before its tensor {stored.part.key!r} does")
    return found, _LENGTH_BYTES + num_bytes


def _stored(path: Path, data_start: int, key: str, its: Mapping[str, Any], places: Mapping[str, Any]) -> Stored:
    sizes = tuple(int(size) for size in its["shape"])
    offsets = tuple(int(offset) for offset in places[key][_OFFSETS_KEY]) if key in places else (0,) * len(sizes)
    if len(offsets) != len(sizes):
        raise ValueError(f"tensor {key!r} of {len(sizes)} dimensions has offsets in {len(offsets)}")
    begin, end = its["data_offsets"]
    part = Part(key, Box(offsets, sizes), _DTYPES[its["dtype"]])
    if end - begin != part.num_bytes or begin < 0:
        raise ValueError(f"tensor {key!r} has {end - begin} bytes, {part.num_bytes} were expected")
    return Stored(path, data_start + begin, part)


def tensors_in(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """The tensors of which these files have parts, by key. Raises OSError and CheckpointError as `parts_in`."""
    parts: dict[str, list[Stored]] = {}
    for path in paths:
        for stored in parts_in(path)[0]:
            parts.setdefault(stored.part.key, []).append(stored)
    return {key: _joined(key, its) for key, its in parts.items()}


def _joined(key: str, parts: Sequence[Stored]) -> StoredTensor:
    """One tensor, as large as its parts reach."""
    dtypes = sorted({str(stored.part.dtype) for stored in parts})
    if len(dtypes) > 1:
        raise CheckpointError(f"the parts of {key!r} have dtypes {', '.join(dtypes)}: they are of several tensors")
    boxes = [stored.part.box for stored in parts]
    ends = np.array([[o + s for o, s in zip(box.offsets, box.sizes, strict=True)] for box in boxes], dtype=np.int64)
    shape = tuple(int(end) for end in ends.max(axis=0)) if boxes[0].sizes else ()
    return StoredTensor(key, parts[0].part.dtype, shape, parts)


def checksum(file: int, path: Path, start: int, num_bytes: int) -> int:
    """The CRC-32 of bytes of a file. Raises OSError, and CheckpointError if it is too short."""
    buffer = memoryview(bytearray(min(num_bytes, _CHECK_BYTES)))
    crc = 0
    for at in range(0, num_bytes, _CHECK_BYTES):
        piece = buffer[: num_bytes - at]
        read_exactly(file, path, start + at, piece)
        crc = crc32(piece, crc)
    return crc
