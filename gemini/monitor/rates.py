"""Rates of this machine, measured in a fraction of a second and cached for the next process.

The library's own operations are measured: copies between host and device, Adam by the kernels that update chunks,
matrix products, and with a process group its own collectives. On a machine without an accelerator the device is
emulated in host memory, and a copy to it is a copy within host memory. The rates are cached in the user's cache
directory, by device, processor, number of threads, version of torch and number of ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemini.memory.direct import aligned_bytes
from gemini.memory.disk import DiskTier
from gemini.memory.memory import resolve_device
from gemini.placement.machines import Rates
from gemini.settings import Device
from optim import AdamPiece, adam_scalars, update_pieces
from sharding import Collectives, ShardLayout, Unit

# These are the sizes of what is measured: a copy, an update, and the payload of a gather between ranks.
_COPY_BYTES = 2**25
_UPDATE_NUMEL = 2**21
_UPDATE_BYTES = 26  # per parameter in bf16 with a split master: 14 read, 12 written
_PAYLOAD_BYTES = 2**22
_DISK_BYTES = 2**27
_DISK_ROUNDS = 4
_ENOUGH_S = 0.02
"""Seconds of repetitions of one measurement. The fastest one counts, which leaves out other work on the machine."""
_LONG_S = 0.08
"""Seconds after which a measurement ends, however few repetitions there were."""
_LEAST_REPETITIONS, _MOST_REPETITIONS = 4, 20
_PRODUCTS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LARGEST_PRODUCT = 8192


def rates_of(device: Device = None, group: dist.ProcessGroup | None = None, *, measure_again: bool = False) -> Rates:
    """The cached rates of this machine, or else newly measured ones. Local without a group, collective with one.

    Args:
        device: as for `ShardedModel`. None: the current accelerator, else the emulated device.
        group: a process group whose collectives are measured too. None: the rates between ranks are unknown.
        measure_again: ignore the cache.

    A cache file that cannot be read, is not JSON or describes another machine is ignored. If none can be written, the
    next process measures again. Raises ValueError for a device that does not exist.
    """
    resolved = resolve_device(device, "device")
    key = _key(resolved, group)
    file = _file(key)
    found = None if measure_again else _remembered(file, key)
    # Measuring is collective: if one rank lacks the cache file, all ranks measure.
    if group is not None:
        found = _agreed(found, group)
    if found is None:
        found = _measured(resolved, group)
        if group is not None:
            # Each rank has measured figures of its own. All ranks use those of rank 0.
            found = _agreed(found, group)
            assert found is not None
        _remember(file, key, found)
    return found


def _measured(device: torch.device, group: dist.ProcessGroup | None) -> Rates:
    with torch.inference_mode(False), torch.no_grad():
        # Chunks' homes on the host are registered with a GPU's driver, so pinned memory has the rate of their copies.
        there, here = _buffer(device), _buffer(torch.device("cpu"), pinned=device.type == "cuda")
        to_device = _COPY_BYTES / _seconds(lambda: there.copy_(here, non_blocking=True), there)
        to_host = _COPY_BYTES / _seconds(lambda: here.copy_(there, non_blocking=True), there)
        on_device, on_host = _memory_rate(there), _memory_rate(here)
        update_there = _update_rate(device)
        # On the emulated device both tiers are updated by the same kernel in the same memory.
        update_here = update_there if device.type == "cpu" else _update_rate(torch.device("cpu"))
        flops = {name: _product_rate(dtype, device) for name, dtype in _PRODUCTS.items()}
        node, network, launch = (None, None, 0.0) if group is None else _collective_rates(device, group)
    return Rates(
        source=f"measured on {_name(device)}",
        flops_per_s=flops,
        device_memory_bytes_per_s=on_device,
        host_memory_bytes_per_s=on_host,
        to_device_bytes_per_s=to_device,
        to_host_bytes_per_s=to_host,
        device_update_bytes_per_s=update_there,
        host_update_bytes_per_s=update_here,
        node_bytes_per_s=node,
        network_bytes_per_s=network,
        collective_s=launch,
    )


def disk_rates(folder: Path) -> tuple[float, float]:
    """Bytes per second that this process reads from a disk and writes to it, both at once, as an update does.

    folder: where the file of the measurement lies, 256 MiB, which is gone afterwards. It takes a second or less, and is
    not cached: another folder may be another disk. Raises ValueError if no file can be made there, and BudgetError
    without room for it.
    """
    tier = DiskTier(folder)
    try:
        there = [tier.allocate(_DISK_BYTES, "a measurement") for _ in range(2)]
        here = [aligned_bytes(_DISK_BYTES, pins=False).zero_() for _ in range(2)]
        fastest = math.inf
        # The first round writes what the second one reads.
        for number in range(_DISK_ROUNDS):
            begun = time.perf_counter()
            for each in (*tier.write(there[number % 2], here[0]), *tier.read(here[1], there[1 - number % 2])):
                each.result()
            if number:
                fastest = min(fastest, time.perf_counter() - begun)
    finally:
        tier.close()
    return _DISK_BYTES / fastest, _DISK_BYTES / fastest


def _buffer(device: torch.device, pinned: bool = False) -> Tensor:
    return torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device, pin_memory=pinned)


def _memory_rate(buffer: Tensor) -> float:
    """Bytes read and written per second by a copy within one memory."""
    beside = torch.zeros_like(buffer)
    return 2 * _COPY_BYTES / _seconds(lambda: beside.copy_(buffer), beside)


def _seconds(call: Callable[[], object], read: Tensor) -> float:
    """Seconds of the fastest of several calls. Reading an element of `read`, on the device, waits for each call."""
    # The first call may compile a kernel or touch new pages: it does not count.
    call()
    float(read.view(-1)[0])
    times: list[float] = []
    while _goes_on(sum(times), len(times)):
        begun = time.perf_counter()
        call()
        float(read.view(-1)[0])
        times.append(time.perf_counter() - begun)
    # Callers divide by the result, which a coarse clock may have measured as 0.
    return max(min(times), 1e-9)


def _goes_on(seconds: float, count: int) -> bool:
    """Whether to repeat: fast calls several times, slow ones no more than necessary."""
    if count < _LEAST_REPETITIONS:
        return seconds < _LONG_S
    return seconds < _ENOUGH_S and count < _MOST_REPETITIONS


def _update_rate(device: torch.device) -> float:
    """Bytes per second of Adam on bf16 weights with split masters."""
    numel = _UPDATE_NUMEL
    weight, grad = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
    first, second = (torch.zeros(numel, device=device) for _ in range(2))
    remainder = torch.zeros(numel, dtype=torch.int16, device=device)
    piece = AdamPiece(weight, grad, first, second, None, remainder)
    scalars = adam_scalars(step=1, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)
    return numel * _UPDATE_BYTES / _seconds(lambda: update_pieces([piece], scalars), first)


def _product_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOPs per second of a product of square matrices: the best of growing sizes, until one takes long.

    Small sizes say little while other processes use the cores, because the threads of a product wait for each other.
    """
    size, rate, begun = 256, 0.0, time.perf_counter()
    while True:
        left, right = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        out = torch.empty_like(left)
        seconds = _seconds(partial(torch.mm, left, right, out=out), out)
        # A product of two n x n matrices takes n**3 multiplications and as many additions.
        rate = max(rate, 2 * size**3 / seconds)
        if seconds > _ENOUGH_S or time.perf_counter() - begun > 2 * _LONG_S or size >= _LARGEST_PRODUCT:
            return rate
        size *= 2


def _collective_rates(device: torch.device, group: dist.ProcessGroup) -> tuple[float | None, float | None, float]:
    """Return (bytes per second in a node, between nodes, seconds of a launch) of the slowest rank. Collective."""
    collectives, world_size = Collectives(group, device=device), group.size()
    if world_size == 1:
        return None, None, 0.0

    def gather_s(numel: int) -> float:
        # As in a chunk, the shard of each rank has a multiple of 256 elements.
        numel = -(-numel // (256 * world_size)) * 256 * world_size
        layout = ShardLayout((Unit(0, numel),), world_size)
        payload = torch.zeros(numel, device=device)
        shard = torch.zeros(layout.shard_numel, device=device)
        times = []
        # The number of calls is fixed: a loop that ends by the clock would end at different calls on different ranks,
        # and some of them would wait for a gather that the others never start.
        for _ in range(4):
            begun = time.perf_counter()
            collectives.all_gather(payload, shard, layout, None)
            float(payload[0])
            times.append(time.perf_counter() - begun)
        # As in `_seconds` the first call does not count.
        return min(times[1:])

    # A gather of few bytes takes the time of its launch alone. The slowest rank counts, because all ranks wait for it.
    # Sizes are in fp32 elements of 4 bytes.
    found = torch.tensor([gather_s(256), gather_s(_PAYLOAD_BYTES // 4)], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    launch_s, whole_s = found.tolist()
    # Of N ranks each receives (N - 1) / N of the payload from the others.
    rate = _PAYLOAD_BYTES * (world_size - 1) / world_size / max(whole_s - launch_s, 1e-9)
    # torchrun sets LOCAL_WORLD_SIZE. Without it all ranks are taken to share one node.
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE") or world_size)
    # Between nodes the adapters of all ranks of a node carry the gather: one rank has its share of the rate.
    return (rate, None, launch_s) if world_size <= per_node else (None, rate / per_node, launch_s)


def _agreed(rates: Rates | None, group: dist.ProcessGroup) -> Rates | None:
    """Rank 0's rates, if every rank has some. Collective."""
    every: list[Any] = [None] * group.size()
    dist.all_gather_object(every, None if rates is None else rates.to_json(), group=group)
    return None if any(each is None for each in every) else Rates.from_json(every[0])


# -- the cache


def _key(device: torch.device, group: dist.ProcessGroup | None) -> str:
    ranks = 1 if group is None else group.size()
    # As many ranks on another number of nodes gather over other links.
    per_node = os.environ.get("LOCAL_WORLD_SIZE", ranks) if ranks > 1 else 1
    parts = (_identity(device), _processor(), torch.get_num_threads(), torch.__version__, f"{ranks} ranks", per_node)
    return " | ".join(map(str, parts))


def _identity(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_properties(device).uuid)
    return "emulated" if device.type == "cpu" else str(device)


def _name(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return f"{name} and {_processor()}" if name else f"{_processor()}, on which the device is emulated"


def _processor() -> str:
    # On Linux `platform.processor()` may be empty, or name the architecture alone.
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # another operating system
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _file(key: str) -> Path:
    """The cache file. Without a home directory, as in some containers, a path that can be neither read nor made."""
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        cache = os.devnull
    return Path(cache) / "gemini" / f"rates-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def _remembered(file: Path, key: str) -> Rates | None:
    try:
        found = json.loads(file.read_text())
        if not isinstance(found, dict) or found.get("key") != key:
            return None
        return Rates.from_json(found.get("rates"))
    except (OSError, ValueError, RecursionError):  # missing, unreadable, or not a file of ours
        return None


def _remember(file: Path, key: str, rates: Rates) -> None:
    """Write the cache file atomically: several ranks may write at once, and others may read."""
    text = json.dumps({"key": key, "rates": rates.to_json()}, indent=1) + "\n"
    name = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w") as part:
            part.write(text)
        os.replace(name, file)
    except OSError:
        if name is not None:  # a full disk, for example: no part of a file is left
            with contextlib.suppress(OSError):
                os.unlink(name)
        return  # a directory that is not writable: the next process measures again
