"""Reads checkpoints again and compares every byte with its checksum."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gemini.checkpoint.file_io import DiskIO
from gemini.checkpoint.manifest import FileSummary, Manifest, RankFile, read_manifest, read_rank_file
from gemini.checkpoint.tensor_files import checksum, parts_in
from gemini.errors import CheckpointError


def verify_rank(folder: Path, rank: int) -> None:
    """Verify what one rank of those that saved has written. Raises OSError and CheckpointError."""
    manifest = read_manifest(folder)
    verify_files(folder, read_rank_file(folder, manifest.ranks[rank]))


def verify_files(folder: Path, rank_file: RankFile, told: Callable[[int], None] | None = None) -> None:
    """Verify the files of tensors that a rank's file names. Raises OSError and CheckpointError.

    told: called with numbers of bytes that are verified.
    """
    with DiskIO() as io:
        for name, summary in rank_file.files.items():
            _verify_file(folder / name, summary, io, told)


def _verify_file(path: Path, summary: FileSummary, io: DiskIO, told: Callable[[int], None] | None) -> None:
    size = os.stat(path).st_size
    if size != summary.num_bytes:
        raise CheckpointError(f"{path} has {size} bytes, {summary.num_bytes} were written")
    parts, data_start = parts_in(path)
    if {stored.part.key for stored in parts} | {""} != set(summary.crc32):
        raise CheckpointError(f"{path} has other tensors than were written")
    spans = [(stored.part.key, stored.start, stored.part.num_bytes) for stored in parts]
    file = os.open(path, os.O_RDONLY)
    try:
        for key, start, num_bytes in [("", 0, data_start), *spans]:
            if checksum(io, file, path, start, num_bytes) != summary.crc32[key]:
                what = f"tensor {key!r}" if key else "the header"
                raise CheckpointError(f"{path} is damaged: {what} is not as it was written")
            if told is not None:
                told(num_bytes)
    finally:
        os.close(file)


def rank_files(folder: Path, manifest: Manifest) -> list[RankFile]:
    """What each rank alone has, by rank. Raises OSError and CheckpointError."""
    return [read_rank_file(folder, summary) for summary in manifest.ranks]
