"""`gemini doctor`: what this machine has, how fast it is, and what would make training faster; for reports, too."""

from __future__ import annotations

import json
import platform
import resource
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemini.cli.amounts import in_words
from gemini.cli.asked import say

if TYPE_CHECKING:
    from gemini.placement.machines import Rates

_PACKAGES = (
    *("torch", "triton", "numpy", "safetensors", "pydantic", "nvidia-ml-py"),
    *("transformers", "accelerate", "lightning", "trl", "peft", "deepspeed"),
)
_LITTLE_LOCKED = 64 * 2**20
"""Bytes that may be locked by default, and too few for states on the host."""
_SLOW_DISK = 1e9  # bytes per second: below this an update waits for the disk


def doctor(
    folder: Annotated[Path, typer.Option("--disk-path", help="A folder on the disk that is measured.")] = Path("."),
    measures: Annotated[bool, typer.Option("--rates/--no-rates", help="Measure rates, in ten seconds.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> None:
    """Print versions, devices, limits and rates of this machine, and what would make training faster.

    Nothing is sent anywhere. Put the output into a report of a problem.
    """
    from rich.console import Console

    from gemini.cli.progress import working

    stderr = Console(stderr=True)
    with working(stderr, "loading torch"):
        import torch  # noqa: F401
    with working(stderr, "looking at this machine"):
        found = facts(folder)
    with working(stderr, "measuring, for about ten seconds"):
        found["rates"] = _rates(folder) if measures else {}
    found["advice"] = [*_advice(found)]
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    console = Console()
    for section, its in found.items():
        if section == "advice":
            continue
        say(console, section, "bold")
        for line in _lines(its):
            say(console, f"  {line}")
    say(console, "what would make it faster", "bold")
    for line in found["advice"] or ["nothing that is seen from here"]:
        say(console, f"  - {line}")


def facts(folder: Path) -> dict[str, Any]:
    """All but rates, in bytes. Local; raises nothing."""
    import torch

    versions = {"gemini": sys.modules["gemini"].__version__, "python": platform.python_version()}
    versions["system"] = platform.platform()
    versions |= {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    versions |= {"CUDA of torch": torch.version.cuda or "none", "ROCm of torch": torch.version.hip or "none"}
    return {
        "versions": versions,
        "devices": _devices(),
        "collectives": _collectives(),
        "kernels": _kernels(),
        "host": _host(),
        "disk": _disk(folder),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    import torch

    found: list[dict[str, Any]] = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        its = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "name": its.name,
                "memory_bytes": total,
                "free_bytes": free,
                "compute capability": f"{its.major}.{its.minor}",
                **_links(str(its.uuid)),
            }
        )
    return found


def _links(uuid: str) -> dict[str, Any]:
    """The PCIe link of a device, now and at most, its NVLinks, and the driver. Empty where NVML does not say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        links = 0
        for link in range(getattr(pynvml, "NVML_NVLINK_MAX_LINKS", 18)):
            try:
                links += pynvml.nvmlDeviceGetNvLinkState(handle, link)
            except pynvml.NVMLError:
                break  # no more links
        return {
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "PCIe generation": pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
            "PCIe width now": pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
            "PCIe width at most": pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
            "NVLinks": links,
        }
    except Exception:  # without a driver, without the package, inside a container that hides the device
        return {}


def _collectives() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    if not dist.is_available():
        return {"torch.distributed": "not built"}
    has_nccl = dist.is_nccl_available() and torch.cuda.is_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else "none"
    return {"NCCL": version, "gloo": "yes" if dist.is_gloo_available() else "none"}


def _kernels() -> dict[str, Any]:
    import torch

    from optim.cpu_extension import extension, levels, num_threads
    from optim.dispatch import has_triton

    built = (
        f"built ({levels()[0]}), {num_threads()} threads" if extension() is not None else "fallback: torch operations"
    )
    on_gpu = "no GPU" if not torch.cuda.is_available() else "Triton" if has_triton() else "fallback: torch operations"
    return {"CPU": built, "GPU": on_gpu}


def _host() -> dict[str, Any]:
    import os

    import psutil

    from gemini.monitor.readings import HostSource

    reading = HostSource().read()
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "cores": psutil.cpu_count(logical=False) or os.cpu_count(),
        "cores for this process": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": reading.total_bytes,
        "available_bytes": reading.available_bytes,
        "cgroup_limit_bytes": reading.limit_bytes,
        "locked_limit_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "pinned_bytes": reading.pinned_bytes,
        "swap_bytes": reading.swap_total_bytes,
    }


def _disk(folder: Path) -> dict[str, Any]:
    from gemini.monitor.readings import DiskSource

    try:
        reading = DiskSource(folder).read()
    except OSError as error:
        return {"folder": str(folder.absolute()), "error": str(error)}
    return {
        "folder": str(folder.absolute()),
        "memory_bytes": reading.total_bytes,
        "free_bytes": reading.free_bytes,
    }


def _rates(folder: Path) -> dict[str, Any]:
    """Bytes and products per second; what could not be measured says why."""
    from gemini.errors import BudgetError
    from gemini.monitor.rates import disk_rates, rates_of

    measured: Rates = rates_of(measure_again=True)
    found: dict[str, Any] = {f"{dtype} products_flops_per_s": value for dtype, value in measured.flops_per_s.items()}
    found |= {
        "device memory_bytes_per_s": measured.device_memory_bytes_per_s,
        "host memory_bytes_per_s": measured.host_memory_bytes_per_s,
        "host to device_bytes_per_s": measured.to_device_bytes_per_s,
        "device to host_bytes_per_s": measured.to_host_bytes_per_s,
        "update on the device_bytes_per_s": measured.device_update_bytes_per_s,
        "update on the host_bytes_per_s": measured.host_update_bytes_per_s,
    }
    try:
        read, _ = disk_rates(folder)
        found["disk, read and written at once_bytes_per_s"] = read
    except (BudgetError, OSError, ValueError) as error:
        found["disk"] = f"not measured: {error}"
    return found


def _advice(found: dict[str, Any]) -> Iterator[str]:
    """What would make training faster here, in the order of how much."""
    host, kernels, rates = found["host"], found["kernels"], found["rates"]
    if not found["devices"]:
        cuda = found["versions"]["CUDA of torch"]
        yield (
            "torch sees no GPU"
            + (
                "; this torch is built without CUDA: install one that is"
                if cuda == "none"
                else f" (built for CUDA {cuda})"
            )
            + ". Without one the device is emulated in host memory, for trials"
        )
    if kernels["CPU"].startswith("fallback"):
        yield "optimizer steps on the CPU use torch operations: install a C++ compiler and CMake, then gemini again"
    if kernels["GPU"].startswith("fallback"):
        yield "updates on the GPU use torch operations: Triton needs a C compiler (gcc) on PATH"
    for index, device in enumerate(found["devices"]):
        now, most = device.get("PCIe width now"), device.get("PCIe width at most")
        if now and most and now < most:
            lanes = f"GPU {index} is on {now} of {most} PCIe lanes"
            yield f"{lanes}: copies to and from the host take {most / now:g} times longer"
    locked = host["locked_limit_bytes"]
    if found["devices"] and locked is not None and locked <= _LITTLE_LOCKED:
        words = "raise `ulimit -l`, or start the container with --ulimit memlock=-1"
        yield f"only {in_words(locked)} may be locked: {words}"
    limit = host["cgroup_limit_bytes"]
    if limit is not None and limit < host["memory_bytes"] // 2:
        of = f"{in_words(limit)} of {in_words(host['memory_bytes'])}"
        yield f"the container may use {of} of host memory: a higher limit leaves more room for states"
    if host["cores for this process"] < (host["cores"] or 0):
        cores = f"{host['cores for this process']} of {host['cores']} cores"
        yield f"this process may use {cores}, and updates on the host use all that they may"
    disk = rates.get("disk, read and written at once_bytes_per_s")
    if disk is not None and disk < _SLOW_DISK:
        yield (
            f"the disk at {found['disk']['folder']} does {in_words(int(disk))}/s: name a folder on a local NVMe disk "
            "with --disk-path, and as disk_path="
        )


def _lines(its: Any) -> Iterator[str]:
    if isinstance(its, list):
        if not its:
            yield "none"
        for index, each in enumerate(its):
            yield f"{index}: {', '.join(_lines(each))}"
        return
    if not its:
        yield "not measured"
    for name, value in its.items():
        yield _line(name, value)


def _line(name: str, value: Any) -> str:
    for end, unit in (("_bytes_per_s", "/s"), ("_bytes", "")):
        if name.endswith(end):
            shown = "no limit" if value is None else f"{in_words(int(value))}{unit}"
            return f"{name.removesuffix(end).replace('_', ' ')} {shown}"
    if name.endswith("_flops_per_s"):
        return f"{name.removesuffix('_flops_per_s')} {value / 1e12:.3g} TFLOP/s"
    return f"{name} {value}"
