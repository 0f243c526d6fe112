"""`deepspeed.accelerator`: questions to the current device, which is the CPU where there is no accelerator."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from gemini.elsewhere import missing
from gemini.launch import current_device
from gemini.monitor.live import MemoryMonitor

_RANDOM = ("manual_seed", "initial_seed", "get_rng_state", "set_rng_state", "default_generator")


class Accelerator:
    """The device of this process. What DeepSpeed's object has and torch's module of the device, too, is torch's.

    So its `manual_seed` is `torch.cuda.manual_seed` on CUDA. On the CPU what asks about memory answers for the host.
    """

    def device_name(self, device_index: int | None = None) -> str:
        """The name of the device for `torch.device`: "cuda", "cuda:1", "cpu". Local."""
        kind = current_device().type
        return kind if device_index is None or kind == "cpu" else f"{kind}:{device_index}"

    def current_device(self) -> int:
        """The index of the device; 0 for the CPU. Local."""
        return current_device().index or 0

    def current_device_name(self) -> str:
        """The name of the device with its index; "cpu" for the CPU. Local."""
        return str(current_device())

    def set_device(self, device_index: int) -> None:
        """Make this the process's device. Local; of the CPU there is one."""
        if current_device().type != "cpu":
            torch.accelerator.set_device_index(device_index)

    def device_count(self) -> int:
        """How many devices this process sees; 1 for the CPU. Local."""
        return torch.accelerator.device_count() or 1

    def is_available(self) -> bool:
        """True: without an accelerator the CPU is the device. Local."""
        return True

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor lies on a device of this kind. Local."""
        return tensor.device.type == current_device().type

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed for this device. Local."""
        return torch.distributed.get_default_backend_for_device(current_device())

    def supported_dtypes(self) -> list[torch.dtype]:
        """Dtypes of weights. Local."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def is_fp16_supported(self) -> bool:
        """Whether weights may be fp16. Local."""
        return torch.float16 in self.supported_dtypes()

    def is_bf16_supported(self) -> bool:
        """Whether weights may be bf16. Local."""
        return torch.bfloat16 in self.supported_dtypes()

    def manual_seed_all(self, seed: int) -> None:
        """Seed the random numbers of every device of this kind. Local."""
        torch.manual_seed(seed) if current_device().type == "cpu" else torch.get_device_module().manual_seed_all(seed)

    def empty_cache(self) -> None:
        """Give back what torch's allocator holds and no tensor uses. Local."""
        if current_device().type != "cpu":
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of live tensors on the device; on the CPU those in use on the host, as in the three below. Local."""
        return self._bytes("memory_allocated", device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The peak of `memory_allocated`. Local."""
        return self._bytes("max_memory_allocated", device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that torch's allocator holds of the device. Local."""
        return self._bytes("memory_reserved", device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        """The peak of `memory_reserved`. Local."""
        return self._bytes("max_memory_reserved", device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Let the peaks begin at the present bytes. Local; the CPU has no peaks."""
        if current_device().type != "cpu":
            torch.accelerator.reset_peak_memory_stats(device_index)

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of memory that the device has. Local."""
        if current_device().type == "cpu":
            return MemoryMonitor().read_host().total_bytes
        return torch.accelerator.get_memory_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that no process holds. Local."""
        if current_device().type == "cpu":
            return MemoryMonitor().read_host().available_bytes
        return torch.accelerator.get_memory_info(device_index)[0]

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        """The tensor in page-locked host memory; the tensor itself without an accelerator. Local.

        align_bytes: has no effect.
        """
        return tensor if current_device().type == "cpu" else tensor.pin_memory()

    def _bytes(self, question: str, device_index: int | None) -> int:
        # torch's allocator of host memory counts nothing.
        if current_device().type == "cpu":
            return MemoryMonitor().read_host().used_bytes
        answer: int = getattr(torch.accelerator, question)(device_index)
        return answer

    def __getattr__(self, name: str) -> Any:
        """What torch's module of the device has. Random numbers of the CPU are torch's own."""
        owner = torch if current_device().type == "cpu" and name in _RANDOM else torch.get_device_module()
        if name.startswith("_") or not hasattr(owner, name):
            raise missing("get_accelerator()", name, f"{owner.__name__} and torch.accelerator are the device's")
        return getattr(owner, name)


@cache
def get_accelerator() -> Accelerator:
    """The object that answers for this process's device: always the same one. Local."""
    return Accelerator()
