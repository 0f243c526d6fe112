"""TRL's `SFTTrainer` and `DPOTrainer`, which train sharded under a budget. A script changes the line that imports them.

Arguments are TRL's, and those of `gemini.integrations.transformers.Trainer` that say what to shard and where. The
reference model of DPO, given or loaded from the model's path by TRL, is frozen and sharded as the model is, without an
optimizer. With peft's adapters there is none, as TRL switches the adapters off.
"""

from __future__ import annotations

from typing import Any

import trl

from gemini.integrations.transformers import ShardedTraining

_trl: Any = trl  # its names are made when they are asked for, which type checkers do not see


class SFTTrainer(ShardedTraining, _trl.SFTTrainer):
    """`trl.SFTTrainer`, sharded. Every rank makes and calls it alike. Raises what TRL's and our Trainer raise.

    Example:
        >>> trainer = SFTTrainer(model=model, args=SFTConfig(...), train_dataset=data, device_memory="8GiB")
    """


class DPOTrainer(ShardedTraining, _trl.DPOTrainer):
    """`trl.DPOTrainer`, sharded. Every rank makes and calls it alike. Raises what TRL's and our Trainer raise.

    Example:
        >>> trainer = DPOTrainer(model=model, args=DPOConfig(...), train_dataset=pairs, device_memory="8GiB")
    """
