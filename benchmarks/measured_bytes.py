"""Bytes that a process holds, measured from outside the library: live tensor storages, and what the system counts.

Nothing here knows a plan or a ledger: one figure comes from Python's garbage collector, the other from the kernel.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SMAPS = Path("/proc/self/smaps_rollup")
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
"""glibc settings for a process whose resident bytes are to mean something: what is freed goes back to the system."""


class HeldBytes(NamedTuple):
    """At one moment of one process."""

    storages: int
    """Distinct storages of all tensors that are alive."""
    resident: int
    """Anonymous and shared memory in RAM, pages shared with other processes divided among them; no files."""


def held_bytes() -> HeldBytes:
    """Now, after collecting garbage and returning free memory to the system."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
    return HeldBytes(storage_bytes(), resident_bytes())


def storage_bytes() -> int:
    """Every tensor that the garbage collector or a gradient reaches; storages by address, mapped files left out."""
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():  # or a parameter that is not there would be fetched
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor):
                _add(found, thing)
                if thing.is_leaf and thing.grad is not None:
                    _add(found, thing.grad)
    return sum(found.values())


def _add(found: dict[int, int], tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type == "meta" or is_traceable_wrapper_subclass(tensor):
        return  # a wrapper's tensors are found on their own
    storage = tensor.untyped_storage()
    try:
        address = storage.data_ptr()
    except RuntimeError:  # a fake or functional tensor of the compiler, which has no memory
        return
    if storage.filename is None:
        found[address] = max(found.get(address, 0), storage.nbytes())


def resident_bytes() -> int:
    """Of this process. Raises RuntimeError where the system does not say."""
    if not SMAPS.exists():
        raise RuntimeError(f"resident memory is read from {SMAPS}, which this system does not have")
    kilobytes = {}
    for line in SMAPS.read_text().splitlines()[1:]:
        name, _, rest = line.partition(":")
        kilobytes[name] = int(rest.split()[0])
    return 1024 * (kilobytes["Pss_Anon"] + kilobytes.get("Pss_Shmem", 0))
