"""The random number generators of this process: Python's, NumPy's, torch's on the CPU and on the model's device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every generator that belongs to nobody. Plain values and small tensors. Local."""
    found = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if device.type != "cpu":
        found[device.type] = torch.get_device_module(device).get_rng_state(device)
    return found


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Set the generators to what `random_state` returned, also of a process with another device. Local."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
