"""The arguments of `ShardedModel`, checked before anything happens."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from gemini.device import current_device
from gemini.errors import UnsupportedError
from gemini.memory.accelerator import AcceleratorTier
from gemini.memory.emulated import EmulatedTier
from gemini.memory.host import HostTier
from gemini.memory.pinned import CudaRuntime
from gemini.memory.tier import MemoryTier
from gemini.model.built_link import built_link_of
from gemini.model.link import link_of
from gemini.model.move_out import LOST
from gemini.settings import Device, check_device


def check_module(module: nn.Module) -> None:
    """Raises TypeError or UnsupportedError; looks at parameters without reading them."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, found {type(module).__name__}")
    for child in module.modules():
        for hook in (*child._forward_hooks.values(), *child._forward_pre_hooks.values()):
            if getattr(hook, "__module__", "") == "gemini.model.hooks":
                raise UnsupportedError("module is already inside a ShardedModel: wrap it once")
    for name, parameter in module.named_parameters():
        if link_of(parameter) is not None:
            raise UnsupportedError(f"parameter {name!r} already belongs to a ShardedModel: wrap a module once")
        if built_link_of(parameter) is not None:
            continue
        if hasattr(parameter, LOST):
            raise UnsupportedError(f"parameter {name!r} lost its values when wrapping failed: build the module again")
        if is_lazy(parameter) or parameter.is_meta:
            raise UnsupportedError(f"parameter {name!r} has no data yet ({type(parameter).__name__} on meta or lazy)")
        if type(parameter) is not nn.Parameter:
            raise UnsupportedError(f"parameter {name!r} is a {type(parameter).__name__}, not a plain nn.Parameter")
        if parameter.layout is not torch.strided:
            raise UnsupportedError(f"parameter {name!r} is {parameter.layout}; only strided tensors can be in a chunk")


def choose_tiers(device: Device) -> tuple[MemoryTier, HostTier]:
    """(device tier, host tier), without budgets so far. "emulated" and "cpu" are the emulated device."""
    resolved = resolve_device(device, "device")
    if resolved.type == "cpu":
        return EmulatedTier(), HostTier()
    return AcceleratorTier(resolved), HostTier(runtime=CudaRuntime(resolved) if resolved.type == "cuda" else None)


def resolve_device(device: Device, argument: str) -> torch.device:
    """What a user means by a device: with its index; the CPU for the emulated one. None: the current one."""
    if device is None:
        device = current_device()
    check_device(argument, device)
    if device == "emulated":
        return torch.device("cpu")
    if isinstance(device, int):
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
    if resolved.type != current_device().type:
        raise ValueError(f"{argument}={str(device)!r} is not here: use 'emulated'")
    return torch.empty(0, device=resolved).device  # "cuda" with its index
