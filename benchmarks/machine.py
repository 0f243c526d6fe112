"""What must be known of the machine to read a bandwidth: cores, last-level cache, page size policy, model."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil
import torch

CACHES = Path("/sys/devices/system/cpu")
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def physical_cores() -> int:
    """Cores that this process may use, hyperthreads not counted."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def thread_counts(most: int | None = None) -> list[int]:
    """1, 2, 4, ... and the number of physical cores."""
    most = most or physical_cores()
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def last_level_cache_bytes() -> int:
    """All last-level caches together. Raises RuntimeError where the system does not say."""
    found: dict[tuple[int, str], int] = {}  # (level, the CPUs that share it) -> bytes
    for size in CACHES.glob("cpu[0-9]*/cache/index[0-9]*/size"):
        text = size.read_text().strip()
        level = int((size.parent / "level").read_text())
        shared_by = (size.parent / "shared_cpu_list").read_text().strip()
        found[level, shared_by] = int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)
    if found:
        last = max(level for level, _ in found)
        return sum(num_bytes for (level, _), num_bytes in found.items() if level == last)
    name = "SC_LEVEL3_CACHE_SIZE"
    num_bytes = os.sysconf(name) if name in getattr(os, "sysconf_names", {}) else 0
    if num_bytes <= 0:
        raise RuntimeError("the system does not say how large the last-level cache is; give --cache-mib")
    return num_bytes


def describe() -> dict[str, Any]:
    """Facts for the JSON file."""
    huge_pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": _cpu_model(),
        "physical_cores": physical_cores(),
        "huge_pages": huge_pages.read_text().strip() if huge_pages.exists() else None,
        "load_average": os.getloadavg(),
        "torch": torch.__version__,
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
