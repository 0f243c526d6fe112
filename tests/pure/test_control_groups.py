"""The processor time that control groups allow, on trees of them, and the number of threads that follows from it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from optim import cpu_extension
from optim import cpu_extension as control_groups

versions = pytest.mark.parametrize("version", [1, 2])


def tree(folder: Path, version: int, quotas: dict[str, str]) -> Path:
    """A process's folder in /proc, whose group is the longest of these paths. Quotas are as version 2 writes them."""
    proc, mounted = folder / "proc", folder / "mounted"
    proc.mkdir()
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,cpu,cpuacct"
    (proc / "mountinfo").write_text(f"31 23 0:28 / {mounted} rw,relatime shared:9 - {kind}\n")
    (proc / "cgroup").write_text(f"4:memory:/far\n{2 - version}:{'cpu,cpuacct' * (2 - version)}:/{max(quotas)}\n")
    for path, quota in quotas.items():
        (mounted / path).mkdir(parents=True, exist_ok=True)
        if version == 2:
            (mounted / path / "cpu.max").write_text(f"{quota}\n")
            continue
        time_us, period_us = quota.replace("max", "-1").split(" ")
        (mounted / path / "cpu.cfs_quota_us").write_text(f"{time_us}\n")
        (mounted / path / "cpu.cfs_period_us").write_text(f"{period_us}\n")
    return proc


@versions
@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({"": "150000 100000"}, 1.5),
        ({"": "max 100000"}, None),
        ({"": "400000 100000", "job": "max 100000", "job/task": "800000 100000"}, 4.0),
        ({"": "max 100000", "job": "50000 200000"}, 0.25),
    ],
)
def test_the_tightest_quota_of_nested_groups_counts(
    tmp_path: Path, version: int, quotas: dict[str, str], cores: float | None
) -> None:
    assert control_groups.cpu_quota(tree(tmp_path, version, quotas)) == cores


@pytest.mark.parametrize("text", ["", "nonsense", "max", "100000 0"])
def test_a_file_that_says_nothing_is_no_quota(tmp_path: Path, text: str) -> None:
    assert control_groups.cpu_quota(tree(tmp_path, 2, {"": text})) is None


@pytest.fixture
def asked_again(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The number of threads is found out once a process: here it is before and after the test."""
    for name in (cpu_extension.NUM_THREADS_VARIABLE, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda number: set(range(64)))
    cpu_extension._default_num_threads.cache_clear()
    yield monkeypatch
    cpu_extension._default_num_threads.cache_clear()


@pytest.mark.parametrize(("quota", "threads"), [(None, 64), (6.5, 6), (0.5, 1), (200.0, 64)])
def test_cpu_kernels_have_no_more_threads_than_a_containers_cores(
    asked_again: pytest.MonkeyPatch, quota: float | None, threads: int
) -> None:
    asked_again.setattr(cpu_extension, "cpu_quota", lambda: quota)
    assert cpu_extension.num_threads() == threads
