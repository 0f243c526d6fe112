"""Readings of one device's memory: of a CUDA device from driver, runtime and allocator, or of an emulated one.

Nothing here waits for the device: allocators count on the host when tensors are made, and the driver only returns
numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch

from gemini.memory.devices import resolve_device
from gemini.memory.ledger import Ledger
from gemini.monitor.nvml import DriverReading, Nvml, driver_of_process
from gemini.monitor.peaks import BoundedMeter, PartMeter, PeakMeter, StorageMeter
from gemini.monitor.readings import DeviceReading
from gemini.settings import Device

# Its type is Any, because torch's stubs do not declare the private function that is read from it.
_cuda_bindings: Any = torch._C


@runtime_checkable
class DeviceSource(Protocol):
    """Where a monitor has a device's readings from.

    `counts_tensors`: a reading counts every tensor of this process on the device, and not model data alone.
    """

    @property
    def counts_tensors(self) -> bool: ...

    def read(self) -> DeviceReading: ...

    def reset_peak(self) -> None: ...

    def peak_meter(self) -> PeakMeter: ...


@dataclass(frozen=True)
class AllocatorBytes:
    """The counts of torch's allocator for one device, in bytes."""

    allocated: int
    reserved: int
    inactive: int
    peak: int  # the maximum of `allocated` since the peak was last reset
    num_ooms: int = 0


class Runtime(Protocol):
    """What a source needs to know from torch about one CUDA device."""

    @property
    def device(self) -> torch.device: ...

    def uuids(self) -> list[str]: ...

    def total_bytes(self) -> int: ...

    def has_context(self) -> bool: ...

    def free_and_total(self) -> tuple[int, int]: ...

    def allocator(self) -> AllocatorBytes: ...

    def reset_peak(self) -> None: ...


class CudaRuntime:
    """torch's answers about one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def uuids(self) -> list[str]:
        """UUIDs by which the driver may know the device. That of a MIG instance comes before that of its GPU."""
        # torch leaves out the prefix by which the driver tells the UUID of a MIG instance from that of a GPU.
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        index = self.device.index or 0
        # Only the UUID of a MIG instance is taken from there. Other entries may be an index, or the beginning of a
        # UUID, by which NVML finds nothing.
        named = [visible[index].strip()] if index < len(visible) else []
        return [*(name for name in named if name.startswith("MIG-")), f"MIG-{uuid}", f"GPU-{uuid}"]

    def total_bytes(self) -> int:
        """Bytes of the device, or of the MIG instance."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def has_context(self) -> bool:
        """Whether this process has a context on the device. `free_and_total` would create one, which takes 0.5 GB."""
        # The function is private to torch. Without it an initialised CUDA counts as a context.
        has_context = getattr(_cuda_bindings, "_cuda_hasPrimaryContext", None)
        return bool(torch.cuda.is_initialized() and (has_context is None or has_context(self.device.index)))

    def free_and_total(self) -> tuple[int, int]:
        """Return (free, total) bytes of the device by the CUDA runtime."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)

    def allocator(self) -> AllocatorBytes:
        """The allocator's counts; zeros before CUDA is in use."""
        # torch returns an empty dict before CUDA is initialised, so a reading creates no context here.
        found = torch.cuda.memory_stats_as_nested_dict(self.device)

        def of(kind: str, moment: str) -> int:
            return int(found.get(kind, {}).get("all", {}).get(moment, 0))

        return AllocatorBytes(
            allocated=of("allocated_bytes", "current"),
            reserved=of("reserved_bytes", "current"),
            inactive=of("inactive_split_bytes", "current"),
            peak=of("allocated_bytes", "peak"),
            num_ooms=int(found.get("num_ooms", 0)),
        )

    def reset_peak(self) -> None:
        """Reset the allocator's peak to the present bytes."""
        torch.cuda.reset_peak_memory_stats(self.device)


class CudaSource:
    """Readings of one CUDA device, or of the part of one that this process sees."""

    counts_tensors = True

    def __init__(self, runtime: Runtime, nvml: Nvml | None) -> None:
        """nvml: the driver. None: only the runtime is asked."""
        self._runtime = runtime
        self._nvml = nvml
        self._peak = 0  # maximum that meters have found since the peak was last reset
        self._handle = None if nvml is None else nvml.find(runtime.uuids(), runtime.total_bytes())

    def read(self) -> DeviceReading:
        """The present reading. Creates no CUDA context if the driver answers."""
        own = self._runtime.allocator()
        told = self._ask_driver(own.reserved)
        if told is None or self._runtime.has_context():
            # The runtime knows limits that the driver does not know, such as those of MPS, and the reverse. Both apply,
            # so the smaller figure counts.
            free, total = self._runtime.free_and_total()
            free = free if told is None else min(free, told.free_bytes)
        else:
            free, total = told.free_bytes, told.total_bytes
        own_bytes = None if told is None else told.own_bytes
        return DeviceReading(
            device=self._runtime.device,
            total_bytes=total,
            free_bytes=free,
            allocated_bytes=own.allocated,
            reserved_bytes=own.reserved,
            inactive_bytes=own.inactive,
            peak_bytes=max(own.peak, self._peak),
            # The figures are read one after the other, so together they may exceed the total.
            others_bytes=max(0, total - free - (own.reserved if own_bytes is None else own_bytes)),
            tells_processes_apart=own_bytes is not None,
            num_ooms=own.num_ooms,
        )

    def reset_peak(self) -> None:
        """Begin a new peak: of `DeviceReading.peak_bytes` and of `torch.cuda.max_memory_allocated`."""
        self._peak = 0
        self._runtime.reset_peak()

    def note_peak(self, num_bytes: int) -> None:
        """Record a peak that a meter found, before the meter resets that of the allocator."""
        self._peak = max(self._peak, num_bytes)

    def peak_meter(self) -> PeakMeter:
        """A meter on the allocator's peak. It resets `torch.cuda.max_memory_allocated` at each position."""
        return AllocatorMeter(self._runtime, self)

    def _ask_driver(self, least_own_bytes: int) -> DriverReading | None:
        if self._nvml is None or self._handle is None:
            return None
        return self._nvml.read(self._handle, least_own_bytes)


class AllocatorMeter:
    """Measures peaks of the bytes allocated on a CUDA device, model data included."""

    counts_model_data = True

    def __init__(self, runtime: Runtime, source: CudaSource) -> None:
        """source: is told each peak, so that its own reading still covers all positions."""
        self._runtime = runtime
        self._source = source

    def __enter__(self) -> AllocatorMeter:
        # The peak from before the meter was entered belongs to no position.
        self.pop_peak()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def pop_peak(self) -> int:
        """The peak since the last call, in bytes."""
        peak = self._runtime.allocator().peak
        self._source.note_peak(peak)
        self._runtime.reset_peak()
        return peak


class EmulatedDevice:
    """Device memory emulated in host memory, with a capacity that may change at any time, as free memory does.

    `ShardedModel(module, device=EmulatedDevice(10**9))` trains on it, `MemoryMonitor(EmulatedDevice(10**9))` reads it.
    Local; raises nothing.

    Args:
        total_bytes: of the device; it may be assigned at any time. None: no bound.
        others_bytes: that other processes are to hold; it may be assigned, too.
        activation_bytes: the most that a training step is to take besides model data; it may be assigned, too, and
            `MemoryMonitor(device).record_peaks()` assigns what it has measured. None: not known.

    Example:
        >>> device = EmulatedDevice(10**9)
        >>> model = ShardedModel(torch.nn.Linear(8, 8), device=device)
        >>> device.others_bytes = 5 * 10**8  # another process takes half of it
        >>> MemoryMonitor(device).read().device.others_bytes
        500000000
    """

    counts_tensors = False
    """A module's tensors are host memory, and the device never held them."""

    def __init__(
        self, total_bytes: int | None = None, others_bytes: int = 0, activation_bytes: int | None = None
    ) -> None:
        self.total_bytes = total_bytes
        self.others_bytes = others_bytes
        self.activation_bytes = activation_bytes
        # Weak references: a model that was dropped holds no memory of the device any more.
        self._ledgers: WeakSet[Ledger] = WeakSet()
        self._meter: BoundedMeter | None = None
        self._num_ooms = 0

    def hold(self, ledger: Ledger) -> None:
        """Count the bytes of this ledger as bytes on the device from now on. Local; raises nothing."""
        self._ledgers.add(ledger)

    @contextmanager
    def holding_activations(self) -> Iterator[None]:
        """A context in which tensors that this thread's operations make count as device memory, with a bound. Local.

        An operation whose results do not fit beside model data and other processes raises torch.OutOfMemoryError, as on
        an accelerator. Tensors from before do not count.
        """
        meter = BoundedMeter(self._refuse)
        self._meter = meter
        try:
            with meter:
                yield
        finally:
            self._meter = None

    def _refuse(self, num_bytes: int) -> None:
        """Raises OutOfMemoryError if `num_bytes` of activations do not fit."""
        # Ledgers count model data, which the meter does not see, and the meter counts activations.
        own = sum(ledger.total_bytes for ledger in self._ledgers)
        if self.total_bytes is not None and num_bytes + own + self.others_bytes > self.total_bytes:
            # Counted as torch's allocator counts failures: `LiveMemory` learns of a shortage by this number.
            self._num_ooms += 1
            raise torch.OutOfMemoryError(
                f"emulated device out of memory: {num_bytes} bytes of activations beside {own} bytes of model data "
                f"and {self.others_bytes} bytes of other processes do not fit into {self.total_bytes} bytes"
            )

    def read(self) -> DeviceReading:
        """The present reading. Local; raises nothing."""
        own, total = sum(ledger.total_bytes for ledger in self._ledgers), self.total_bytes
        # Outside `holding_activations()` the figure is what a user, or a meter that was left, has assigned.
        peak_bytes = self.activation_bytes if self._meter is None else self._meter.peak_bytes
        return DeviceReading(
            device=torch.device("cpu"),
            total_bytes=total,
            free_bytes=None if total is None else max(0, total - own - self.others_bytes),
            allocated_bytes=own,
            reserved_bytes=own,
            inactive_bytes=0,
            # As on CUDA a peak includes model data, which readers subtract.
            peak_bytes=None if peak_bytes is None else own + peak_bytes,
            others_bytes=self.others_bytes,
            tells_processes_apart=True,
            num_ooms=self._num_ooms,
            overdrawn_bytes=0 if total is None else max(0, own + self.others_bytes - total),
        )

    def reset_peak(self) -> None:
        """Reset a measured peak. One that was assigned stays until it is assigned again. Local; raises nothing."""
        if self._meter is not None:
            self._meter.pop_peak()

    def peak_meter(self) -> PeakMeter:
        """A meter on live storages that operations make. Local; raises nothing."""
        # Inside `holding_activations()` its meter counts already, and peaks of positions are parts of its own.
        return StorageMeter(self) if self._meter is None else PartMeter(self._meter)


def source_of(device: Device | DeviceSource) -> DeviceSource:
    """The source of a device's readings. Accelerators other than CUDA's are read as devices without a bound."""
    # An `EmulatedDevice` is its own source.
    if isinstance(device, DeviceSource):
        return device
    device = resolve_device(device, "device")
    if device.type != "cuda":
        return EmulatedDevice()
    # The devices of ROCm have the type "cuda" too, and NVML does not know them.
    is_nvidia = torch.version.cuda is not None
    return CudaSource(CudaRuntime(device), driver_of_process() if is_nvidia else None)
