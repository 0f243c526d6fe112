"""A GPU that lags behind: every copy between host and device waits a while on the stream before it runs.

What reads the host's side of a copy too early, or writes it too soon, gets other numbers than the plain loop then.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

CYCLES = 2_000_000  # about a millisecond

_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class LateCopies(TorchDispatchMode):
    """Counts the copies that it held up."""

    def __init__(self, cycles: int = CYCLES) -> None:
        super().__init__()
        self.cycles = cycles
        self.num_late = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES and _crosses(args, kwargs):
            torch.cuda._sleep(self.cycles)
            self.num_late += 1
        return func(*args, **kwargs)


def _crosses(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    devices = {arg.device.type for arg in args if isinstance(arg, Tensor)}
    if isinstance(kwargs.get("device"), torch.device):
        devices.add(kwargs["device"].type)
    return len(devices) > 1
