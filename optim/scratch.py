"""Scratch buffers for elementwise work on tiles. They are reused, so that a step on the CPU allocates nothing.

A tile is small enough for its scratch to stay in cache. Each thread has its own buffers, because two threads may update
two chunks at once. On other devices every call gets new buffers from the caching allocator, because one stream could
write to a reused buffer while another still reads it.
"""

import threading
from collections.abc import Iterator

import torch
from torch import Tensor

CPU_TILE_NUMEL_PER_THREAD = 2**17
DEVICE_TILE_NUMEL = 2**24


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_use: dict[tuple[str, torch.dtype], Tensor] = {}


_buffers = _Buffers()


def tile_numel(device: torch.device) -> int:
    """The number of elements of a tile on `device`. On the CPU a multiple of the threads that share the work."""
    if device.type == "cpu":
        return CPU_TILE_NUMEL_PER_THREAD * torch.get_num_threads()
    return DEVICE_TILE_NUMEL


def scratch(name: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised buffer, (numel,), valid until the next call with this `name` on this thread."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    # No device in the key: only buffers in host memory are kept.
    key = (name, dtype)
    buffer = _buffers.by_use.get(key)
    if buffer is None or buffer.numel() < numel:
        # A buffer made in inference mode could never be written outside it.
        with torch.inference_mode(False):
            buffer = _buffers.by_use[key] = torch.empty(numel, dtype=dtype, device=device)
    return buffer[:numel]


def tiles(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Detached tiles of flat tensors of one length and device, which are all cut at the same elements."""
    numel = tile_numel(tensors[0].device)
    return zip(*(tensor.detach().split(numel) for tensor in tensors), strict=True)
