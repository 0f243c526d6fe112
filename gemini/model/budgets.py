"""The free memory of the machine when a model is wrapped, for budgets that the user did not give.

Live readings differ between ranks, because other processes allocate and free meanwhile, and plans made from them would
differ too. So ranks agree on the least reading of each kind before they plan.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from gemini.building.link import built_link_of
from gemini.monitor.device import DeviceSource
from gemini.monitor.host import share_of_host
from gemini.monitor.monitor import MemoryMonitor
from gemini.placement.budget import FreeBytes
from gemini.placement.demand import Kind
from gemini.ranks.communicator import Communicator
from gemini.settings import Settings

_UNBOUNDED = 2**62  # a reading of a device that has no bound


def read_free(settings: Settings, own: tuple[int, int], communicator: Communicator, device: DeviceSource) -> FreeBytes:
    """The free bytes of each tier for which `settings` name no budget: the least over all ranks. Collective.

    own: bytes on the device and on the host that the model already has or will give back, which count as free.
    Raises nothing of its own. Ranks must have agreed on `settings` before.
    """
    # Ranks agreed on `settings`, so all of them skip the collective or none does.
    needs_device = settings.model_data_memory is None
    if not needs_device and settings.host_memory is not None:
        return FreeBytes()
    monitor = MemoryMonitor(device)
    free = monitor.read_device().available_bytes if needs_device else None
    # A rank whose device has no bound must not lower the least of the others.
    on_device = _UNBOUNDED if free is None else free + own[0]
    # Every rank of a host reads the same free memory, so each counts its share.
    on_host = share_of_host(monitor.read_host().available_bytes) + own[1]
    on_device, on_host = communicator.least((on_device, on_host), "free memory")
    return FreeBytes(None if on_device == _UNBOUNDED else on_device, on_host if settings.host_memory is None else None)


def bytes_freed(parameters: Iterable[nn.Parameter], device: torch.device, source: DeviceSource) -> int:
    """Bytes that wrapping frees on `device` and that `source` counts as in use: parameters there, and built shards."""
    if not source.counts_tensors:
        return 0  # they were never missing from what it calls free
    links = {parameter: built_link_of(parameter) for parameter in parameters}
    chunks = dict.fromkeys(link.managed.chunk for link in links.values() if link is not None)
    homes = [chunk.homes[Kind.PARAM].flat for chunk in chunks]
    own = [parameter for parameter, link in links.items() if link is None]
    return sum(each.nbytes for each in (*homes, *own) if each.device == device)
