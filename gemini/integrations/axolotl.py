"""A plugin of Axolotl's with which its Trainers train sharded under a budget. Two keys of its YAML file:

plugins:
  - gemini.integrations.axolotl.GeminiPlugin
gemini:                  # a config of ours or of DeepSpeed's, or the path of one
  device_memory: 20GiB
"""

from __future__ import annotations

import importlib
from typing import Any

from gemini.integrations.needed import needed

with needed("axolotl"):
    from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel

from gemini.errors import UnsupportedError
from gemini.integrations.transformers import sharded_class

# By the key `rl` of the file, and by those of reward models.
_TRAINERS = {
    None: "AxolotlTrainer",
    "dpo": "AxolotlDPOTrainer",
    "ipo": "AxolotlDPOTrainer",
    "kto": "AxolotlKTOTrainer",
    "orpo": "AxolotlORPOTrainer",
    "simpo": "AxolotlCPOTrainer",
    "reward_model": "AxolotlRewardTrainer",
    "process_reward_model": "AxolotlPRMTrainer",
}


class GeminiArgs(BaseModel):
    """What Axolotl's file may have beside its own keys."""

    gemini: dict[str, Any] | str | None = None


class GeminiPlugin(BasePlugin):
    """Axolotl's own Trainer for a file, sharded. Axolotl makes it, and calls its methods. Local."""

    def get_input_args(self) -> str:
        """The keys that this plugin adds, by name. Raises nothing."""
        return f"{__name__}.{GeminiArgs.__name__}"

    def get_trainer_cls(self, cfg: Any) -> type:
        """The class. Raises UnsupportedError for a training in which more than one model is trained or sampled."""
        rl = cfg.get("rl")
        kind = str(getattr(rl, "value", rl)) if rl else None
        for name in ("reward_model", "process_reward_model"):
            kind = name if kind is None and cfg.get(name) else kind
        if kind not in _TRAINERS:
            known = ", ".join(name for name in _TRAINERS if name is not None)
            raise UnsupportedError(f"rl: {kind} of Axolotl has no sharded Trainer here: there are {known}, and none")
        theirs = getattr(importlib.import_module("axolotl.core.trainers"), _TRAINERS[kind])
        return sharded_class(theirs, cfg.get("gemini"))
