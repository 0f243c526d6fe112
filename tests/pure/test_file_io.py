"""Large pieces go past the page cache and back with every byte, whatever the disk does to a request."""

from __future__ import annotations

import errno
import fcntl
import os
import runpy
import sys
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import gemini.checksum
from gemini.checkpoint.file_io import PIECE_BYTES, DiskIO
from gemini.checkpoint.tensor_files import OpenFiles, Part, TensorFile, checksum, tensors_in, whole
from gemini.errors import CheckpointError
from gemini.memory import direct

# Two that are divided at odd places, one of a whole piece, and small ones before, between and after.
SIZES = {"first": 3, "a": 2 * PIECE_BYTES + 12_345, "between": 7, "b": PIECE_BYTES + 4097, "c": PIECE_BYTES, "last": 1}


def write(path: Path) -> tuple[dict[str, torch.Tensor], TensorFile]:
    values = {name: torch.randint(0, 255, (size,), dtype=torch.uint8) for name, size in SIZES.items()}
    file = TensorFile(path, [Part(name, whole((size,)), torch.uint8) for name, size in SIZES.items()])
    try:
        for name in reversed(values):
            file.write(name, values[name])
        file.finish()
    finally:
        file.close()
    return values, file


@pytest.mark.parametrize("trouble", ["none", "no O_DIRECT", "another alignment", "short writes"])
def test_every_byte_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    write_at = os.pwritev
    if trouble == "no O_DIRECT":
        monkeypatch.setattr(direct, "_past_the_cache", lambda file: file)

    def troubled(file: int, data: list[memoryview], position: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            if trouble == "another alignment":
                raise OSError(errno.EINVAL, "Invalid argument")
            if trouble == "short writes":
                data = [data[0][: 4096 * 5]]
        return write_at(file, data, position)

    monkeypatch.setattr(os, "pwritev", troubled)
    path = tmp_path / "it.safetensors"
    values, file = write(path)
    with safe_open(path, "pt") as theirs:
        assert all(torch.equal(theirs.get_tensor(name), value) for name, value in values.items())
    stored = tensors_in([path])
    with OpenFiles() as files:
        assert all(torch.equal(stored[name].whole(files), value) for name, value in values.items())
    assert {name: zlib.crc32(value.numpy().tobytes()) for name, value in values.items()} | {
        "": file.crc32[""]
    } == file.crc32


def test_a_full_disk_is_an_error_of_the_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_at = os.pwritev

    def full(file: int, data: list[memoryview], position: int) -> int:
        if len(data[0]) == PIECE_BYTES:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_at(file, data, position)

    monkeypatch.setattr(os, "pwritev", full)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="No space left"):
        write(tmp_path / "it.safetensors")
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("num_bytes", [1, PIECE_BYTES, 3 * PIECE_BYTES + 5, 6 * PIECE_BYTES])
def test_large_reads_are_whole_and_a_short_file_is_named(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "it"
    data = os.urandom(num_bytes)
    path.write_bytes(b"head" + data)
    with open(path, "rb") as file, DiskIO() as io:
        into = memoryview(bytearray(num_bytes))
        io.read(file.fileno(), path, 4, into)
        assert into == data
        with pytest.raises(CheckpointError, match="it ends after"):
            io.read(file.fileno(), path, 5, into)
        assert checksum(file.fileno(), path, 4, num_bytes) == zlib.crc32(data)


@pytest.mark.parametrize("has_isal", [True, False])
def test_checksums_are_those_of_zlib(has_isal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_isal:
        monkeypatch.setitem(sys.modules, "isal.isal_zlib", None)
    crc32 = runpy.run_path(gemini.checksum.__file__)["crc32"]
    data = bytes(range(256)) * 33
    assert crc32(memoryview(data)[5:]) == zlib.crc32(data[5:])
    assert crc32(data[100:], crc32(data[:100])) == zlib.crc32(data) and crc32(b"") == 0
