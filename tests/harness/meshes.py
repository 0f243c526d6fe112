"""Meshes that outlive the cases of a rank process, for models with `DTensor`s.

torch keeps what it has found out about a `DTensor`'s operations by the mesh's shape and names, with the mesh in it. An
equal mesh of a later case gets it, too, and would look for process groups that have ended with the earlier case.
"""

import functools

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

kept_groups: set[dist.ProcessGroup] = set()
"""The groups of such meshes."""


@functools.cache
def kept_mesh(*shape: int, names: tuple[str, ...] = ("dp", "tp")) -> DeviceMesh:
    """A mesh of this process. Collective the first time."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    kept_groups.update(mesh.get_all_groups())
    return mesh
