"""Bytes that are free and used on the device, and the peaks between two positions of a step."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable
from weakref import WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gemini.log import warn_at_script
from gemini.memory.memory import resolve_device
from gemini.memory.tier import Ledger
from gemini.monitor.readings import DeviceReading
from gemini.settings import Device

# -- Readings of a device from NVIDIA's driver, through NVML: without a CUDA context, and by process.
#
# NVML numbers the devices of the machine. CUDA numbers those that CUDA_VISIBLE_DEVICES names (by index, UUID or the
# beginning of one), in an order of its own. So devices are looked up by UUID. NVML often does not work in containers
# (no library, a library of another version than the driver, no permission); the caller then does without it.


_SAME_PART = 16
"""Driver and runtime report totals that differ by the driver's own memory: less than the total divided by this."""


@dataclass(frozen=True)
class DriverReading:
    """The driver's reading of one device, in bytes."""

    total_bytes: int
    free_bytes: int
    own_bytes: int | None  # held by this process, its CUDA context included. None: the driver does not say


class Nvml:
    """NVML, as long as it works. The first failure warns once; from then on all answers are None."""

    def __init__(self, library: Any) -> None:
        """library: the module `pynvml`, or None if there is none."""
        self._library = library
        self._works = True
        try:
            if library is None:
                raise RuntimeError("the package nvidia-ml-py is not installed")
            library.nvmlInit()
        # Not only NVMLError: without the package there is no such class.
        except Exception as error:
            self._give_up(error)

    def find(self, uuids: Sequence[str], total_bytes: int) -> Any | None:
        """The handle of the first device with one of `uuids` and about `total_bytes`. None: there is none.

        The bytes distinguish a MIG instance from its GPU, if CUDA names the instance by the GPU's UUID.
        """
        # The order counts: a MIG instance's own UUID comes before that of its GPU, which has the memory of all
        # instances.
        for uuid in uuids if self._works else ():
            try:
                handle = self._library.nvmlDeviceGetHandleByUUID(uuid)
                total = int(self._library.nvmlDeviceGetMemoryInfo(handle).total)
            except self._library.NVMLError:
                # The driver does not know the device by this UUID.
                continue
            if abs(total - total_bytes) <= total_bytes // _SAME_PART:
                return handle
        if self._works:
            self._give_up(f"it knows no device of {total_bytes} bytes as {' or '.join(uuids)}")
        return None

    def read(self, handle: Any, least_own_bytes: int) -> DriverReading | None:
        """The present reading of a device from `find`. None once NVML has failed.

        least_own_bytes: bytes that this process certainly holds. The driver uses process ids of the machine, so another
        process may have the id that this one has inside a container. Smaller figures of it are not believed.
        """
        if not self._works:
            return None
        try:
            memory = self._library.nvmlDeviceGetMemoryInfo(handle)
        except self._library.NVMLError as error:
            self._give_up(error)
            return None
        own_bytes = self._own_bytes(handle)
        if own_bytes is not None and own_bytes < least_own_bytes:
            own_bytes = None
        return DriverReading(int(memory.total), int(memory.free), own_bytes)

    def _own_bytes(self, handle: Any) -> int | None:
        try:
            processes = self._library.nvmlDeviceGetComputeRunningProcesses(handle)
        except self._library.NVMLError:
            return None  # the driver hides processes here, but free memory is known all the same
        own = [each.usedGpuMemory for each in processes if each.pid == os.getpid()]
        # The figure is None where the driver cannot attribute memory to processes.
        return int(own[0]) if own and own[0] is not None else None

    def _give_up(self, why: object) -> None:
        self._works = False
        warn_at_script(
            f"NVML does not work here ({why}). Free device memory is read from the CUDA runtime instead; what other "
            "processes hold is known less exactly",
        )


@functools.cache
def driver_of_process() -> Nvml:
    """The process's only `Nvml`, so that a failure warns once. Loaded at the first call."""
    try:
        import pynvml
    except ImportError:
        return Nvml(None)
    return Nvml(pynvml)


# -- The peak of non-model bytes (activations, workspace) at each position of a run.
#
# The run reports its positions, and the peak until the next report belongs to the position. On CUDA it is the allocated
# bytes less the model data. On the emulated device it is the live storages that the user's operations have made;
# operations on chunks do not count, see [Note: Modes] in memory/modes.py. Nothing waits for the device.


class PeakMeter(Protocol):
    """Measures peaks of memory while it is entered."""

    counts_model_data: bool

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def pop_peak(self) -> int:
        """The peak since the last call, or since the meter was entered, in bytes."""


class PositionPeaks(AbstractContextManager["PositionPeaks"]):
    """A context manager that finds the peak of non-model bytes at each position of the code inside.

    `MemoryMonitor.record_peaks` makes it. `by_position` has the bytes by the positions that were passed to `at`.
    Local; raises nothing.

    Args:
        meter: measures the device.

    Example:
        >>> with MemoryMonitor("emulated").record_peaks() as peaks:
        ...     peaks.at("forward")
        ...     output = torch.zeros(1000).sum()
        >>> peaks.by_position["forward"] >= 4000
        True
    """

    def __init__(self, meter: PeakMeter) -> None:
        self.by_position: dict[Hashable, int] = {}
        self._meter = meter
        self._position: Hashable = None
        self._model_bytes = 0
        self._is_somewhere = False

    def at(self, position: Hashable, model_bytes: int = 0) -> None:
        """Begin `position`. The peak up to the next call belongs to it. Local; raises nothing.

        position: any key. A repeated position keeps its greatest peak.
        model_bytes: bytes of model data on the device now. Between two calls the smaller of both figures counts, so
            that a peak is never too small. It is exact if positions are reported around each allocation of model data.
        """
        peak, least = self._meter.pop_peak(), min(self._model_bytes, model_bytes)
        # What came before the first position, or after the block, belongs to none.
        if self._is_somewhere:
            bytes_here = max(0, peak - least if self._meter.counts_model_data else peak)
            self.by_position[self._position] = max(bytes_here, self.by_position.get(self._position, 0))
        self._position, self._model_bytes, self._is_somewhere = position, model_bytes, True

    def __enter__(self) -> PositionPeaks:
        self._meter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_somewhere:
            self.at(None, self._model_bytes)
            # The call of `at` has begun another position, to which nothing belongs.
            self._is_somewhere = False
        self._meter.__exit__(*error)


class Emulated(Protocol):
    """A device whose activations are measured and not bounded."""

    activation_bytes: int | None


class StorageMeter(TorchDispatchMode):
    """Measures the live storages that the user's operations have made since the meter was entered.

    Views of older memory, such as weights in a slot, are no new storage. Copies and collectives on chunks are not seen,
    because this mode follows only the user's operations.
    """

    counts_model_data = False

    def __init__(self, device: Emulated | None) -> None:
        """device: receives the overall peak as `activation_bytes` when this mode is left. None: no device does."""
        super().__init__()
        self._device = device
        self._most = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}  # by the storage's address in C++
        self._now = self._peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Follow only the user's operations, see [Note: Modes] in memory/modes.py."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Results alone are counted: memory that an operation takes and gives back inside, such as a workspace, is not
        # seen.
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for storage in _storages(result):
            known = self._alive.get(storage._cdata)
            num_bytes = storage.nbytes()
            if known is not None:
                # It may have been resized. It is noted first, for the same reason as below.
                self._alive[storage._cdata] = known[0], num_bytes
                self._count(num_bytes - known[1])
                continue
            # A storage of an argument is not new: the operation returned a view, or wrote in place.
            if given is None:
                given = {each._cdata for each in _storages((args, kwargs))}
            if storage._cdata not in given:
                # torch keeps the Python object of a storage while its memory lives, so the reference ends with the
                # memory.
                self._alive[storage._cdata] = (
                    weakref.ref(storage, partial(self._remove_dead, storage._cdata)),
                    num_bytes,
                )
                # The storage is counted last, because a `BoundedMeter` may raise here: a refused storage is then known,
                # and is uncounted when it dies.
                self._count(num_bytes)
        return result

    def pop_peak(self) -> int:
        """The peak since the last call, in bytes."""
        # The next peak starts from what is alive now, and not from 0.
        peak, self._peak = self._peak, self._now
        self._most = max(self._most, peak)
        return peak

    def __exit__(self, *error: Any) -> None:
        self.pop_peak()
        if self._device is not None:
            self._device.activation_bytes = self._most
        super().__exit__(*error)

    def _count(self, num_bytes: int) -> None:
        self._now += num_bytes
        self._peak = max(self._peak, self._now)

    def _remove_dead(self, key: int, dead: weakref.ref[Any]) -> None:
        """Uncount a storage that was freed, unless its address belongs to another one by now."""
        known = self._alive.get(key)
        if known is not None and known[0] is dead:
            del self._alive[key]
            self._now -= known[1]


class BoundedMeter(StorageMeter):
    """A `StorageMeter` that raises when live storages exceed a bound."""

    def __init__(self, refuse: Callable[[int], None]) -> None:
        """refuse: a function of the live bytes that raises if they do not fit."""
        super().__init__(None)
        self._refuse = refuse
        self._peak_of_part = 0

    @property
    def peak_bytes(self) -> int:
        """The peak since the last `pop_peak`, in bytes, including a refused storage."""
        return self._peak

    def pop_part_peak(self) -> int:
        """The peak since the last call of this method, in bytes. It leaves `peak_bytes` as it is."""
        peak, self._peak_of_part = self._peak_of_part, self._now
        return peak

    def _count(self, num_bytes: int) -> None:
        super()._count(num_bytes)
        self._peak_of_part = max(self._peak_of_part, self._now)
        # A storage that shrinks is never refused, although others may have taken the device's room meanwhile.
        if num_bytes > 0:
            self._refuse(self._now)


class PartMeter:
    """Measures peaks between calls, on top of a `BoundedMeter` that is entered already."""

    counts_model_data = False

    def __init__(self, whole: BoundedMeter) -> None:
        self._whole = whole

    def __enter__(self) -> PartMeter:
        self._whole.pop_part_peak()
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def pop_peak(self) -> int:
        """The peak since the last call, in bytes."""
        return self._whole.pop_part_peak()


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        # A sparse tensor raises when it is asked for its storage, and a meta tensor has no memory.
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
            yield leaf.untyped_storage()


# -- Readings of one device's memory: of a CUDA device from driver, runtime and allocator, or of an emulated one.
#
# Nothing here waits for the device: allocators count on the host when tensors are made, and the driver only returns
# numbers.


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


class CudaMemory:
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
    return CudaSource(CudaMemory(device), driver_of_process() if is_nvidia else None)
