"""`launch_from_torch`: joins the ranks that `torchrun` has started; one process alone needs nothing."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gemini.device import current_device
from gemini.dist_logger import get_dist_logger
from gemini.errors import UnsupportedError

_LEAVE_S = 20.0
_POLL_S = 0.02


def launch_from_torch(
    config: Mapping[str, Any] | None = None,
    *,
    backend: str | None = None,
    seed: int | None = 1024,
    rank_timeout: float = 600.0,
    verbose: bool = True,
) -> None:
    """Join the ranks that `torchrun` has started: make the process group, choose this rank's device, seed. Collective.

    A script that was started without torchrun is one rank: it is only seeded. When the script ends without an
    exception, the ranks leave together.

    Args:
        config: None or empty. Settings are arguments of `ShardedModel` and `ShardedOptimizer`.
        backend: for `init_process_group`. None: gloo on the CPU, and NCCL on CUDA devices if there are any.
        seed: for `torch.manual_seed`, the same on every rank. None leaves the random state as it is.
        rank_timeout: seconds after which a rank that does not answer counts as lost.
        verbose: whether rank 0 logs the number of ranks, the backend and the device.

    Raises UnsupportedError if `config` holds settings or a process group exists already, and RuntimeError if this
    machine has fewer devices than ranks.
    """
    if config:
        raise UnsupportedError(
            f"launch_from_torch(config=...) with {', '.join(map(str, config))}: give settings to ShardedModel(...) and "
            "ShardedOptimizer(...)"
        )
    if seed is not None:
        torch.manual_seed(seed)
    if not dist.is_torchelastic_launched():
        return
    if dist.is_initialized():
        raise UnsupportedError("launch_from_torch() after init_process_group(): one of them is enough")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    has_gpus = torch.accelerator.is_available()
    if has_gpus:
        torch.accelerator.set_device_index(_device_index(local_rank, torch.accelerator.device_count()))
    if backend is None:
        backend = "cpu:gloo,cuda:nccl" if has_gpus and current_device().type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=rank_timeout))
    atexit.register(_leave)
    if verbose:
        get_dist_logger().info(
            f"{dist.get_world_size()} ranks, {backend}, on {current_device()}; seed {seed}", ranks=[0]
        )


def _device_index(local_rank: int, num_devices: int) -> int:
    """This rank's device: its own, or the only one where a launcher shows every rank one GPU (SLURM)."""
    if num_devices == 1:
        return 0
    if local_rank >= num_devices:
        raise RuntimeError(
            f"local rank {local_rank} has no device: this machine has {num_devices}. Start torchrun with at most that "
            "many --nproc-per-node"
        )
    return local_rank


def _leave() -> None:
    """The end of the script: nobody closes connections that another rank still reads from."""
    if not dist.is_initialized() or getattr(sys, "last_value", None) is not None:
        return
    store = dist.distributed_c10d._get_default_store()
    deadline = time.monotonic() + _LEAVE_S
    try:
        left = store.add("gemini/left", 1)
        while left < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            left = store.add("gemini/left", 0)
        dist.destroy_process_group()
    except RuntimeError:  # the store's rank has ended first
        return
