"""Devices by name in tests that run on any of them."""

import torch

CPU = torch.device("cpu")


def emulated(device: torch.device) -> torch.device | str:
    """What wrapping is told: on a machine without an accelerator, the one that the library emulates on the CPU."""
    return "emulated" if device.type == "cpu" else device
