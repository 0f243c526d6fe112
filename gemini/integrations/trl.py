"""TRL's Trainers, which train sharded under a budget. A script changes the line that imports them.

Arguments are TRL's, and those of `gemini.integrations.transformers.Trainer` that say what to shard and where. The
reference model of DPO, given or loaded from the model's path by TRL, is frozen and sharded as the model is, without an
optimizer. With peft's adapters there is none, as TRL switches the adapters off.

Every other Trainer of TRL's that is one of transformers' has its name here too: `RewardTrainer`, `GRPOTrainer`, ...
"""

from __future__ import annotations

from typing import Any

from gemini.integrations.needed import needed

with needed("transformers", "trl"):
    import transformers
    import trl

from gemini.integrations.transformers import ShardedTraining, sharded_class

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


def __getattr__(name: str) -> Any:
    """The sharded form of a Trainer of TRL's that has no class above. Raises AttributeError for any other name."""
    theirs = getattr(_trl, name, None) if name.endswith("Trainer") else None
    if not isinstance(theirs, type) or not issubclass(theirs, transformers.Trainer):
        raise AttributeError(f"trl {trl.__version__} has no Trainer {name!r}, and gemini.integrations.trl no such name")
    ours = sharded_class(theirs)
    ours.__module__ = __name__
    globals()[name] = ours  # one class for all who ask, as pickle and isinstance expect
    return ours
