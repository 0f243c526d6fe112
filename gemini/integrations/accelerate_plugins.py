"""Plugins of Accelerate's that shard or move models themselves: they are refused by name."""

from __future__ import annotations

import os
from typing import Any

from gemini.errors import UnsupportedError

_PLUGINS = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
    "torch_tp_plugin": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
PLAIN = (
    "choose Accelerate's plain training on several processes (accelerate launch --multi_gpu, or torchrun), and give "
    "Accelerator(gemini=...) the stage and the budgets"
)
"""What an error says to do instead."""


def refuse_plugins(given: dict[str, Any]) -> None:
    """Raises UnsupportedError for a plugin among the arguments, or one that `accelerate launch` has set. Local."""
    for name, variable in _PLUGINS.items():
        if given.get(name) is not None:
            raise UnsupportedError(f"{name}= shards or moves models itself: {PLAIN}")
        if os.environ.get(variable, "false").lower() == "true":
            raise UnsupportedError(f"{variable}=true, as `accelerate launch` sets it, is for {name}=: {PLAIN}")
