"""The ranks of one model as a mesh: replicas of shards (HSDP). A mesh of one row is a process group.

Each row is a group of ranks that hold a model's shards once; ranks of one column hold the same shard. Chunks are
gathered within a row. A gradient is reduced within its row, and then over its column. Whatever ranks agree on concerns
all of them, which have a group of their own.
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
        secondary: so many consecutive ranks of a row hold a second copy of the weights. None: there is none.
    """

    group: dist.ProcessGroup | None
    rows: Rows
    secondary: int | None = None

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
        plain = RankMesh.of(self.group)
        plain = replace(plain, secondary=settings.secondary_group_size)
        if settings.shard_group_size is None:
            return plain, settings
        if len(self.rows) > 1:
            return replace(self, secondary=settings.secondary_group_size), settings
        return replace(plain, rows=_cut(plain.rows, size)), settings

    @property
    def nearby(self) -> Rows:
        """The groups of ranks that hold a second copy of the weights: parts of the rows. None, if there is none."""
        return () if self.secondary is None else _cut(self.rows, self.secondary)


def _cut(rows: Rows, size: int) -> Rows:
    return tuple(row[start : start + size] for row in rows for start in range(0, len(row), size))


def ranks_in(process_group: dist.ProcessGroup | None, device_mesh: Any = None) -> RankMesh:
    """The ranks that share a model: those of the mesh or of the group, else as `ranks_of(None)`. Collective.

    device_mesh: a `DeviceMesh` of one dimension, which is a group, or of two: the first replicates, the second shards.
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
    if device_mesh.ndim > 2:
        names = device_mesh.mesh_dim_names or ("replicate", "shard")
        raise UnsupportedError(
            f"a device_mesh has one dimension (shard) or two (replicate, shard), found {device_mesh.ndim}: give the "
            f"part over which this model is trained, such as mesh[{names[0]!r}, {names[1]!r}]"
        )
    if device_mesh.get_coordinate() is None:
        raise UnsupportedError(
            f"rank {dist.get_rank()} is not in the device_mesh {device_mesh}: wrap the model on its ranks"
        )
    table = device_mesh.mesh.tolist()
    rows: Rows = tuple(map(tuple, table)) if device_mesh.ndim == 2 else (tuple(table),)
    everyone = sorted(rank for row in rows for rank in row)
    if everyone == list(range(dist.get_world_size())):
        group = dist.group.WORLD
    else:
        group = (device_mesh if device_mesh.ndim == 1 else device_mesh._flatten()).get_group()
    return RankMesh(group, rows)
