"""`deepspeed.comm`: joining the ranks, and the collectives of torch.distributed under its name.

A process that no launcher has started is the only rank, and needs no process group: what scripts call most answers for
it, as it does where DeepSpeed makes a group of one. Everything else is `torch.distributed`'s.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gemini.elsewhere import missing
from gemini.launch import launch_from_torch, rank_on_machine
from optim.adam import refuse_unknown_arguments

_BY_ENVIRONMENT = (
    "auto_mpi_discovery",
    "distributed_port",
    "verbose",
    "init_method",
    "config",
    "rank",
    "world_size",
    "mesh_device",
)


def init_distributed(
    dist_backend: str | None = None,
    *,
    timeout: timedelta = timedelta(minutes=10),
    dist_init_required: bool | None = None,
    **without_effect: Any,
) -> None:
    """Join the ranks that a launcher has started, unless a process group exists already. Collective.

    Args:
        dist_backend: as in `launch_from_torch`.
        timeout: after which a rank that does not answer counts as lost.
        dist_init_required: False does nothing.
        without_effect: DeepSpeed's other arguments: torchrun's environment says what they say.

    Raises TypeError for a name that DeepSpeed does not know either.
    """
    refuse_unknown_arguments(
        "init_distributed",
        [name for name in without_effect if name not in _BY_ENVIRONMENT],
        ["dist_backend", "timeout", "dist_init_required", *_BY_ENVIRONMENT],
    )
    # As with DeepSpeed, random numbers are left to the script: no seed.
    if dist_init_required is not False and not dist.is_initialized():
        launch_from_torch(backend=dist_backend, seed=None, rank_timeout=timeout.total_seconds())


def get_rank(group: dist.ProcessGroup | None = None) -> int:
    """This rank's number in the group; 0 without a process group. Local."""
    return dist.get_rank(group) if dist.is_initialized() else 0


def get_world_size(group: dist.ProcessGroup | None = None) -> int:
    """The number of ranks in the group; 1 without a process group. Local."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def get_local_rank() -> int:
    """This rank's number among those of its machine, as the launcher counts them; 0 without one. Local."""
    return rank_on_machine()


def barrier(group: dist.ProcessGroup | None = None, **options: Any) -> Any:
    """As `torch.distributed.barrier`. Collective; one rank does not wait."""
    return dist.barrier(group, **options) if dist.is_initialized() else None


def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
    """As `torch.distributed.all_reduce`. Collective; of one rank every reduction is the tensor itself."""
    return dist.all_reduce(tensor, *args, **options) if dist.is_initialized() else None


def broadcast(tensor: Tensor, *args: Any, **options: Any) -> Any:
    """As `torch.distributed.broadcast`. Collective; one rank keeps its tensor."""
    return dist.broadcast(tensor, *args, **options) if dist.is_initialized() else None


def __getattr__(name: str) -> Any:
    """Everything else of `torch.distributed`."""
    if name.startswith("_") or not hasattr(dist, name):
        raise missing(__name__, name, "torch.distributed has the collectives")
    return getattr(dist, name)
