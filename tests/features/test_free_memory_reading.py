"""When a step reads what its device has free."""

from typing import Any
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from gemini import EmulatedDevice, ShardedModel, ShardedOptimizer
from gemini.monitor.readings import DeviceReading
from tests.zoo.mlp import CHUNK_NUMEL, adam, build, loss_of


class Listed(TorchDispatchMode):
    """Names of operations, in one list with others' entries."""

    def __init__(self, entries: list[str]) -> None:
        super().__init__()
        self._entries = entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._entries.append(str(func))
        return func(*args, **(kwargs or {}))


def test_free_memory_is_read_while_the_device_still_sums_gradients() -> None:
    """A driver takes up to milliseconds, in which a device that was waited for would do nothing."""
    device, entries = EmulatedDevice(10**6), list[str]()
    model = ShardedModel(build(), device=device, chunk_size=CHUNK_NUMEL)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    loss_of(model).backward()

    def read() -> DeviceReading:
        entries.append("read")
        return EmulatedDevice.read(device)

    with mock.patch.object(device, "read", read), Listed(entries):
        optimizer.step()
    first_wait = next(at for at, entry in enumerate(entries) if "stack" in entry)
    assert "read" in entries[:first_wait]
    assert entries.count("read") == 1
