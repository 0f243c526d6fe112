"""`gemini doctor`: what a report of a problem needs, and what would make training faster."""

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

import gemini
from gemini.cli import doctor
from gemini.cli.app import app


def examined(*arguments: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    assert done.exit_code == 0, done.output
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_report_has_versions_limits_and_kernels(tmp_path: Path) -> None:
    found = examined("--no-rates", "--disk-path", str(tmp_path))
    assert found["versions"]["gemini"] == gemini.__version__ and found["versions"]["torch"] == torch.__version__
    assert len(found["devices"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert {"NCCL", "gloo"} <= set(found["collectives"])
    assert found["kernels"]["CPU"].startswith(("built", "fallback"))
    assert found["host"]["memory_bytes"] == psutil.virtual_memory().total
    assert {"cgroup_limit_bytes", "locked_limit_bytes", "pinned_bytes"} <= set(found["host"])
    assert found["disk"]["folder"] == str(tmp_path) and 0 < found["disk"]["free_bytes"] <= found["disk"]["memory_bytes"]
    assert found["rates"] == {}
    if not torch.cuda.is_available():
        assert "torch sees no GPU" in found["advice"][0]


def test_rates_of_the_host_and_the_disk_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rates = examined("--disk-path", str(tmp_path))["rates"]
    for name in ("host memory", "update on the host", "disk, read and written at once"):
        assert rates[f"{name}_bytes_per_s"] > 0
    nowhere = examined("--disk-path", str(tmp_path / "nowhere"))["rates"]
    assert "not measured" in nowhere["disk"]


def test_a_page_for_people_has_the_same_and_no_raw_bytes(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["doctor", "--no-rates", "--disk-path", str(tmp_path)])
    assert done.exit_code == 0
    for section in ("versions", "devices", "collectives", "kernels", "host", "disk", "what would make it faster"):
        assert f"\n{section}\n" in f"\n{done.stdout}"
    assert "_bytes" not in done.stdout


def test_what_slows_a_machine_down_is_said() -> None:
    """A machine as `facts` describes one, with all that is slow."""
    gpu = {"name": "GPU", "PCIe width now": 8, "PCIe width at most": 16}
    host = {"memory_bytes": 128 * 10**9, "cgroup_limit_bytes": 16 * 10**9, "locked_limit_bytes": 8 * 2**20}
    found = {
        "versions": {"CUDA of torch": "13.0"},
        "devices": [gpu],
        "kernels": {"CPU": "fallback: torch operations", "GPU": "fallback: torch operations"},
        "host": {**host, "cores": 32, "cores for this process": 4},
        "disk": {"folder": "/data"},
        "rates": {"disk, read and written at once_bytes_per_s": 2e8},
    }
    said = "\n".join(doctor._advice(found))
    for words in (
        "C++ compiler",
        "gcc",
        "8 of 16 PCIe lanes",
        "ulimit -l",
        "16 GB of 128 GB",
        "4 of 32 cores",
        "200 MB/s",
    ):
        assert words in said
