"""What `MemoryMonitor` says of the host and of a disk: against the machine itself, and on trees of control groups."""

import gc
import mmap
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import psutil
import pytest
import torch

from gemini import MemoryMonitor
from gemini.memory.arena import HostTier
from gemini.memory.memory import EmulatedTier
from gemini.model import wrap
from gemini.monitor.readings import HostReading, HostSource
from tests.zoo import mlp
from tests.zoo.registrar import Runtime

MIB = 2**20


class Cgroups:
    """A process's folder in /proc and the control groups that it names."""

    def __init__(self, folder: Path, path: str = "/", root: str = "/", version: int = 2) -> None:
        """path: of the process's group. root: of the group that is mounted."""
        self.proc, self.mounted = folder / "proc", folder / "a mount"
        self.proc.mkdir()
        self.mounted.mkdir()
        self.version = version
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        at = str(self.mounted).replace(" ", "\\040")
        others = "22 1 0:20 / /proc rw - proc proc rw\n30 1 0:9 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
        (self.proc / "mountinfo").write_text(f"{others}31 23 0:28 {root} {at} rw,relatime shared:9 - {kind}\n")
        controllers = "" if version == 2 else "memory"
        (self.proc / "cgroup").write_text(f"3:cpu,cpuacct:/elsewhere\n{2 - version}:{controllers}:{path}\n")

    def group(
        self, path: str, *, limit: int | None = None, used: int = 0, cached: int = 0, high: int | None = None
    ) -> Self:
        """Write the files of one group. `cached` bytes of `used` are page cache, half of them in use a moment ago."""
        folder = self.mounted / path
        folder.mkdir(parents=True, exist_ok=True)
        if self.version == 1:
            words = {"memory.limit_in_bytes": 2**63 - 4096 if limit is None else limit, "memory.usage_in_bytes": used}
            prefix = "total_"
        else:
            words = {"memory.max": limit or "max", "memory.high": high or "max", "memory.current": used}
            prefix = ""
        for name, value in words.items():
            (folder / name).write_text(f"{value}\n")
        stat = [f"anon {used - cached}", f"{prefix}active_file {cached // 2}"]
        (folder / "memory.stat").write_text("\n".join([*stat, f"{prefix}inactive_file {cached - cached // 2}", ""]))
        return self

    def read(self) -> HostReading:
        return HostSource(self.proc).read()


versions = pytest.mark.parametrize("version", [1, 2])


@versions
def test_a_limit_of_the_container_is_the_end_of_its_memory(tmp_path: Path, version: int) -> None:
    reading = Cgroups(tmp_path, version=version).group("", limit=500 * MIB, used=200 * MIB).read()
    assert (reading.limit_bytes, reading.used_bytes, reading.available_bytes) == (500 * MIB, 200 * MIB, 300 * MIB)


@versions
def test_page_cache_that_can_be_given_up_is_not_used(tmp_path: Path, version: int) -> None:
    """A process that has read a checkpoint of 150 MiB has not lost that memory."""
    reading = Cgroups(tmp_path, version=version).group("", limit=500 * MIB, used=200 * MIB, cached=150 * MIB).read()
    assert (reading.used_bytes, reading.available_bytes) == (50 * MIB, 450 * MIB)


@versions
@pytest.mark.parametrize("tightest", ["", "job", "job/step"])
def test_of_nested_groups_the_one_with_least_room_counts(tmp_path: Path, version: int, tightest: str) -> None:
    groups = Cgroups(tmp_path, path="/job/step", version=version)
    for path in ("", "job", "job/step"):
        used = (800 if path == tightest else 100) * MIB
        groups.group(path, limit=900 * MIB, used=used)
    groups.group("other", limit=1 * MIB, used=1 * MIB)  # which this process is not in
    assert groups.read().available_bytes == 100 * MIB


def test_a_mark_that_slows_processes_down_counts_as_a_limit(tmp_path: Path) -> None:
    reading = Cgroups(tmp_path).group("", limit=500 * MIB, high=400 * MIB, used=300 * MIB).read()
    assert (reading.limit_bytes, reading.available_bytes) == (400 * MIB, 100 * MIB)


def test_a_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    assert Cgroups(tmp_path).group("", high=400 * MIB, used=450 * MIB).read().available_bytes == 0


@versions
def test_without_a_limit_the_machine_is_the_end(tmp_path: Path, version: int) -> None:
    reading = Cgroups(tmp_path, path="/job", version=version).group("").group("job", used=200 * MIB).read()
    assert reading.limit_bytes is None
    assert reading.total_bytes == psutil.virtual_memory().total
    assert 0 < reading.available_bytes <= reading.total_bytes


def test_a_limit_above_the_machines_memory_leaves_what_the_machine_has(tmp_path: Path) -> None:
    reading = Cgroups(tmp_path).group("", limit=2**60, used=200 * MIB).read()
    assert reading.limit_bytes is None
    assert reading.available_bytes <= reading.total_bytes


@pytest.mark.parametrize(
    ("path", "root"),
    [
        ("/docker/c1/job", "/docker/c1"),  # the host's paths, and this container's own group is mounted
        ("/../../elsewhere", "/"),  # a namespace that the process was moved out of
        ("/docker/c1", "/docker/c1"),
        ("/gone", "/"),
    ],
)
def test_a_container_finds_its_own_limit_however_its_groups_are_mounted(tmp_path: Path, path: str, root: str) -> None:
    groups = Cgroups(tmp_path, path=path, root=root).group("", limit=500 * MIB, used=100 * MIB)
    groups.group("job", limit=400 * MIB, used=100 * MIB)
    assert groups.read().available_bytes == (300 if path.endswith("/job") else 400) * MIB


def test_limits_that_change_later_are_seen(tmp_path: Path) -> None:
    groups = Cgroups(tmp_path).group("", limit=500 * MIB)
    source = HostSource(groups.proc)
    groups.group("", limit=300 * MIB)
    assert source.read().available_bytes == 300 * MIB


@pytest.mark.parametrize("text", ["", "nonsense", "0::"])
def test_files_that_say_nothing_leave_the_machines_own_account(tmp_path: Path, text: str) -> None:
    groups = Cgroups(tmp_path).group("", limit=500 * MIB)
    (groups.proc / "cgroup").write_text(text)
    (groups.mounted / "memory.max").write_text(text)
    assert groups.read().limit_bytes is None


# ---- this machine ----------------------------------------------------------------------------------------------------

TAKES = """
import mmap, sys
print("ready", flush=True)
sys.stdin.readline()
memory = mmap.mmap(-1, 500 * 2**20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:: mmap.PAGESIZE] = bytes(len(range(0, len(memory), mmap.PAGESIZE)))
print("taken", flush=True)
sys.stdin.readline()
memory.close()
print("given", flush=True)
sys.stdin.readline()
"""


def test_memory_that_another_process_takes_is_seen_to_go_and_to_come_back() -> None:
    """500 MiB of them; others who use this machine may take or give up to half of that at the same moment."""
    monitor = MemoryMonitor("emulated")

    def available() -> int:
        """With what the kernel has ready for the next process on a processor, which it does not call available."""
        ready = re.findall(r"^\s+count:\s+(\d+)$", Path("/proc/zoneinfo").read_text(), re.M)
        return (monitor.read().host.available_bytes + mmap.PAGESIZE * sum(map(int, ready))) // MIB

    with subprocess.Popen([sys.executable, "-c", TAKES], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == "ready\n"
        for word, sign in (("taken", -1), ("given", 1)):
            before = available()
            other.stdin.write("go on\n")
            other.stdin.flush()
            assert other.stdout.readline() == f"{word}\n"
            ends = time.monotonic() + 5
            while sign * (available() - before) < 250 and time.monotonic() < ends:
                time.sleep(0.02)
            assert sign * (available() - before) >= 250, f"500 MiB were {word}: {before} MiB became {available()}"
        other.stdin.write("end\n")


def test_a_directorys_file_system_is_read_also_before_the_directory_is_made(tmp_path: Path) -> None:
    usage = psutil.disk_usage(str(tmp_path))
    reading = MemoryMonitor("emulated", directory=tmp_path / "later" / "still").read().disk
    assert reading is not None
    assert reading.directory == tmp_path / "later" / "still"
    assert reading.total_bytes == usage.total
    assert abs(reading.free_bytes - usage.free) < 2**30
    assert MemoryMonitor("emulated").read().disk is None


def test_memory_that_a_model_has_pinned_is_told_until_it_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, monitor = Runtime(), MemoryMonitor("emulated")
    monkeypatch.setattr(wrap, "choose_tiers", lambda device: (EmulatedTier(), HostTier(runtime=runtime)))
    before = monitor.read().host.pinned_bytes
    model, optimizer = mlp.sharded("cpu")
    pinned = model.chunk_manager.memory.host.homes.registered_bytes
    assert pinned > 0
    assert monitor.read().host.pinned_bytes - before == pinned
    del model, optimizer
    gc.collect()
    assert monitor.read().host.pinned_bytes == before


def test_a_reading_costs_little_beside_a_step() -> None:
    """`python -m benchmarks.memory_monitor` has the figures; here only that none of it waits or searches."""
    monitor = MemoryMonitor("emulated", directory=".")
    times = []
    for _ in range(20):
        begun = time.process_time()
        monitor.read()
        times.append(time.process_time() - begun)
    assert sorted(times)[len(times) // 2] < 5e-3


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(TypeError, match="device must be"):
        MemoryMonitor(1.5)  # type: ignore[arg-type]
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="is not here"):
            MemoryMonitor("cuda:0")
