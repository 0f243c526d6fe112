"""`DEVICE`, registered with torch when this is imported. From then on it is the current accelerator of the process."""

from __future__ import annotations

import ctypes
from collections import Counter
from types import ModuleType
from typing import Any

import torch

from tests.stand_in.build import library

_path = str(library())
torch.ops.load_library(_path)
_library = ctypes.CDLL(_path)
_library.stand_in_take_counts.restype = ctypes.c_int64


class _Current:
    """`torch.stand_in.device(...)`: a context in which another device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = device if isinstance(device, int) else torch.device(device).index

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        if self._index is not None:
            torch.accelerator.set_device_index(self._index)

    def __exit__(self, *error: object) -> None:
        torch.accelerator.set_device_index(self._before)


def _register() -> torch.device:
    module: Any = ModuleType("torch.stand_in")
    module.device = _Current
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 2
    module.current_device = torch.accelerator.current_device_index
    # Its kernels draw from the CPU's generator.
    module.manual_seed = module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch.utils.rename_privateuse1_backend("stand_in")
    torch._register_device_module("stand_in", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return torch.device("stand_in", 0)


def set_late(is_late: bool) -> None:
    """Whether copies with `non_blocking=True` are late: to the device until the next kernel of their stream, or of one
    that waits for it; to the host until the host waits.
    """
    _library.stand_in_set_late(int(is_late))


def set_capacity(num_bytes: int) -> None:
    """Beyond this, allocations of `DEVICE` raise torch.OutOfMemoryError."""
    _library.stand_in_set_capacity(DEVICE.index, ctypes.c_int64(num_bytes))


def take_counts() -> Counter[str]:
    """What happened since the last call: "kernel", "copy to host", "wait: item" and so on."""
    text = ctypes.create_string_buffer(2**16)
    _library.stand_in_take_counts(text, ctypes.c_int64(len(text)))
    pairs = (line.split("\t") for line in text.value.decode().splitlines())
    return Counter({name: int(number) for name, number in pairs})


DEVICE = _register()
