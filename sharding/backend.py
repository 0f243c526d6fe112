"""The backends of a process group by device, and torch's name for an all-gather."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, in whichever form `init_process_group` got it: "gloo", "cpu:gloo,cuda:nccl", none."""
    pairs = dist.get_backend_config(group).split(",")
    return {device: backend for device, _, backend in (pair.partition(":") for pair in pairs)}


def check_backend(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raises ValueError if the group cannot carry tensors of `device`."""
    found = backends(group)
    if device.type not in found:
        words = ",".join(f"{kind}:{backend}" for kind, backend in found.items())
        raise ValueError(
            f"the process group has no backend for tensors on {device.type!r}, only {words}: call "
            "init_process_group() without a backend, or name one for each device, such as 'cpu:gloo,cuda:nccl'"
        )


def control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """The device on which small control messages travel: the CPU if the group can, else `device`."""
    return torch.device("cpu") if "cpu" in backends(group) else device


def start_gather(own: Tensor, every: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """Start an all-gather of every rank's `own`, all of one size, into `every`."""
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.11's name
    work: dist.Work = gather(every, own, group=group, async_op=True)
    return work
