"""Tensors of state dicts as `DTensor`s, of which each rank keeps its rows: `model.sharded_state_dicts()`.

Chunks are flat, and a rank's shard of one begins and ends anywhere in a tensor, which no placement of a `DTensor` can
say. So a chunk is gathered whole, as for a state dict of wholes, and each rank keeps a copy of its rows of each tensor:
Shard(0) over all ranks of the data, as FSDP2's tensors are laid out. What tensor parallelism divides is divided by that
first, and then by rows: the mesh has the dimensions of the parts before that of the data.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.ranks.parts import PartsGroup, TensorPart

_DATA = "data"


class RowShards:
    """Cuts tensors into rows, and makes `DTensor`s of them. Collective to make, over all ranks of all parts."""

    def __init__(self, group: dist.ProcessGroup | None, parts: PartsGroup | None, device_type: str) -> None:
        """group: the ranks of the data, which have equal parts of tensors. parts: the ranks of the other parts.

        Without a group all rows are this process's, as plain tensors: there are no `DTensor`s then.
        """
        self._group, self._device_type = group, device_type
        self._rank, self._world_size = (0, 1) if group is None else (group.rank(), group.size())
        own = [] if group is None else dist.get_process_group_ranks(group)
        every = [json.dumps(own).encode()] if parts is None else _of_parts(parts, own)
        self._ranks: list[list[int]] = [json.loads(words) for words in every]  # of the data, part by part
        self._meshes: dict[Any, Any] = {}  # by the mesh of the parts; None: there are none

    def rows(self, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that all ranks of the data have, as a view. Without dimensions: all of it."""
        if whole.dim() == 0:
            return whole
        # As Shard(0) divides: all parts but the last ones have the same number of rows, and the last may have none.
        size = -(-len(whole) // self._world_size)
        return whole[self._rank * size : (self._rank + 1) * size]

    def shown(self, rows: Tensor, part: TensorPart | None, shape: torch.Size) -> Tensor:
        """A `DTensor` over this rank's rows, of a tensor with `shape` in all. Shares the memory of `rows`. Local.

        `rows` themselves if the tensor has no dimensions.
        """
        if self._group is None or not shape:
            return rows
        from torch.distributed.tensor import DTensor, Shard
        from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

        layout = None if part is None else part.layout
        mesh = self._mesh_of(None if layout is None else layout.mesh)
        placements = (Shard(0),) if layout is None else (*layout.placements, Shard(0))
        strides = torch.empty(shape, device="meta").stride()
        # Not `DTensor.from_local`, which would move rows in host memory to the mesh's device.
        spec = DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, strides, rows.dtype))
        make: Any = DTensor
        shown: Tensor = make(rows, spec, requires_grad=False)
        return shown

    def _mesh_of(self, over: Any) -> Any:
        """The mesh of the data, or that of the mesh `over` of a tensor's parts and the data."""
        from torch.distributed.device_mesh import DeviceMesh

        assert self._group is not None
        if over not in self._meshes:
            if over is None:
                names: tuple[str, ...] = (_DATA,)
                self._meshes[over] = DeviceMesh.from_group(self._group, self._device_type, mesh_dim_names=names)
            else:
                names = (*(over.mesh_dim_names or (f"parts{each}" for each in range(over.ndim))), _DATA)
                table = torch.tensor(self._ranks, device="cpu").view(*over.shape, self._world_size)
                groups = [*over.get_all_groups(), self._group]
                self._meshes[over] = DeviceMesh.from_group(groups, self._device_type, table, mesh_dim_names=names)
        return self._meshes[over]


def _of_parts(parts: PartsGroup, own: list[int]) -> list[bytes]:
    return parts.all_gather_lists([json.dumps(own).encode()])
