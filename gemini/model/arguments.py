"""The arguments of `ShardedModel`, checked before anything happens."""

from __future__ import annotations

import inspect
from typing import Any

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
from gemini.model.built_chunk import built_link_of
from gemini.model.link import link_of
from gemini.model.move_out import LOST
from optim.hyperparameters import refuse_unknown_arguments


def refuse_unknown(owner: type[nn.Module], unknown: dict[str, Any]) -> None:
    """TypeError with the nearest valid name."""
    valid = [name for name in inspect.signature(owner.__init__).parameters if name not in ("self", "unknown")]
    refuse_unknown_arguments(owner.__name__, unknown, valid)


def check_module(module: nn.Module, stage: int, chunk_numel: int | None, rank_timeout: float) -> None:
    """Raises TypeError, ValueError or UnsupportedError; looks at parameters without reading them."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, found {type(module).__name__}")
    if isinstance(stage, bool) or not isinstance(stage, int) or stage not in (0, 1, 2, 3):
        raise ValueError(f"stage must be 0, 1, 2 or 3, found {stage!r}")
    if chunk_numel is not None:
        if isinstance(chunk_numel, bool) or not isinstance(chunk_numel, int):
            raise TypeError(f"chunk_size must be an int (elements) or None, found {type(chunk_numel).__name__}")
        if chunk_numel < 1:
            raise ValueError(f"chunk_size must be at least 1 element, found {chunk_numel}")
    if isinstance(rank_timeout, bool) or not isinstance(rank_timeout, (int, float)) or not rank_timeout > 0:
        raise ValueError(f"rank_timeout must be a number of seconds above 0, found {rank_timeout!r}")
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


def choose_tiers(device: int | str | torch.device | None) -> tuple[MemoryTier, MemoryTier]:
    """(device tier, host tier), without budgets so far. "emulated" and "cpu" are the emulated device."""
    resolved = resolve_device(device, "device")
    if resolved.type == "cpu":
        return EmulatedTier(), HostTier()
    return AcceleratorTier(resolved), HostTier(runtime=CudaRuntime(resolved) if resolved.type == "cuda" else None)


def resolve_device(device: int | str | torch.device | None, argument: str) -> torch.device:
    """What a user means by a device: with its index; the CPU for the emulated one. None: the current one."""
    if device is None:
        device = current_device()
    if isinstance(device, bool) or not isinstance(device, (int, str, torch.device)):
        raise TypeError(f'{argument} must be "emulated", an int, a string or a torch.device, found {device!r}')
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
