"""Stand-ins for a machine with NVIDIA devices: NVML with its own errors, and torch's account of one device."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml
import torch

from gemini.monitor.device import AllocatorBytes

GIB = 2**30
UUID = "5c1b0e52-9f0a-11ee-8c90-0242ac120002"


@dataclass
class Device:
    """One device, or a MIG instance, as the driver sees it."""

    total: int = 80 * GIB
    used: int = 0
    processes: dict[int, int | None] = field(default_factory=dict)  # pid -> bytes, None where the driver hides them


class FakeNvml:
    """The part of `pynvml` that is asked for. Devices by UUID; the numbers of another order are no part of it."""

    NVMLError = pynvml.NVMLError

    def __init__(self, devices: dict[str, Device], failing: dict[str, type[Exception]] | None = None) -> None:
        """failing: functions that raise, by name."""
        self.devices = devices
        self.failing = failing or {}
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failing:
            raise self.failing[name]()

    def nvmlInit(self) -> None:
        self._called("nvmlInit")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Device:
        self._called("nvmlDeviceGetHandleByUUID")
        if uuid not in self.devices:
            raise pynvml.NVMLError_NotFound()
        return self.devices[uuid]

    def nvmlDeviceGetMemoryInfo(self, device: Device) -> Any:
        self._called("nvmlDeviceGetMemoryInfo")
        return SimpleNamespace(total=device.total, used=device.used, free=device.total - device.used)

    def nvmlDeviceGetComputeRunningProcesses(self, device: Device) -> Sequence[Any]:
        self._called("nvmlDeviceGetComputeRunningProcesses")
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in device.processes.items()]


class FakeRuntime:
    """torch's account of cuda:0. `peaks` are what the allocator will say, one after each reset."""

    def __init__(self, seen: Device, uuid: str = UUID, allocated: int = 0, reserved: int = 0) -> None:
        self.device = torch.device("cuda", 0)
        self.seen = seen
        self.uuid = uuid
        self.allocated, self.reserved = allocated, reserved
        self.is_used = True
        self.limit_bytes: int | None = None  # of this process, as MPS puts it
        self.peaks: list[int] = []

    def uuids(self) -> list[str]:
        return [f"MIG-{self.uuid}", f"GPU-{self.uuid}"]

    def total_bytes(self) -> int:
        return self.seen.total - self.seen.total // 100  # less what the driver keeps

    def has_context(self) -> bool:
        return self.is_used

    def free_and_total(self) -> tuple[int, int]:
        assert self.is_used, "this would make a context"
        free = self.seen.total - self.seen.used
        return (free if self.limit_bytes is None else min(free, self.limit_bytes)), self.total_bytes()

    def allocator(self) -> AllocatorBytes:
        return AllocatorBytes(self.allocated, self.reserved, 0, self.peaks[0] if self.peaks else self.allocated)

    def reset_peak(self) -> None:
        self.peaks = self.peaks[1:]


OWN = os.getpid()
