"""What a checkpoint says of itself, and whether its files are as they were written."""

from __future__ import annotations

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from gemini.checkpoint.tensor_files import checksum, parts_in
from gemini.checksum import crc32
from gemini.errors import CheckpointError
from gemini.memory.workers import Workers, WorkPiece

# -- What a checkpoint says of itself: `checkpoint.json`, and a file for what each rank alone has.
#
# [Note: Layout of a checkpoint] docs/checkpoints.md describes the layout for other programs. Version 1 is read for
# ever: `tests/checkpoints/` holds one.
#
#     DIRECTORY/latest                      the name of the newest complete checkpoint
#     DIRECTORY/TAG/checkpoint.json         `Manifest`: written last, so that a directory without it is incomplete
#     DIRECTORY/TAG/rank-00000.json         `RankFile`: this rank's random numbers, position in the data, and checksums
#     DIRECTORY/TAG/states-00000-0.safetensors    boxes of "model.NAME", "optim.state.NAME.STATE", "grad.NAME"
#
# A state of 8 bits is a tensor of bytes, with the scales of its blocks under "optim.state.NAME.STATE.scale".


VERSION = 1
_NUM_VERIFYING = 3  # threads
MANIFEST = "checkpoint.json"
_CHECKSUM = re.compile(rb',"checksum":([0-9]+)}\Z')  # at the end of a manifest, of all before it

WEIGHT = "model."  # the prefixes of keys, as of torch's own `{"model": ..., "optim": ...}` in a flat state dict
OPTIM = "optim.state."
GRADIENT = "grad."


def state_key(name: str, state: str) -> str:
    """The key of a state that the optimizer keeps of a parameter, such as "exp_avg"."""
    return f"{OPTIM}{name}.{state}"


def scale_key(key: str) -> str:
    """The key of the scales of a state that is stored as bytes: a number for each block, see optim/formats.py."""
    return f"{key}.scale"


def rank_key(rank: int, key: str) -> str:
    """The key of a tensor of which ranks have different values, for a rank but 0."""
    return f"rank{rank}.{key}"


class _ManifestPart(BaseModel):
    # A field that a later version adds is no error in this one, which has checked the version first.
    model_config = ConfigDict(extra="ignore", frozen=True)


class ParameterFact(_ManifestPart):
    """A parameter or buffer. A tied parameter is there once, with its other names."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # of the model that was saved; the file may have fp32 masters of 16-bit weights
    aliases: tuple[str, ...] = ()
    trained: bool = False


class OptimizerFact(_ManifestPart):
    """The optimizer. `groups` have names of parameters under "params"; values are encoded (values.py)."""

    kind: str
    num_steps: int  # with skipped ones
    groups: list[dict[str, Any]]
    states: dict[str, list[str]]  # by parameter: the states that have tensors
    scalars: dict[str, Any]  # by parameter: the others, such as its number of steps
    loss_scale: Any = None
    ema: dict[str, int] | None = None  # the numbers of steps and of averagings, where weights are averaged


class GradientFact(_ManifestPart):
    """The gradients of micro-batches that no step has used yet."""

    num_backwards: int
    dtypes: dict[str, str]  # of the sums, by parameter


class RankSummary(_ManifestPart):
    """A rank's file, as all that was written of it was complete."""

    file: str
    num_bytes: int
    crc32: int


class Manifest(_ManifestPart):
    """A whole checkpoint."""

    format: Literal["gemini checkpoint"] = "gemini checkpoint"
    version: int
    versions: dict[str, str]  # of gemini, torch and Python
    created: str
    tag: str
    step: int | None  # the optimizer's number of steps
    world_size: int
    settings: dict[str, str]
    parameters: list[ParameterFact]
    buffers: list[ParameterFact]
    extra_states: dict[str, Any]  # of modules, see `torch.nn.Module.get_extra_state`
    optimizer: OptimizerFact | None
    gradients: GradientFact | None = None
    scheduler: Any = None
    extra: Any = None
    ranks: list[RankSummary]


class FileSummary(_ManifestPart):
    """A file of tensors. `crc32` has the checksum of each tensor's bytes by key, and under "" that of the header."""

    num_bytes: int
    crc32: dict[str, int]


class RankFile(_ManifestPart):
    """What one rank alone has."""

    files: dict[str, FileSummary]
    random: Any
    data: Any = None
    own_buffers: list[str] = []  # buffers of which this rank has other values than rank 0


_Model = TypeVar("_Model", Manifest, RankFile)


def about(tag: str, step: int | None, world_size: int) -> dict[str, Any]:
    """The fields of a manifest that say who wrote it, and when."""
    seconds, nanoseconds = divmod(time.time_ns(), 10**9)
    return {
        "version": VERSION,
        "versions": {
            "gemini": sys.modules["gemini"].__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "created": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{nanoseconds:09d}Z",
        "tag": tag,
        "step": step,
        "world_size": world_size,
    }


def dump(model: BaseModel) -> bytes:
    """The text of a file. NaN and infinite numbers are in it as Python writes them."""
    return json.dumps(model.model_dump(mode="python"), separators=(",", ":"), ensure_ascii=False).encode()


def dump_manifest(manifest: Manifest) -> bytes:
    """The text of `checkpoint.json`: it ends with the checksum of what is before."""
    body = dump(manifest).removesuffix(b"}")
    return body + f',"checksum":{crc32(body)}}}'.encode()


def write_durably(path: Path, data: bytes) -> None:
    """Write a small file, which is on the disk afterwards. Raises OSError."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. Raises CheckpointError if it has none, or one of a later version."""
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST}") from None
    found = _json(path, data)
    if found.get("format") != "gemini checkpoint":
        raise CheckpointError(f"{path} is not of a checkpoint that gemini has written")
    if not isinstance(version := found.get("version"), int) or version > VERSION:
        raise CheckpointError(
            f"{folder} has version {version!r} of the format, this gemini reads up to {VERSION}: use a newer one"
        )
    checksum = _CHECKSUM.search(data)
    # The first checkpoints of version 1 have none.
    if checksum is not None and crc32(data[: checksum.start()]) != int(checksum[1]):
        raise CheckpointError(f"{path} is damaged: it is not as it was written")
    return _validated(Manifest, path, found)


def read_rank_file(folder: Path, summary: RankSummary) -> RankFile:
    """A rank's file, if it is as it was written. Raises OSError and CheckpointError."""
    path = folder / summary.file
    data = path.read_bytes()
    if len(data) != summary.num_bytes or crc32(data) != summary.crc32:
        raise CheckpointError(f"{path} is not as it was written ({len(data)} of {summary.num_bytes} bytes)")
    return _validated(RankFile, path, _json(path, data))


def _json(path: Path, data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is no JSON ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is damaged: it has no fields")
    return found


def _validated(kind: type[_Model], path: Path, found: dict[str, Any]) -> _Model:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged: {place}: {first['msg']}") from None


# -- Reads checkpoints again and compares every byte with its checksum.


def verify_rank(folder: Path, rank: int) -> None:
    """Verify what one rank of those that saved has written. Raises OSError and CheckpointError."""
    manifest = read_manifest(folder)
    verify_files(folder, read_rank_file(folder, manifest.ranks[rank]))


def verify_files(folder: Path, rank_file: RankFile, told: Callable[[int], None] | None = None) -> None:
    """Verify the files of tensors that a rank's file names. Raises OSError and CheckpointError.

    told: called with numbers of bytes that are verified.
    """
    spans: list[_Span] = []
    for name, summary in rank_file.files.items():
        spans += _spans_of(folder / name, summary)
    # A file is read in some threads while others compute: each alone does both in turns.
    checks = [WorkPiece(partial(_verify, span)) for span in spans]
    workers = Workers(_NUM_VERIFYING, holds_forks_up=False)
    try:
        with workers.carrying_out(checks):
            for check, span in zip(checks, spans, strict=True):
                check.result()
                if told is not None:
                    told(span.num_bytes)
    finally:
        workers.close()


def verify_headers(folder: Path, rank_file: RankFile) -> None:
    """Verify all but the tensors themselves: sizes, names and places. Raises OSError and CheckpointError."""
    for name, summary in rank_file.files.items():
        _verify(next(_spans_of(folder / name, summary)))


class _Span(NamedTuple):
    """Bytes of a file, and the checksum that they had."""

    path: Path
    what: str
    start: int
    num_bytes: int
    crc32: int


def _spans_of(path: Path, summary: FileSummary) -> Iterator[_Span]:
    size = os.stat(path).st_size
    if size != summary.num_bytes:
        raise CheckpointError(f"{path} has {size} bytes, {summary.num_bytes} were written")
    parts, data_start = parts_in(path)
    if {stored.part.key for stored in parts} | {""} != set(summary.crc32):
        raise CheckpointError(f"{path} has other tensors than were written")
    yield _Span(path, "the header", 0, data_start, summary.crc32[""])
    for stored in parts:
        key = stored.part.key
        yield _Span(path, f"tensor {key!r}", stored.start, stored.part.num_bytes, summary.crc32[key])


def _verify(span: _Span) -> None:
    file = os.open(span.path, os.O_RDONLY)
    try:
        if checksum(file, span.path, span.start, span.num_bytes) != span.crc32:
            raise CheckpointError(f"{span.path} is damaged: {span.what} is not as it was written")
    finally:
        os.close(file)


def rank_files(folder: Path, manifest: Manifest) -> list[RankFile]:
    """What each rank alone has, by rank. Raises OSError and CheckpointError."""
    return [read_rank_file(folder, summary) for summary in manifest.ranks]
