"""DeepSpeed's learning rate schedules: their arguments. Each moves once per optimizer step.

Names and defaults are DeepSpeed's.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gemini.engine.config.key import Count, Number

Rates = Number | Annotated[list[Number], Field(min_length=1)]  # one for all param groups, or one for each
Steps = Annotated[Count, Field(gt=0)]


class Schedule(BaseModel):
    """Arguments of a schedule."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


class WarmupLR(Schedule):
    """From `warmup_min_lr` to `warmup_max_lr`, where it stays."""

    warmup_min_lr: Rates = 0.0
    """Learning rate before the first step."""
    warmup_max_lr: Rates | None = None
    """Learning rate after the warmup. None: the optimizer's."""
    warmup_num_steps: Count = 1000
    """Optimizer steps of the warmup. It takes at least 2, as in DeepSpeed."""
    warmup_type: Literal["log", "linear"] = "log"
    """How the learning rate rises."""


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linearly down to 0 at `total_num_steps`."""

    total_num_steps: Steps
    """Optimizer steps of the training."""
    warmup_max_lr: Rates | None = 0.001
    """Learning rate after the warmup. None: the optimizer's."""


class WarmupCosineLR(Schedule):
    """A warmup to the optimizer's learning rate, then half a cosine."""

    total_num_steps: Steps
    """Optimizer steps of the training."""
    warmup_min_ratio: Number = 0.0
    """Part of the optimizer's learning rate before the first step."""
    warmup_num_steps: Count = 1000
    """Optimizer steps of the warmup. It takes at least 2, as in DeepSpeed."""
    cos_min_ratio: Number = 0.0001
    """Part of the optimizer's learning rate at the end."""
    warmup_type: Literal["log", "linear"] = "log"
    """How the learning rate rises."""


class LRRangeTest(Schedule):
    """Rises without an end, to find the largest learning rate that works."""

    lr_range_test_min_lr: Rates = 0.001
    """Learning rate of the first step."""
    lr_range_test_step_size: Steps = 2000
    """Optimizer steps of an interval."""
    lr_range_test_step_rate: Number = 1.0
    """What an interval adds, in parts of the first learning rate."""
    lr_range_test_staircase: bool = False
    """True: rises at the ends of intervals only."""


class OneCycle(Schedule):
    """Up, down, then decays."""

    cycle_min_lr: Rates
    """Learning rate at both ends of the cycle."""
    cycle_max_lr: Rates
    """Learning rate in its middle."""
    decay_lr_rate: Number = 0.0
    """Decay per interval after the cycle."""
    cycle_first_step_size: Steps = 2000
    """Optimizer steps of the rise."""
    cycle_second_step_size: Steps | None = None
    """Optimizer steps of the fall. None: as many."""
    cycle_first_stair_count: Count = 0
    """Stairs of the rise. 0: none."""
    cycle_second_stair_count: Count | None = None
    """Stairs of the fall. None: as many."""
    decay_step_size: Count = 0
    """Optimizer steps of a decay interval. 0: no decay."""
    cycle_momentum: bool = True
    """Whether momentum goes the other way."""
    cycle_min_mom: Number = 0.8
    """Momentum in the middle of the cycle."""
    cycle_max_mom: Number = 0.9
    """Momentum at both ends of it."""
    decay_mom_rate: Number = 0.0
    """Decay of momentum per interval after the cycle."""


SCHEDULES: dict[str, type[Schedule]] = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}
