"""Checkpoints of other libraries become ours: weights, masters, moments and numbers of steps, tensor by tensor.

What is read: Hugging Face's folders and state dicts of torch's (weights alone); DeepSpeed's ZeRO-1, 2 and 3 and
universal checkpoints; and those that `torch.distributed.checkpoint` has written, as of FSDP2. No code of a file runs:
tensors are read with `weights_only=True`, in which stand-ins without behaviour take the place of DeepSpeed's classes,
and DCP's metadata, a pickle, by an unpickler that knows the classes of metadata alone. Files are mapped, and no
process holds more than one tensor besides.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, takewhile
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from gemini.checkpoint.directory import Directory, check_tag
from gemini.checkpoint.exporting import INDEX
from gemini.checkpoint.loading import SavedCheckpoint
from gemini.checkpoint.manifest import (
    MANIFEST,
    WEIGHT,
    FileSummary,
    Manifest,
    OptimizerFact,
    ParameterFact,
    RankFile,
    RankSummary,
    about,
    dump,
    dump_manifest,
    state_key,
    write_durably,
)
from gemini.checkpoint.tensor_files import (
    SUFFIX,
    OpenFiles,
    Part,
    StoredTensor,
    TensorFile,
    check_dtype,
    tensors_in,
    whole,
)
from gemini.checkpoint.values import encode, name_of
from gemini.checkpoint.writing import rank_name
from gemini.checksum import crc32
from gemini.errors import CheckpointError

_SETTINGS = ("lr", "betas", "eps", "weight_decay", "momentum", "dampening", "nesterov", "decoupled_weight_decay")


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor of another library's checkpoint. `read` gives it whole, on the CPU."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]


@dataclass
class ForeignCheckpoint:
    """What another library's checkpoint has, by our keys."""

    tensors: dict[str, ForeignTensor] = field(default_factory=dict)
    parameters: list[ParameterFact] = field(default_factory=list)
    buffers: list[ParameterFact] = field(default_factory=list)
    optimizer: OptimizerFact | None = None

    def add_weight(
        self,
        name: str,
        tensor: ForeignTensor,
        dtype: torch.dtype | None = None,
        trained: bool = False,
        aliases: Sequence[str] = (),
    ) -> None:
        """A parameter, or its fp32 master. dtype: that of the model, if it is another than the tensor's."""
        fact = ParameterFact(
            name=name, shape=tensor.shape, dtype=name_of(dtype or tensor.dtype), aliases=tuple(aliases), trained=trained
        )
        self.add(WEIGHT + name, tensor)
        self.parameters.append(fact)

    def add(self, key: str, tensor: ForeignTensor) -> None:
        """A tensor under a key of ours. Raises CheckpointError if there is another one: one of them would be lost."""
        if key in self.tensors:
            raise CheckpointError(f"there are two tensors of the name {key!r}: which one counts cannot be known")
        self.tensors[key] = tensor

    def note_trained(self, names: Collection[str]) -> None:
        """These parameters were trained."""
        self.parameters = [each.model_copy(update={"trained": each.name in names}) for each in self.parameters]

    def add_buffer(self, name: str, value: Tensor) -> None:
        """A buffer."""
        self.add(WEIGHT + name, _here(name, value))
        self.buffers.append(ParameterFact(name=name, shape=tuple(value.shape), dtype=name_of(value.dtype)))


def import_checkpoint(
    foreign: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    tag: str = "imported",
    told: Callable[[int], None] | None = None,
) -> Path:
    """Make a checkpoint of ours of one that another library has written. Local.

    `load_checkpoint` then gives each rank its part: no process holds the whole.

    Args:
        foreign: a folder of DeepSpeed's (with `latest` or `latest_universal`, or one step's) or of
            `torch.distributed.checkpoint`, from which a training goes on; or a folder of Hugging Face's, a .safetensors
            file, or a state dict that `torch.save` wrote, for `load_checkpoint(..., weights_only=True)`.
        directory: of the checkpoints.
        tag: the new checkpoint's name.
        told: called with numbers of bytes as they are written.

    Returns the checkpoint's folder. Raises CheckpointError and OSError.
    """
    given = read_foreign(foreign)
    for key, each in given.tensors.items():
        check_dtype(key, each.dtype)
    where = Directory(directory)
    draft = where.begin(check_tag(tag))
    folder = draft.path
    try:
        parts = [Part(key, whole(each.shape), each.dtype) for key, each in given.tensors.items()]
        file = TensorFile(folder / f"states-00000-0{SUFFIX}", parts)
        try:
            for part in parts:
                value = given.tensors[part.key].read()
                file.write(part.key, value.to(part.dtype).contiguous().reshape(-1))
                if told is not None:
                    told(part.num_bytes)
            file.finish()
        finally:
            file.close()
        summary = FileSummary(num_bytes=file.num_bytes, crc32=file.crc32)
        data = dump(RankFile(files={file.path.name: summary}, random=None))
        write_durably(folder / rank_name(0), data)
        manifest = Manifest(
            **about(tag, step=None if given.optimizer is None else given.optimizer.num_steps, world_size=1),
            settings={},
            parameters=given.parameters,
            buffers=given.buffers,
            extra_states={},
            optimizer=given.optimizer,
            ranks=[RankSummary(file=rank_name(0), num_bytes=len(data), crc32=crc32(data))],
        )
        write_durably(folder / MANIFEST, dump_manifest(manifest))
        return draft.commit()
    except BaseException:
        draft.abandon()
        raise


def read_foreign(path: str | os.PathLike[str]) -> ForeignCheckpoint:
    """What is in another library's checkpoint; tensors are read when they are asked for.

    Raises CheckpointError if it is of no known kind, lacks a file, or has one that cannot be read safely.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_dir():
        return _weights_of_file(path)
    if (path / ".metadata").is_file():
        return _of_dcp(path)
    folder = _deepspeed_folder(path)
    if folder is not None:
        return _ZeroFolder(folder).read()
    if (path / INDEX).is_file():
        return _of_index(path)
    paths = sorted(path.glob(f"*{SUFFIX}"))
    _refuse_missing_shards(path, paths)
    if not paths:
        raise CheckpointError(
            f"{path} is no checkpoint that can be imported: it has no {SUFFIX} files (Hugging Face), no .metadata "
            "(torch.distributed.checkpoint) and no *_model_states.pt (DeepSpeed)"
        )
    return _weights(tensors_in(paths))


# -- weights alone


def _weights_of_file(path: Path) -> ForeignCheckpoint:
    if path.suffix == SUFFIX:
        return _weights(tensors_in([path]))
    state = _load(path)
    tensors = {str(name): value for name, value in state.items() if isinstance(value, Tensor)}
    if not tensors:
        raise CheckpointError(f"{path} is no state dict of weights: it has no tensors by name")
    found = ForeignCheckpoint()
    for name, value in tensors.items():
        found.add_weight(name, _here(name, value))
    return found


def _of_index(folder: Path) -> ForeignCheckpoint:
    """A folder of Hugging Face's whose index says which file has which tensor: other files are not the model's."""
    index = folder / INDEX
    try:
        files: dict[str, str] = {
            str(name): str(file) for name, file in json.loads(index.read_bytes())["weight_map"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is damaged, or no index of safetensors files: {error!r}") from None
    names = sorted({*files.values()})
    # The names come from a file: they must not lead anywhere else.
    missing = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing[:5])}, of which {INDEX} says that weights are in them"
        )
    found: dict[str, StoredTensor] = {}
    for file in names:
        its = tensors_in([folder / file])
        wanted = [name for name, where in files.items() if where == file]
        lacking = sorted({*wanted} - {*its})
        if lacking:
            raise CheckpointError(f"{folder / file} lacks {', '.join(lacking[:5])}, which {INDEX} says to be in it")
        found |= {name: its[name] for name in wanted}
    return _weights(found)


_SHARD = re.compile(rf"(.+)-\d{{5}}-of-(\d{{5}}){re.escape(SUFFIX)}")


def _refuse_missing_shards(folder: Path, paths: Sequence[Path]) -> None:
    """Files that say of how many they are one: all of them must be there, if there is no index."""
    numbered = [match for path in paths if (match := _SHARD.fullmatch(path.name))]
    for stem, count in sorted({(match[1], match[2]) for match in numbered}):
        wanted = [f"{stem}-{number:05d}-of-{count}{SUFFIX}" for number in range(1, int(count) + 1)]
        missing = [name for name in wanted if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder} lacks {', '.join(missing[:5])}: it has {len(numbered)} of {int(count)} files"
            )


def _weights(stored: Mapping[str, StoredTensor]) -> ForeignCheckpoint:
    found = ForeignCheckpoint()
    for name, each in stored.items():
        if (missing := each.missing()) < 0:
            files = ", ".join(sorted({part.path.name for part in each.parts}))
            raise CheckpointError(
                f"there are two tensors of the name {name!r}, in {files}: name one of the files, or give the folder "
                f"a {INDEX}"
            )
        if missing:
            raise CheckpointError(f"the files lack {missing} elements of {name!r}: a file of the folder is missing")
        found.add_weight(name, ForeignTensor(each.shape, each.dtype, partial(_read, each)))
    return found


def _read(stored: StoredTensor, crc32_of: Mapping[Path, Mapping[str, int]] | None = None) -> Tensor:
    with OpenFiles(crc32_of) as files:
        return stored.whole(files)


def _here(name: str, value: Tensor) -> ForeignTensor:
    _refuse_sparse(name, value.layout)
    return ForeignTensor(tuple(value.shape), value.dtype, lambda: value)


def _refuse_sparse(name: str, layout: torch.layout) -> None:
    if layout is not torch.strided:
        raise CheckpointError(
            f"{name} is a sparse tensor ({layout}), which safetensors files cannot hold: to_dense() it"
        )


# -- DeepSpeed


class _StandIn:
    """Takes the place of a class of DeepSpeed's in a file. It keeps what it is given, and does nothing."""

    def __new__(cls, *arguments: Any) -> _StandIn:
        made = super().__new__(cls)
        made.arguments = arguments  # type: ignore[attr-defined]
        return made

    def __init__(self, *_: Any) -> None: ...


_STAND_INS = [
    (_StandIn, f"deepspeed.{name}")
    for name in (
        "runtime.fp16.loss_scaler.LossScaler",
        "runtime.fp16.loss_scaler.DynamicLossScaler",
        "runtime.zero.config.ZeroStageEnum",
        "utils.tensor_fragment.fragment_address",
    )
]
_LEGACY = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."  # with which such files begin: a pickled magic number
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)")


def _load(path: Path) -> Any:
    """What `torch.save` has written, mapped. Raises CheckpointError for a file that cannot be read without its code."""
    try:
        with torch.serialization.safe_globals(_STAND_INS):  # type: ignore[arg-type]
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:GLOBAL|global:|class) ([\w.]+)", str(error))
        words = found[1] if found else str(error).splitlines()[0]
        raise CheckpointError(
            f"{path} holds objects that only their own code can read ({words}): convert it where that code is, such as "
            "with DeepSpeed's ds_to_universal"
        ) from None
    except (RuntimeError, ValueError, EOFError) as error:
        with open(path, "rb") as file:
            is_legacy = file.read(len(_LEGACY)) == _LEGACY
        if is_legacy:
            raise CheckpointError(
                f"{path} has the format of torch.save before torch 1.6 (_use_new_zipfile_serialization=False), which "
                "cannot be mapped: write it again with torch.save(torch.load(path, weights_only=True), path)"
            ) from None
        raise CheckpointError(f"{path} is damaged, or no file of torch.save: {str(error).splitlines()[0]}") from None


def _deepspeed_folder(path: Path) -> Path | None:
    """The folder of one step, if these are DeepSpeed's."""
    for latest in (path / name for name in ("latest", "latest_universal")):
        tag = latest.read_text().strip() if latest.is_file() else ""
        # The name comes from a file: it must not lead anywhere else.
        if tag and Path(tag).name == tag and any((path / tag).glob("*_model_states.pt")):
            return path / tag
    return path if any(path.glob("*_model_states.pt")) else None


def _divided(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: the model is divided by tensor parallelism, which gemini does not have")


def _by_rank(folder: Path, pattern: str) -> list[Path]:
    """The files of all data-parallel ranks, in their order."""
    found: dict[int, Path] = {}
    for path in folder.glob(pattern):
        numbers = _RANK.search(path.name)
        if numbers is None:
            continue
        if int(numbers[2]):
            raise _divided(path)
        found[int(numbers[1])] = path
    missing = sorted({*range(max(found, default=-1) + 1)} - {*found})
    if missing:
        raise CheckpointError(f"{folder} lacks the files {pattern} of ranks {', '.join(map(str, missing))}")
    return [found[rank] for rank in sorted(found)]


@dataclass
class _Pieces:
    """A flat tensor of which files have consecutive pieces, or that ranks have in parts of equal size."""

    pieces: Sequence[Tensor]

    def read(self, start: int, numel: int) -> Tensor:
        """(numel,) elements. Raises CheckpointError if there are fewer."""
        ends = [*accumulate(piece.numel() for piece in self.pieces)]
        found = [
            piece[max(0, start - (end - piece.numel())) : max(0, start + numel - (end - piece.numel()))]
            for piece, end in zip(self.pieces, ends, strict=True)
            if start < end and start + numel > end - piece.numel()
        ]
        if sum(each.numel() for each in found) != numel:
            raise CheckpointError(f"a flat tensor ends after {ends[-1] if ends else 0} elements: a file is damaged")
        return torch.cat(found) if found else torch.empty(0, device="cpu")


@dataclass
class _Place:
    """Where a parameter lies in a flat group: in one run, or in each rank's flat tensor a part."""

    shape: tuple[int, ...]
    start: int

    def read_run(self, flats: Sequence[Tensor]) -> Tensor:
        """Ranks have consecutive pieces of the group (ZeRO-1 and 2)."""
        return _Pieces(flats).read(self.start, prod(self.shape)).view(self.shape)

    def read_parts(self, flats: Sequence[Sequence[Tensor]]) -> Tensor:
        """Each rank has an equal part of each parameter, the last one padded (ZeRO-3)."""
        numel = prod(self.shape)
        part = -(-numel // len(flats))
        return torch.cat([_Pieces(each).read(self.start, part) for each in flats])[:numel].view(self.shape)


class _ZeroFolder:
    """One step's folder of DeepSpeed's, as it is read."""

    def __init__(self, folder: Path) -> None:
        """Raises CheckpointError if it is of no ZeRO training, or divided by tensor parallelism."""
        paths = _by_rank(folder, "zero_pp_rank_*_model_states.pt") or sorted(folder.glob("mp_rank_*_model_states.pt"))
        if len(paths) > 1 and paths[0].name.startswith("mp_rank"):
            raise _divided(folder)
        self._folder = folder
        self._models = [_load(path) for path in paths]  # of each rank, or one
        self._model = model = self._models[0]
        if not isinstance(model.get("module"), Mapping) or "param_shapes" not in model:
            raise CheckpointError(f"{paths[0]} is not of a ZeRO training: it has no 'param_shapes'")
        self._shapes = [{name: tuple(shape) for name, shape in group.items()} for group in model["param_shapes"]]
        self._shared: dict[str, str] = dict(model.get("shared_params") or {})
        self._found = ForeignCheckpoint()
        self._states: dict[str, list[str]] = {}  # by parameter, as are the steps
        self._steps: dict[str, int] = {}

    def read(self) -> ForeignCheckpoint:
        """What is in it. Raises CheckpointError."""
        zero = self._folder / "zero"
        groups = self._add_universal(zero) if zero.is_dir() else self._add_zero()
        named = [{**group, "params": [*names]} for group, names in zip(groups, self._shapes, strict=False)]
        self._found.optimizer = _optimizer(named, self._states, self._steps)
        self._add_frozen()
        for name in self._model.get("buffer_names") or ():
            self._found.add_buffer(name, self._model["module"][name])
        return self._found

    def _add(self, name: str, tensor: ForeignTensor, is_trained: bool = True) -> None:
        own = self._model["module"].get(name)
        dtype = own.dtype if isinstance(own, Tensor) else None
        aliases = [alias for alias, first in self._shared.items() if first == name]
        self._found.add_weight(name, tensor, dtype, is_trained, aliases)

    def _add_states(self, name: str, shape: tuple[int, ...], reads: Mapping[str, Callable[[], Tensor]]) -> None:
        for state, read in reads.items():
            self._found.add(state_key(name, state), ForeignTensor(shape, torch.float32, read))
        self._states[name] = list(reads)

    def _note_step(self, name: str, entry: Mapping[str, Any] | None, group: Mapping[str, Any]) -> None:
        step = (entry or {}).get("step", group.get("step"))
        taken = self._model.get("global_steps", 0) - self._model.get("skipped_steps", 0)
        self._steps[name] = int(taken if step is None else step)

    def _add_frozen(self) -> None:
        """Parameters that were not trained: whole in each file, or in parts (ZeRO-3)."""
        others = {*self._steps, *self._shared, *(self._model.get("buffer_names") or ())}
        shapes = self._model.get("frozen_param_shapes") or {}
        for name, value in self._model["module"].items():
            if name in others or not isinstance(value, Tensor):
                continue
            tensor = _here(name, value)
            if name in shapes and value.shape != shapes[name]:
                place = _Place(tuple(shapes[name]), 0)
                parts = [[each["frozen_param_fragments"][name].reshape(-1)] for each in self._models]
                tensor = ForeignTensor(place.shape, value.dtype, partial(place.read_parts, parts))
            self._add(name, tensor, is_trained=False)

    def _add_zero(self) -> list[dict[str, Any]]:
        """Masters and states of ZeRO-1, 2 and 3. Returns the param groups."""
        folder = self._folder
        paths = _by_rank(folder, "*zero_pp_rank_*_optim_states.pt")
        if not paths:
            raise CheckpointError(
                f"{folder} has no *_optim_states.pt: its weights were saved without masters and states"
            )
        ranks = [_load(path)["optimizer_state_dict"] for path in paths]
        saved_by = ranks[0].get("partition_count", len(ranks))
        saved_by = max(saved_by) if isinstance(saved_by, (list, tuple)) else saved_by
        if saved_by != len(ranks):
            raise CheckpointError(f"{folder} was saved by {saved_by} ranks, and has the files of {len(ranks)}")
        in_runs = "single_partition_of_fp32_groups" in ranks[0]
        bases = [rank["base_optimizer_state" if in_runs else "optimizer_state_dict"] for rank in ranks]
        if any(not isinstance(base, Mapping) for base in bases):
            raise CheckpointError(
                f"{folder} has 'elastic' optimizer states without their order: convert it with DeepSpeed's "
                "ds_to_universal"
            )
        groups: list[dict[str, Any]] = bases[0]["param_groups"]
        (self._add_runs if in_runs else self._add_parts)(ranks, [base["state"] for base in bases], groups)
        return groups

    def _add_runs(self, ranks: Sequence[Any], states: Sequence[Any], groups: Sequence[Any]) -> None:
        """ZeRO-1 and 2: each rank has a run of each group's flat tensor."""
        paddings = ranks[0].get("param_alignment_paddings")
        for number, (group, shapes) in enumerate(zip(groups, self._shapes, strict=True)):
            key, start = group["params"][0], 0
            flats = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
            its = {name: [state[key][name] for state in states] for name in _flat(states[0].get(key))}
            for index, (name, shape) in enumerate(shapes.items()):
                read = _Place(shape, start).read_run
                self._add(name, ForeignTensor(shape, torch.float32, partial(read, flats)))
                self._add_states(name, shape, {state: partial(read, parts) for state, parts in its.items()})
                self._note_step(name, states[0].get(key), group)
                start += prod(shape) + (paddings[number][index] if paddings else 0)

    def _add_parts(self, ranks: Sequence[Any], states: Sequence[Any], groups: Sequence[Any]) -> None:
        """ZeRO-3: each rank has a part of each parameter, all groups one behind the other."""
        keys, start = sorted(states[0]), 0
        first = states[0][keys[0]] if keys else None
        flats = [rank["fp32_flat_groups"] for rank in ranks]
        its = {name: [[state[key][name] for key in keys] for state in states] for name in _flat(first)}
        for group, shapes in zip(groups, self._shapes, strict=True):
            for name, shape in shapes.items():
                read = _Place(shape, start).read_parts
                self._add(name, ForeignTensor(shape, torch.float32, partial(read, flats)))
                self._add_states(name, shape, {state: partial(read, parts) for state, parts in its.items()})
                self._note_step(name, first, group)
                start += -(-prod(shape) // len(ranks))

    def _add_universal(self, folder: Path) -> list[dict[str, Any]]:
        """A universal checkpoint has a folder for each parameter, and a file for each state. Returns the groups."""
        rest = folder / "optimizer_state.pt"
        state = _load(rest) if rest.is_file() else {}
        base = state.get("optimizer_state_dict") or state.get("base_optimizer_state") or state
        groups: list[dict[str, Any]] = (
            base.get("param_groups") or state.get("param_groups") or [{} for _ in self._shapes]
        )
        entry = next(iter(base.get("state", {}).values()), None)
        for group, shapes in zip(groups, self._shapes, strict=False):
            for name, shape in shapes.items():
                its = folder / name
                if not (its / "fp32.pt").is_file():
                    raise CheckpointError(f"{folder} lacks {name}/fp32.pt: it is not complete")
                paths = {path.stem: path for path in sorted(its.glob("*.pt"))}
                reads = {stem: partial(_of_universal, path, shape) for stem, path in paths.items()}
                self._add(name, ForeignTensor(shape, torch.float32, reads.pop("fp32")))
                has_step = reads.pop("step", None) is not None
                self._add_states(name, shape, reads)
                self._note_step(name, {"step": _load(paths["step"])} if has_step else entry, group)
        return groups


def _of_universal(path: Path, shape: tuple[int, ...]) -> Tensor:
    value = _load(path)
    value = value["param"] if isinstance(value, Mapping) else value
    if value.numel() != prod(shape):
        raise CheckpointError(f"{path} has {value.numel()} elements, {prod(shape)} were expected")
    return value.reshape(shape)  # type: ignore[no-any-return]


def _flat(entry: Mapping[str, Any] | None) -> list[str]:
    """The states of a parameter, or of a group, that have an element for each of its own."""
    return [name for name, value in (entry or {}).items() if isinstance(value, Tensor) and value.dim() > 0]


def _optimizer(
    groups: Sequence[Mapping[str, Any]], states: dict[str, list[str]], steps: Mapping[str, int]
) -> OptimizerFact:
    settings = [{name: group[name] for name in _SETTINGS if name in group} for group in groups]
    return OptimizerFact(
        kind="of another library",
        num_steps=max(steps.values(), default=0),
        groups=[
            {**encode(its, f"param group {number}"), "params": group["params"]}
            for number, (its, group) in enumerate(zip(settings, groups, strict=True))
        ],
        states={name: its for name, its in states.items() if its},
        # As torch has it; our own optimizers make a number of it.
        scalars={name: encode({"step": torch.tensor(float(step), device="cpu")}, name) for name, step in steps.items()},
    )


# -- torch.distributed.checkpoint


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata: its classes, and torch's sizes, dtypes and layouts. Everything else is refused."""

    _SAFE = {
        ("torch", "Size"),
        ("torch", "device"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
    }
    _OF_DCP = ("metadata", "filesystem")

    def find_class(self, module: str, name: str) -> Any:
        parts = module.split(".")
        is_metadata = parts[:3] == ["torch", "distributed", "checkpoint"] and parts[-1] in self._OF_DCP
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." in name or not (is_metadata or is_dtype or (module, name) in self._SAFE):
            raise pickle.UnpicklingError(f"{module}.{name}")
        found = super().find_class(module, name)
        if is_metadata and not (isinstance(found, type) and found.__module__ == module):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return found


class _SafeReader(FileSystemReader):
    """DCP's reader of files, which unpickles metadata with all that a pickle can do; this one does not."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            found = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except Exception as error:  # a pickle that is damaged may raise anything
            raise CheckpointError(
                f"{path} is damaged, or no metadata of torch.distributed.checkpoint: {error}"
            ) from None
        if not isinstance(found, Metadata):
            raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint")
        return found


class _SafePlanner(DefaultLoadPlanner):
    """Reads plain values with `weights_only=True`, and tensors as DCP does."""

    def __init__(self) -> None:
        super().__init__()
        self.plain: dict[str, Any] = {}

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.plain[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


# [Note: Names in DCP's files] A key such as "model.model.norm.weight" does not say which "model" is the dict that the
# script saved, and which is a child of the module. The metadata has the path of each key through the nested dicts:
# ("model", "model.norm.weight"). The first dict with one of these names holds the state, all behind it is the name.

_OPTIMIZERS = ("optim", "optimizer", "optimizer_state", "optim_state")
_MODELS = ("model", "module", "state_dict")
_STATE = re.compile(r"state\.(.+)\.([^.]+)\Z")
_GROUP = re.compile(r"param_groups\.(.+)\.([^.]+)\Z")
_DDP = "module."  # in front of all names of a module that DistributedDataParallel has wrapped


def _places_of_dcp(metadata: Metadata) -> dict[str, tuple[bool, str]]:
    """Of each key: whether it is in an optimizer's state dict, and its name there. See [Note: Names in DCP's files]."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    keys = list(metadata.state_dict_metadata)
    if not all(key in paths for key in keys):
        paths = _guessed_paths(keys)
    return {key: _place_of(tuple(map(str, paths[key]))) for key in keys}


def _place_of(path: tuple[str, ...]) -> tuple[bool, str]:
    for number, each in enumerate(path[:-1]):
        rest = ".".join(path[number + 1 :])
        if each in _MODELS:
            return False, rest
        if each in _OPTIMIZERS and (_STATE.match(rest) or _GROUP.match(rest)):
            return True, rest
    return False, ".".join(path)


def _guessed_paths(keys: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Paths for files of other writers, which have none: dicts are what the keys of all weights have in common."""
    found: dict[str, tuple[str, ...]] = {}
    weights: dict[str, list[str]] = {}
    for key in keys:
        parts = key.split(".")
        if _place_of(tuple(parts))[0]:
            found[key] = tuple(parts)
        else:
            weights[key] = parts
    dicts = sorted(parts[:-1] for parts in weights.values())
    # Of sorted lists the first and the last have in common what all have.
    pairs = zip(dicts[0], dicts[-1], strict=False) if dicts else ()
    common = [one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    depth = next((number + 1 for number, each in enumerate(common) if each in _MODELS), 0)
    return found | {key: (*parts[:depth], ".".join(parts[depth:])) for key, parts in weights.items()}


def _of_dcp(path: Path) -> ForeignCheckpoint:
    metadata = _SafeReader(path).read_metadata()
    stored_in = {str(each.relative_path) for each in (metadata.storage_data or {}).values()}
    missing = sorted(name for name in stored_in if not (path / name).is_file())
    if missing:
        raise CheckpointError(
            f"{path} lacks {', '.join(missing[:5])}, of which its .metadata says that tensors are there"
        )
    every = metadata.state_dict_metadata
    tensors = {key: its for key, its in every.items() if isinstance(its, TensorStorageMetadata)}
    places = _places_of_dcp(metadata)
    weights = [places[key][1] for key in tensors if not places[key][0]]
    wrapped = _DDP if weights and all(name.startswith(_DDP) for name in weights) else ""
    found = ForeignCheckpoint()
    states: dict[str, list[str]] = {}
    scalars: dict[str, str] = {}
    for key, its in tensors.items():
        shape, dtype = tuple(its.size), its.properties.dtype
        _refuse_sparse(key, its.properties.layout)
        tensor = ForeignTensor(shape, dtype, partial(_read_dcp, path, key, shape, dtype))
        is_state, name = places[key]
        state = _STATE.match(name) if is_state else None
        if state is not None and state[2] == "step":
            scalars[state[1]] = key
        elif state is not None:
            states.setdefault(state[1], []).append(state[2])
            found.add(state_key(state[1], state[2]), tensor)
        else:
            found.add_weight(name.removeprefix(wrapped), tensor)
    if states or scalars:
        steps = {name: int(_read_dcp(path, key, (), torch.float32)) for name, key in scalars.items()}
        trained = list(dict.fromkeys([*steps, *states]))
        groups_in = {key: match for key in every if key not in tensors if (match := _GROUP.match(places[key][1]))}
        groups = _groups_of_dcp(path, groups_in, trained)
        found.optimizer = _optimizer(groups, states, {name: steps.get(name, 0) for name in trained})
        found.note_trained({*trained})
    return found


def _read_dcp(path: Path, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    state = {key: torch.empty(shape, dtype=dtype, device="cpu")}
    load_dcp(state, storage_reader=_SafeReader(path), planner=_SafePlanner(), no_dist=True)
    return state[key]


def _groups_of_dcp(path: Path, matches: Mapping[str, re.Match[str]], trained: Sequence[str]) -> list[dict[str, Any]]:
    """The param groups. DCP has a value for each setting of each group, or of each parameter by its name."""
    planner = _SafePlanner()
    if matches:
        load_dcp(dict.fromkeys(matches), storage_reader=_SafeReader(path), planner=planner, no_dist=True)
    found: dict[str, dict[str, Any]] = {}
    for key, match in matches.items():
        found.setdefault(match[1], {})[match[2]] = planner.plain[key]
    if all(number.isdigit() and isinstance(its.get("params"), list) for number, its in found.items()) and found:
        return [found[number] for number in sorted(found, key=int)]
    groups: list[dict[str, Any]] = []
    for name in trained:
        settings = {key: value for key, value in found.get(name, {}).items() if key != "params"}
        same = [group for group in groups if {**group, "params": None} == {**settings, "params": None}]
        if same:
            same[0]["params"].append(name)
        else:
            groups.append({**settings, "params": [name]})
    return groups


# -- whole weights out of any of them


def fp32_weights(
    directory: str | os.PathLike[str], tag: str | None = None, only_trained: bool = False
) -> Iterator[tuple[str, Tensor]]:
    """Weights and buffers of a checkpoint of ours or of another library, under each of their names. Local.

    Floating-point ones are in fp32. only_trained: without parameters that were not trained. Raises CheckpointError and
    OSError.
    """
    given = read_ours(directory, tag) if is_ours(directory, tag) else read_foreign(Path(directory, tag or ""))
    parameters = [fact for fact in given.parameters if fact.trained or not only_trained]
    for fact in (*parameters, *given.buffers):
        value = given.tensors[WEIGHT + fact.name].read()
        value = value.float() if value.is_floating_point() else value
        for name in (fact.name, *fact.aliases):
            yield name, value


def is_ours(directory: str | os.PathLike[str], tag: str | None = None) -> bool:
    """Whether it is a directory of our checkpoints, or one of them."""
    return any(Path(directory).glob(f"{tag or '*'}/{MANIFEST}")) or Path(directory, MANIFEST).is_file()


def read_ours(directory: str | os.PathLike[str], tag: str | None = None) -> ForeignCheckpoint:
    """The weights of a checkpoint of ours, each compared with its checksum as it is read.

    Raises CheckpointError and OSError.
    """
    source = SavedCheckpoint(Directory(directory).find(tag))
    stored = {key: each for key, each in source.tensors.items() if key.startswith(WEIGHT)}
    with source.checked_files() as files:
        crc32_of = files.crc32
    tensors = {
        key: ForeignTensor(each.shape, each.dtype, partial(_read, each, crc32_of)) for key, each in stored.items()
    }
    return ForeignCheckpoint(tensors, source.manifest.parameters, source.manifest.buffers)
