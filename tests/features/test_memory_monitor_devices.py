"""What `MemoryMonitor` says of a device: NVIDIA's by stand-ins of the driver and of torch, and the emulated one."""

import warnings

import pynvml
import pytest
import torch

from gemini import MemoryMonitor, ShardedModel
from gemini.memory.tier import Ledger
from gemini.monitor.device import CudaMemory, CudaSource, EmulatedDevice, Nvml
from gemini.monitor.readings import DeviceReading
from tests.zoo import mlp
from tests.zoo.nvidia import GIB, OWN, UUID, Device, FakeNvml, FakeRuntime


def read(runtime: FakeRuntime, nvml: FakeNvml | None) -> DeviceReading:
    return MemoryMonitor(CudaSource(runtime, None if nvml is None else Nvml(nvml))).read().device


def read_thrice(runtime: FakeRuntime, failing: dict[str, type[Exception]]) -> DeviceReading:
    """By three monitors of one process."""
    nvml = Nvml(FakeNvml({f"GPU-{UUID}": runtime.seen}, failing))
    return [MemoryMonitor(CudaSource(runtime, nvml)).read().device for _ in range(3)][-1]


def test_free_memory_and_that_of_other_processes_are_the_drivers() -> None:
    gpu = Device(used=30 * GIB, processes={OWN: 12 * GIB, 77: 17 * GIB})
    reading = read(FakeRuntime(gpu, allocated=8 * GIB, reserved=10 * GIB), FakeNvml({f"GPU-{UUID}": gpu}))
    assert reading.free_bytes == 50 * GIB
    assert reading.available_bytes == 52 * GIB, "what torch has cached can be had, too"
    assert reading.tells_processes_apart
    assert reading.total_bytes is not None
    assert reading.others_bytes == reading.total_bytes - 50 * GIB - 12 * GIB


def test_a_device_is_found_by_its_uuid_among_others() -> None:
    """The driver numbers devices in another order, and knows those that CUDA_VISIBLE_DEVICES hides."""
    mine, others = Device(used=5 * GIB), Device(used=70 * GIB)
    runtime = FakeRuntime(mine)
    runtime.is_used = False
    found = read(runtime, FakeNvml({"GPU-0": others, f"GPU-{UUID}": mine, "GPU-2": others}))
    assert found.free_bytes == 75 * GIB


@pytest.mark.parametrize("known_as", ["MIG", "GPU"])
def test_a_mig_instance_is_not_taken_for_its_gpu(known_as: str) -> None:
    """CUDA may name either by the UUID; the driver is believed where the size is that of what CUDA sees."""
    instance, whole = Device(total=10 * GIB, used=2 * GIB), Device(total=80 * GIB, used=60 * GIB)
    nvml = FakeNvml({f"GPU-{UUID}": whole} | ({f"MIG-{UUID}": instance} if known_as == "MIG" else {}))
    if known_as == "MIG":
        assert read(FakeRuntime(instance), nvml).free_bytes == 8 * GIB
        return
    with pytest.warns(UserWarning, match="knows no device of"):
        assert read(FakeRuntime(instance), nvml).free_bytes == 8 * GIB


@pytest.mark.parametrize(
    ("visible", "index", "first"),
    [
        ("0,1", 1, f"MIG-{UUID}"),
        (f"GPU-{UUID}", 0, f"MIG-{UUID}"),
        ("MIG-a1, MIG-b2", 1, "MIG-b2"),
        ("", 0, f"MIG-{UUID}"),
    ],
)
def test_what_cuda_visible_devices_says_is_the_name_of_a_mig_instance_only(
    monkeypatch: pytest.MonkeyPatch, visible: str, index: int, first: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("", (), {"uuid": UUID})())
    found = CudaMemory(torch.device("cuda", index)).uuids()
    assert found[0] == first
    assert found[-2:] == [f"MIG-{UUID}", f"GPU-{UUID}"]


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVMLError_LibraryNotFound,
        pynvml.NVMLError_DriverNotLoaded,
        pynvml.NVMLError_LibRmVersionMismatch,
        pynvml.NVMLError_NoPermission,
        pynvml.NVMLError_Unknown,
    ],
)
@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo"])
def test_without_nvml_the_runtime_is_asked_and_it_is_said_once(function: str, error: type[Exception]) -> None:
    gpu = Device(used=30 * GIB)
    with pytest.warns(UserWarning, match="NVML does not work here") as said:
        found = read_thrice(FakeRuntime(gpu, allocated=GIB, reserved=4 * GIB), {function: error})
    assert len(said) == 1
    assert (found.free_bytes, found.available_bytes) == (50 * GIB, 53 * GIB)
    assert not found.tells_processes_apart
    assert found.total_bytes is not None
    assert found.others_bytes == found.total_bytes - 50 * GIB - 4 * GIB, "all that is outside of torch's allocator"


def test_nvml_that_fails_later_is_said_once_and_readings_go_on() -> None:
    gpu = Device(used=30 * GIB, processes={OWN: 12 * GIB})
    library = FakeNvml({f"GPU-{UUID}": gpu})
    monitor = MemoryMonitor(CudaSource(FakeRuntime(gpu), Nvml(library)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert monitor.read().device.tells_processes_apart
    library.failing["nvmlDeviceGetMemoryInfo"] = pynvml.NVMLError_GpuIsLost
    with pytest.warns(UserWarning, match="NVML does not work here") as said:
        readings = [monitor.read().device for _ in range(3)]
    assert len(said) == 1
    assert {each.free_bytes for each in readings} == {50 * GIB}


@pytest.mark.parametrize("hidden", ["no entry", "no bytes", "another process's number", "no permission"])
def test_a_container_that_hides_processes_counts_all_that_torch_does_not_hold_as_others(hidden: str) -> None:
    processes = {"no entry": {77: 20 * GIB}, "no bytes": {OWN: None}, "another process's number": {OWN: GIB}}
    gpu = Device(used=30 * GIB, processes=processes.get(hidden, {}))  # type: ignore[arg-type]
    name = "nvmlDeviceGetComputeRunningProcesses"
    library = FakeNvml({f"GPU-{UUID}": gpu}, {name: pynvml.NVMLError_NoPermission} if hidden == "no permission" else {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(FakeRuntime(gpu, allocated=GIB, reserved=4 * GIB), library)
    assert not found.tells_processes_apart
    assert found.total_bytes is not None
    assert found.others_bytes == found.total_bytes - 50 * GIB - 4 * GIB


def test_a_look_at_a_device_that_is_not_used_makes_no_context_there() -> None:
    gpu = Device(used=30 * GIB)
    runtime = FakeRuntime(gpu)
    runtime.is_used = False  # the stand-in refuses to be asked for its free memory
    assert read(runtime, FakeNvml({f"GPU-{UUID}": gpu})).free_bytes == 50 * GIB


def test_a_limit_that_only_the_runtime_knows_holds() -> None:
    gpu = Device(used=30 * GIB)
    runtime = FakeRuntime(gpu)
    runtime.limit_bytes = 20 * GIB
    assert read(runtime, FakeNvml({f"GPU-{UUID}": gpu})).free_bytes == 20 * GIB


def test_the_emulated_device_has_no_bound_unless_it_is_given_one() -> None:
    found = MemoryMonitor("emulated").read().device
    assert (found.total_bytes, found.free_bytes, found.available_bytes, found.others_bytes) == (None, None, None, 0)


def test_an_emulated_devices_memory_rises_and_falls_while_it_is_read() -> None:
    ledger = Ledger()
    device = EmulatedDevice(1000)
    device.hold(ledger)
    monitor = MemoryMonitor(device)
    ledger.count_allocated("param", 300)
    assert monitor.read().device.free_bytes == 700
    device.others_bytes = 500
    assert (monitor.read().device.free_bytes, monitor.read().device.others_bytes) == (200, 500)
    device.total_bytes = 600
    assert monitor.read().device.free_bytes == 0, "never below"
    device.total_bytes, device.others_bytes = 2000, 0
    assert monitor.read().device.available_bytes == 1700


def test_a_model_is_planned_for_the_memory_that_there_is_when_it_is_wrapped() -> None:
    budgets = []
    for total_bytes in (10**6, 10**5):
        model = ShardedModel(mlp.build(), device=EmulatedDevice(total_bytes), chunk_size=mlp.CHUNK_NUMEL)
        budgets.append(model.plan.budget_bytes)
    assert budgets == [int(10**6 * 0.7), int(10**5 * 0.7)]
