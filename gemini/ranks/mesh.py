"""The ranks of one model as a mesh: replicas of shards (HSDP), and other dimensions that divide the model or its data.

A mesh of one row is a process group. Each row is a group of ranks that hold a model's shards once; ranks of one column
hold the same shard. Chunks are gathered within a row. A gradient is reduced within its row, and then over its column.
Whatever ranks agree on concerns all of them, which have a group of their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist

from gemini.errors import UnsupportedError
from gemini.launch import ranks_of
from gemini.settings import Settings

Rows = tuple[tuple[int, ...], ...]
"""Global ranks: a row for each replica, with a rank for each shard."""


@dataclass(frozen=True)
class RankMesh:
    """The ranks that train one model.

    Args:
        group: all of them. None: this process alone.
        rows: their division. One row: all ranks share the shards.
        parts: global ranks, with this one, that have the same data and other parts of the model's tensors (tensor
            parallelism). None of them is in `rows` but this one. Empty: there are no parts.
        stages: likewise, with those that have other layers (pipeline parallelism). Empty: those of `parts`.
        exchanges: groups in which the model itself, and not gemini, has collectives with the ranks of `parts`.
        secondary: so many consecutive ranks of a row hold a second copy of the weights. None: there is none.
        groups: the parts of the only row that share weights and gradients, where all ranks share optimizer states. The
            row is in the order of places in the groups, so that a group's part of a chunk is that of consecutive ranks.
    """

    group: dist.ProcessGroup | None
    rows: Rows
    parts: tuple[int, ...] = ()
    stages: tuple[int, ...] = ()
    exchanges: tuple[dist.ProcessGroup, ...] = ()
    secondary: int | None = None
    groups: Rows = ()

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> RankMesh:
        """All ranks of the group share the shards. Local."""
        return RankMesh(group, ((0,) if group is None else tuple(dist.get_process_group_ranks(group)),))

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.rows))

    def divided(self, settings: Settings) -> tuple[RankMesh, Settings]:
        """These ranks as the settings divide them, and the settings `over` them. Local.

        Raises ValueError if settings and mesh contradict each other, or the ranks cannot be divided so.
        """
        asked, its = settings.shard_group_size, len(self.rows[0])
        if len(self.rows) > 1 and asked not in (None, its):
            raise ValueError(
                f"shard_group_size={asked} contradicts a device_mesh of {len(self.rows)} replicas of {its} shards: "
                "leave one of the two out"
            )
        size = its if asked is None else asked
        settings = replace(settings, shard_group_size=size).over(self.world_size)
        plain = replace(self, rows=RankMesh.of(self.group).rows, secondary=settings.secondary_group_size)
        if settings.shard_group_size is None:
            return plain, settings
        if settings.num_in_group is not None:
            groups = self.rows if len(self.rows) > 1 else _cut(plain.rows, size)
            order = tuple(rank for column in zip(*groups, strict=True) for rank in column)
            return replace(plain, rows=(order,), groups=groups, secondary=None), settings
        if len(self.rows) > 1:
            return replace(self, secondary=settings.secondary_group_size), settings
        return replace(plain, rows=_cut(plain.rows, size)), settings

    @property
    def nearby(self) -> Rows:
        """The groups of ranks that hold a second copy of the weights: parts of the rows. None, if there is none."""
        if self.groups:
            return self.groups
        return () if self.secondary is None else _cut(self.rows, self.secondary)

    @property
    def across(self) -> Rows:
        """The ranks with one place in all groups, for each place. None, if optimizer states are over no more ranks."""
        return tuple(zip(*self.groups, strict=True))


def _cut(rows: Rows, size: int) -> Rows:
    return tuple(row[start : start + size] for row in rows for start in range(0, len(row), size))


# -- Dimensions by their names, as torchtitan, Accelerate and transformers call them.
#
# Without such names a mesh of two dimensions is (replicate, shard), as in FSDP2, and one of one dimension shards. Ranks
# of a sequence dimension have other tokens of one sequence and the same weights, so they share shards as ranks with
# other sequences do. Ranks of "tp" and "pp" have other weights: they share no shards with this one.


REPLICATE, SHARD = ("replicate", "dp_replicate"), ("shard", "dp_shard", "dp", "data", "fsdp")
SEQUENCE = ("cp", "sp", "context", "sequence", "ulysses")
TENSOR, STAGE = "tp", "pp"
_TELLING = {*SEQUENCE, TENSOR, STAGE}


def ranks_in(process_group: dist.ProcessGroup | None, device_mesh: Any = None) -> RankMesh:
    """The ranks that share a model: those of the mesh or of the group, else as `ranks_of(None)`. Collective.

    device_mesh: a `DeviceMesh` of one dimension, which is a group, or of two: the first replicates, the second shards.
        With names such as "dp", "cp", "tp" and "pp": see above.
    Raises TypeError, ValueError or UnsupportedError for another one, and what `ranks_of` raises.
    """
    if device_mesh is None:
        return RankMesh.of(ranks_of(process_group))
    if process_group is not None:
        raise ValueError("process_group and device_mesh both say which ranks share the model: give one of them")
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedError("a device_mesh needs a process group: call launch_from_torch() before it is made")
    from torch.distributed.device_mesh import DeviceMesh  # without distributed support torch has no such module

    if not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch DeviceMesh or None, found {type(device_mesh).__name__}")
    names = device_mesh.mesh_dim_names or ()
    if device_mesh.get_coordinate() is None:
        raise UnsupportedError(
            f"rank {dist.get_rank()} is not in the device_mesh {device_mesh}: wrap the model on its ranks"
        )
    if _TELLING.intersection(names) and device_mesh.ndim > 1:
        return _by_name(device_mesh, names)
    if device_mesh.ndim > 2:
        names = names or ("replicate", "shard")
        raise UnsupportedError(
            f"a device_mesh has one dimension (shard) or two (replicate, shard), found {device_mesh.ndim}: give the "
            f"part over which this model is trained, such as mesh[{names[0]!r}, {names[1]!r}], or name its dimensions: "
            f"{_names_in_words()}"
        )
    return _of_rows(device_mesh, device_mesh.ndim - 1)


def _by_name(device_mesh: Any, names: tuple[str, ...]) -> RankMesh:
    """The ranks of a mesh whose dimensions have names that say what they divide. Collective where it makes groups."""
    unknown = [name for name in names if name not in (*REPLICATE, *SHARD, *_TELLING)]
    replicating = tuple(name for name in names if name in REPLICATE)
    sharing = tuple(name for name in names if name in (*SHARD, *SEQUENCE))
    if unknown or not (replicating or sharing):
        what = f"unknown dimensions {', '.join(map(repr, unknown))}" if unknown else "no dimension for data"
        raise UnsupportedError(f"the device_mesh {names} has {what}: {_names_in_words()}")
    if names[: len(replicating)] != replicating and sharing:
        raise UnsupportedError(
            f"the device_mesh {names} must have {', '.join(replicating)} before the other dimensions"
        )
    data = _of_rows(device_mesh[(*replicating, *sharing)], len(replicating))
    own = dict(zip(names, device_mesh.get_coordinate(), strict=True))

    def along(*kept: str) -> tuple[int, ...]:
        place = tuple(slice(None) if name in kept else own[name] for name in names)
        found: list[int] = device_mesh.mesh[place].flatten().tolist()
        return tuple(found) if len(found) > 1 else ()

    exchanges = (device_mesh.get_group(TENSOR),) if TENSOR in names else ()
    return replace(
        data, parts=along(TENSOR), stages=along(STAGE, TENSOR) if STAGE in names else (), exchanges=exchanges
    )


def _names_in_words() -> str:
    kinds = (
        (f"{', '.join(REPLICATE)} (replicas)", f"{', '.join(SHARD)} (data)"),
        (f"{', '.join(SEQUENCE)} (tokens of a sequence)", f"{TENSOR} (parts of tensors)", f"{STAGE} (stages)"),
    )
    return "known names are " + "; ".join(each for its in kinds for each in its)


def _of_rows(device_mesh: Any, num_replicating: int) -> RankMesh:
    """The ranks of a mesh whose first dimensions replicate, and whose others shard. May make a group: collective."""
    table = device_mesh.mesh
    rows: Rows = tuple(map(tuple, table.reshape(table.shape[:num_replicating].numel(), -1).tolist()))
    everyone = sorted(rank for row in rows for rank in row)
    if everyone == list(range(dist.get_world_size())):
        group = dist.group.WORLD
    else:
        group = (device_mesh if device_mesh.ndim == 1 else device_mesh._flatten()).get_group()
    return RankMesh(group, rows)
