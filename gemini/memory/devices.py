"""The tiers for the device that a user names."""

from __future__ import annotations

import torch

from gemini.device import current_device
from gemini.memory.accelerator import AcceleratorTier
from gemini.memory.emulated import EmulatedTier
from gemini.memory.host import HostTier
from gemini.memory.pinned import CudaRuntime
from gemini.memory.tier import MemoryTier
from gemini.settings import Device, Emulation, check_device


def choose_tiers(device: Device) -> tuple[MemoryTier, HostTier]:
    """(device tier, host tier), both without a budget. "emulated" and "cpu" mean the emulated device."""
    resolved = resolve_device(device, "device")
    if resolved.type == "cpu":
        tier = EmulatedTier()
        if isinstance(device, Emulation):
            # Without this the device's next reading would call the bytes of this model free.
            device.hold(tier.ledger)
        return tier, HostTier()
    return AcceleratorTier(resolved), HostTier(runtime=CudaRuntime(resolved) if resolved.type == "cuda" else None)


def resolve_device(device: Device, argument: str) -> torch.device:
    """The device that a user's `device` means: with its index; the CPU for the emulated one; the current one for None.

    argument: the argument's name, for errors. Raises ValueError for a device that this machine does not have.
    """
    if device is None:
        device = current_device()
    check_device(argument, device)
    if device == "emulated" or isinstance(device, Emulation):
        return torch.device("cpu")
    if isinstance(device, int):
        # As in torch, a number is the index of a device of the machine's one kind of accelerator.
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            raise ValueError(f"{argument}={device} needs an accelerator; this machine has none: use 'emulated'")
        device = torch.device(kind.type, device)
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{argument}={device!r} is not a device: {error}") from None
    if resolved.type == "cpu":
        return resolved
    # `torch.device` accepts any kind that torch knows, such as "xpu" on a machine with CUDA or with none.
    if resolved.type != current_device().type:
        raise ValueError(f"{argument}={str(device)!r} is not here: use 'emulated'")
    return torch.empty(0, device=resolved).device  # "cuda" with its index
