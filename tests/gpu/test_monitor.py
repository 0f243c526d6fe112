"""`MemoryMonitor` on a real GPU: what this process and another one take and free, and that no reading waits for it."""

import gc
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch

from gemini import MemoryMonitor

GIB, MIB = 2**30, 2**20
NOISE = 256 * MIB  # what other processes of the machine, and the driver, may take or free meanwhile
OTHER = """
import sys, torch
torch.zeros(1, device="cuda:0")
print("ready", flush=True)
sys.stdin.readline()
kept = torch.zeros(2 * 2**30, dtype=torch.uint8, device="cuda:0")
torch.cuda.current_stream().query()
print("taken", flush=True)
sys.stdin.readline()
"""
SHOW = """
from gemini import MemoryMonitor
found = MemoryMonitor("cuda:0").read().device
print(found.total_bytes, found.free_bytes)
"""


@pytest.fixture
def monitor(cuda: torch.device) -> MemoryMonitor:
    gc.collect()
    torch.cuda.empty_cache()
    torch.zeros(1, device=cuda)  # the process has a context
    return MemoryMonitor(cuda)


def test_the_allocators_figures_of_a_monitor_follow_tensors(monitor: MemoryMonitor, cuda: torch.device) -> None:
    before = monitor.read().device
    assert before.total_bytes is not None
    assert before.available_bytes is not None
    assert 0 < before.available_bytes <= before.total_bytes
    assert abs(before.total_bytes - torch.cuda.get_device_properties(cuda).total_memory) < GIB
    kept = torch.zeros(GIB, dtype=torch.uint8, device=cuda)
    during = monitor.read().device
    assert during.allocated_bytes - before.allocated_bytes == GIB
    assert during.reserved_bytes - before.reserved_bytes >= GIB
    assert during.available_bytes is not None
    assert abs(before.available_bytes - during.available_bytes - GIB) < NOISE
    assert abs(during.others_bytes - before.others_bytes) < NOISE, "this process's own tensors are not others'"
    del kept
    after = monitor.read().device
    assert after.allocated_bytes == before.allocated_bytes
    assert after.available_bytes is not None, "it is cached, so it can be had"
    assert abs(after.available_bytes - before.available_bytes) < NOISE


def test_what_another_process_takes_is_seen_to_go_and_to_come_back(monitor: MemoryMonitor) -> None:
    def wait_for(change: int, since: int) -> int:
        """Until the others hold about `change` more than `since`; what they hold then."""
        ends = time.monotonic() + 20
        while True:
            held = monitor.read().device.others_bytes
            if abs(held - since - change) < NOISE or time.monotonic() > ends:
                return held
            time.sleep(0.05)

    with subprocess.Popen([sys.executable, "-c", OTHER], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        before = monitor.read().device
        other.stdin.write("take\n")
        other.stdin.flush()
        assert other.stdout.readline() == "taken\n"
        held = wait_for(2 * GIB, before.others_bytes)
        assert abs(held - before.others_bytes - 2 * GIB) < NOISE
        taken = monitor.read().device
        assert before.free_bytes is not None
        assert taken.free_bytes is not None
        assert abs(before.free_bytes - taken.free_bytes - 2 * GIB) < NOISE
        assert taken.allocated_bytes == before.allocated_bytes
        other.stdin.write("end\n")
        other.stdin.flush()
        other.wait(30)
    assert wait_for(-2 * GIB, held) <= held - 2 * GIB + NOISE, "and its context"


def test_a_device_is_the_same_by_index_and_by_uuid(monitor: MemoryMonitor, cuda: torch.device) -> None:
    """CUDA_VISIBLE_DEVICES with the UUID, and an empty place before it, name another index for the same device."""
    uuid = str(torch.cuda.get_device_properties(cuda).uuid)
    here = monitor.read().device
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[cuda.index or 0]
    if visible.startswith("MIG-"):
        pytest.skip("a MIG instance has another UUID than its GPU")
    for value in (visible, f"GPU-{uuid}", f"GPU-{uuid[:8]}"):
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": value}
        done = subprocess.run([sys.executable, "-c", SHOW], env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        total, free = map(int, done.stdout.split())
        assert here.total_bytes is not None
        assert here.free_bytes is not None
        assert abs(total - here.total_bytes) < GIB
        assert abs(free - here.free_bytes) < 2 * GIB, "but for the other process's own context"


def test_a_reading_does_not_wait_for_the_device(monitor: MemoryMonitor, cuda: torch.device) -> None:
    monitor.read()
    done = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # two seconds, about
    done.record()
    with monitor.record_peaks() as peaks:
        peaks.at("here")
        begun = time.perf_counter()
        monitor.read()
        took = time.perf_counter() - begun
    assert not done.query(), "the device has finished: either it was waited for, or it is too fast for this test"
    assert took < 0.5


def test_a_reading_is_cheap_enough_for_every_step(monitor: MemoryMonitor) -> None:
    times = []
    for _ in range(50):
        begun = time.perf_counter()
        monitor.read()
        times.append(time.perf_counter() - begun)
    assert sorted(times)[25] < 5e-3, "seconds, median"


def test_peaks_by_position_are_the_allocators_without_the_model_data(
    monitor: MemoryMonitor, cuda: torch.device
) -> None:
    model_data = torch.zeros(256 * MIB, dtype=torch.uint8, device=cuda)
    others = torch.cuda.memory_allocated(cuda) - model_data.nbytes
    with monitor.record_peaks() as peaks:
        peaks.at("first", model_data.nbytes)
        kept = torch.zeros(64 * MIB, dtype=torch.uint8, device=cuda)
        temporary = torch.zeros(512 * MIB, dtype=torch.uint8, device=cuda)
        del temporary
        peaks.at("second", model_data.nbytes)
        small = torch.zeros(32 * MIB, dtype=torch.uint8, device=cuda)
    assert {name: (found - others) // MIB for name, found in peaks.by_position.items()} == {"first": 576, "second": 96}
    del kept, small


def test_a_machine_with_a_working_driver_tells_processes_apart_or_says_why_not(cuda: torch.device) -> None:
    """In most containers process numbers are hidden, without which readings are still right as a whole."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = MemoryMonitor(cuda).read().device
    assert len(said) <= 1, "of NVML, once"
    own = torch.cuda.memory_reserved(cuda)
    assert found.total_bytes is not None
    assert found.free_bytes is not None
    assert found.others_bytes <= found.total_bytes - found.free_bytes - own
