"""`current_device`: where the user's input tensors go."""

import torch


def current_device() -> torch.device:
    """The device for this process's input tensors: its current accelerator, else the CPU.

    The emulated device keeps its memory on the CPU. Local; raises nothing.

    Example:
        >>> batch = torch.randn(4, 8, device=current_device())
    """
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
