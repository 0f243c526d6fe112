"""Live memory statistics: what the machine has right now, read from the driver, the cgroup and the kernel."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import torch

_HOST_RESERVE = 0.1


def free_device_bytes(device: torch.device) -> int | None:
    """Bytes of `device` that are free or cached by this process; None on the CPU."""
    if device.type != "cuda":
        return None
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + cached)


def free_host_bytes() -> int:
    """Bytes of host memory for this rank: the cgroup's or the machine's free memory less a tenth, shared fairly."""
    available = int(psutil.virtual_memory().available)
    limit = _read_int(Path("/sys/fs/cgroup/memory.max"))
    used = _read_int(Path("/sys/fs/cgroup/memory.current"))
    if limit is not None and used is not None:
        available = min(available, limit - used)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(available * (1 - _HOST_RESERVE)) // max(1, local_ranks)


def _read_int(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
