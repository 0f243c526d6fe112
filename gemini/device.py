"""`current_device`: where the user's input tensors go."""

import torch


def current_device() -> torch.device:
    """The accelerator that this process uses, or the CPU (which is where the emulated device keeps its memory)."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.device(kind.type, torch.accelerator.current_device_index())
    return torch.device("cpu")
