"""The memory budgets of a model: bytes that the user gave, or what the machine has when the model is wrapped.

A live reading differs from rank to rank by what other processes do meanwhile, and a plan that follows from it would
differ too. So ranks agree on the least reading of each kind before anything is planned.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from gemini.executor.communicator import Communicator
from gemini.memory import live
from gemini.model.built_chunk import built_link_of
from gemini.placement.sizes import parse_bytes

ACTIVATION_FRACTION = 0.3
"""Of `device_memory`, left to activations and workspace until a step has shown what they need."""

_UNBOUNDED = 2**62  # a reading of a device that has no bound


@dataclass(frozen=True)
class Budgets:
    """Bytes per rank. `str()` shows what the user gave, which must be equal on all ranks."""

    device_memory: int | None
    model_data_memory: int | None
    host_memory: int | None

    @staticmethod
    def of(
        device_memory: int | str | None, model_data_memory: int | str | None, host_memory: int | str | None
    ) -> Budgets:
        """From arguments of `ShardedModel`. Raises TypeError or ValueError."""
        given = Budgets(
            parse_bytes(device_memory, "device_memory"),
            parse_bytes(model_data_memory, "model_data_memory"),
            parse_bytes(host_memory, "host_memory"),
        )
        part, whole = given.model_data_memory, given.device_memory
        if part is not None and whole is not None and part > whole:
            raise ValueError(f"model_data_memory={part} is more than device_memory={whole}")
        return given

    def __str__(self) -> str:
        return (
            f"device_memory={self.device_memory} model_data_memory={self.model_data_memory} "
            f"host_memory={self.host_memory}"
        )

    def read(self, module: nn.Module, communicator: Communicator, device: torch.device) -> tuple[int | None, int]:
        """(model data on the device, None without a bound; host), with what was not given read live. Collective.

        Raises nothing of its own. Ranks must have agreed on `str(self)` before.
        """
        data, host = self.model_data_memory, self.host_memory
        if data is None and self.device_memory is not None:
            data = _model_data(self.device_memory)
        if data is not None and host is not None:
            return data, host
        free = live.free_device_bytes(device) if data is None else None
        on_device = _UNBOUNDED if free is None else free + _bytes_on(module, device)
        # the least over ranks, as the greatest of the negative ones
        readings = torch.tensor([-on_device, -live.free_host_bytes()], dtype=torch.int64, device=communicator.device)
        communicator.all_reduce_max_(readings, "free memory")
        on_device, on_host = (-reading for reading in readings.tolist())
        if data is None and on_device < _UNBOUNDED:
            data = _model_data(on_device)
        return data, on_host if host is None else host


def _model_data(device_bytes: int) -> int:
    return int(device_bytes * (1 - ACTIVATION_FRACTION))


def _bytes_on(module: nn.Module, device: torch.device) -> int:
    """Of the module's parameters on `device`, shards of one that was built there included: wrapping frees them."""
    num_bytes = 0
    homes: dict[int, int] = {}  # of built chunks, by address
    for parameter in module.parameters():
        link = built_link_of(parameter)
        if link is not None:
            home = link.managed.chunk.home
            if home.device == device:
                homes[home.data_ptr()] = home.nbytes
        elif parameter.device == device:
            num_bytes += parameter.nbytes
    return num_bytes + sum(homes.values())
