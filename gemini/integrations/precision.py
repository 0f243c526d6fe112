"""What a library's mixed precision means for a sharded model: the dtype of its weights, and casts around it.

Autocast keeps fp32 weights and casts them for every operation. A sharded model has the weights themselves in 16 bits
and their fp32 masters where the optimizer state is: less memory and traffic, and the same precision of updates. What
goes in and what comes out is cast at the model's border, so that the script around it computes in fp32 as before.
"""

from __future__ import annotations

import torch

from gemini.engine.config import Config
from gemini.errors import ConfigError
from gemini.settings import Weights


def mixed_weights(config: Config, mixed: torch.dtype | None, said: str) -> Weights:
    """`dtype=` of `ShardedModel` for a config and the library's mixed precision. Local.

    mixed: the dtype of mixed precision, None without it. said: how the user said so, for messages.

    Raises ConfigError if the config names another dtype.
    """
    own = config.dtype
    if mixed is None:
        # A config may ask for the casts by itself (`fp16.auto_cast` of DeepSpeed). A mapping of dtypes by module
        # says already where casts are.
        mixed = own if config.cast_inputs and isinstance(own, torch.dtype) else None
        return own if mixed is None else _with_casts(mixed)
    if own is not None and own != mixed:
        raise ConfigError(f"{said}, and the config says dtype={own}: leave one of them out")
    return _with_casts(mixed)


def _with_casts(dtype: torch.dtype) -> Weights:
    """The key "" chooses the root: its floating-point inputs are cast to `dtype`, its outputs back, or else to fp32."""
    return {"": dtype, "*": torch.float32}
