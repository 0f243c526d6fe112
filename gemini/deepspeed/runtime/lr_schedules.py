"""`deepspeed.runtime.lr_schedules`: the schedules that a config names, made by the script itself."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gemini.elsewhere import refusing
from gemini.engine.config.config import SchedulerConfig
from gemini.engine.schedules import make_schedule

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]


def _made(name: str, optimizer: Optimizer, *, last_batch_iteration: int = -1, **params: Any) -> LRScheduler:
    """The schedule of this name, as `{"scheduler": {"type": name, "params": params}}` makes it. Local.

    last_batch_iteration: -1, from the start. A schedule that goes on takes `load_state_dict`.

    Raises ValueError for arguments that the schedule does not have.
    """
    if last_batch_iteration != -1:
        raise ValueError(
            f"{name}(last_batch_iteration={last_batch_iteration}): a schedule begins at its start; give its "
            "load_state_dict() what it had in the checkpoint"
        )
    return make_schedule(SchedulerConfig(type=name, params=params), optimizer)


LRRangeTest = partial(_made, "LRRangeTest")
OneCycle = partial(_made, "OneCycle")
WarmupCosineLR = partial(_made, "WarmupCosineLR")
WarmupDecayLR = partial(_made, "WarmupDecayLR")
WarmupLR = partial(_made, "WarmupLR")

__getattr__ = refusing(__name__)
