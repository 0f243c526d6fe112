"""ms-swift's Trainers, sharded under a budget. A file of two lines is its plugin (`swift sft --external_plugins FILE`):

    from gemini.integrations.ms_swift import register
    register({"device_memory": "20GiB"})

`--deepspeed` and `--fsdp` are left out. Trainings with several models, such as PPO and GKD, stay as they are.
"""

from __future__ import annotations

import importlib
from typing import Any

from gemini.engine.initialize import Source
from gemini.integrations.transformers import sharded_class

_SHARDED = ("causal_lm", "seq_cls", "embedding", "reranker", "dpo", "orpo", "kto", "cpo", "rm")
_theirs: dict[str, str] = {}  # our name of a Trainer -> where ms-swift has it
_config: Source = None


def register(config: Source = None) -> list[str]:
    """From now on ms-swift makes sharded Trainers. Returns the trainings for which it does. Local.

    config: a config of ours or of DeepSpeed's, or the path of one. None: that of `gemini.launch_from_torch(config=)`,
    else all defaults. A second call replaces the first one's. Raises ImportError without ms-swift.

    Example:
        >>> register({"stage": 3, "device_memory": "20GiB"})
        ['causal_lm', 'seq_cls', 'dpo', 'orpo', 'kto', 'cpo', 'rm']
    """
    global _config
    _config = config
    # ms-swift looks a training's class up in this table, by its dotted name.
    table: dict[str, str] = importlib.import_module("swift.trainers.trainer_factory").TrainerFactory.TRAINER_MAPPING
    kinds = [kind for kind in _SHARDED if kind in table]
    for kind in kinds:
        module, _, name = table[kind].rpartition(".")
        if module != __name__:
            _theirs[name] = table[kind]
            table[kind] = f"{__name__}.{name}"
    return kinds


def __getattr__(name: str) -> Any:
    """The sharded form of a Trainer that `register` has put into the table. Raises AttributeError for any other."""
    if name not in _theirs:
        raise AttributeError(f"{__name__} has no {name!r}: call register() first")
    module, _, theirs = _theirs[name].rpartition(".")
    return sharded_class(getattr(importlib.import_module(module), theirs), _config)
