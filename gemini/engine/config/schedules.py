"""DeepSpeed's learning rate schedules: their arguments, and the rates that follow. Each moves once per optimizer step.

Names and defaults are DeepSpeed's, and rates those of DeepSpeed 0.19.8. Its schedules count from -1, so the first two
steps of a warmup have the same rate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from gemini.engine.config.key import Count, Number

Rates = Number | Annotated[list[Number], Field(min_length=1)]  # one for all param groups, or one for each
Steps = Annotated[Count, Field(gt=0)]


class ScheduleArguments(BaseModel):
    """Arguments of a schedule, and what follows from them."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    def rates(self, step: int, base: Sequence[float]) -> list[float]:
        """The rate of every param group after `step` optimizer steps, which DeepSpeed counts from -1. Local.

        base: of the optimizer. Raises ValueError if a list of rates does not have one for each param group.
        """
        raise NotImplementedError


class WarmupLR(ScheduleArguments):
    """From `warmup_min_lr` to `warmup_max_lr`, where it stays."""

    warmup_min_lr: Rates = 0.0
    """Learning rate before the first step."""
    warmup_max_lr: Rates | None = None
    """Learning rate after the warmup. None: the optimizer's."""
    warmup_num_steps: Count = 1000
    """Optimizer steps of the warmup. It takes at least 2, as in DeepSpeed."""
    warmup_type: Literal["log", "linear"] = "log"
    """How the learning rate rises."""

    def rates(self, step: int, base: Sequence[float]) -> list[float]:
        return _between(self.warmup_min_lr, self._highest(base), _risen(self, step), len(base))

    def _highest(self, base: Sequence[float]) -> Rates:
        return list(base) if self.warmup_max_lr is None else self.warmup_max_lr


class WarmupDecayLR(WarmupLR):
    """`WarmupLR`, then linearly down to 0 at `total_num_steps`."""

    total_num_steps: Steps
    """Optimizer steps of the training."""
    warmup_max_lr: Rates | None = 0.001
    """Learning rate after the warmup. None: the optimizer's."""

    def rates(self, step: int, base: Sequence[float]) -> list[float]:
        warmup = _warmup_steps(self)
        part = _risen(self, step)
        if step >= warmup:
            part = max(0.0, (self.total_num_steps - step) / max(1.0, self.total_num_steps - warmup))
        return _between(self.warmup_min_lr, self._highest(base), part, len(base))


class WarmupCosineLR(ScheduleArguments):
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

    def rates(self, step: int, base: Sequence[float]) -> list[float]:
        warmup = _warmup_steps(self)
        # Before the first step the rate is 0, not `warmup_min_ratio` of it, as in DeepSpeed.
        if step < 0:
            ratio = 0.0
        elif step < warmup:
            ratio = self.warmup_min_ratio + (1.0 - self.warmup_min_ratio) * _risen(self, step)
        else:
            # Behind `total_num_steps` the rate stays at its least. The cosine would rise again.
            done = min(1.0, (step - warmup + 1) / max(1, self.total_num_steps - warmup))
            ratio = max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)
        return [rate * ratio for rate in base]


class LRRangeTest(ScheduleArguments):
    """Rises without an end, to find the largest learning rate that works."""

    lr_range_test_min_lr: Rates = 0.001
    """Learning rate of the first step."""
    lr_range_test_step_size: Steps = 2000
    """Optimizer steps of an interval."""
    lr_range_test_step_rate: Number = 1.0
    """What an interval adds, in parts of the first learning rate."""
    lr_range_test_staircase: bool = False
    """True: rises at the ends of intervals only."""

    def rates(self, step: int, base: Sequence[float]) -> list[float]:
        intervals = (step + 1) / self.lr_range_test_step_size
        if self.lr_range_test_staircase:
            intervals = math.floor(intervals)
        factor = 1 + self.lr_range_test_step_rate * intervals
        return [rate * factor for rate in _of_groups(self.lr_range_test_min_lr, len(base))]


class OneCycle(ScheduleArguments):
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

    def rates(self, step: int, base: Sequence[float]) -> list[float]:
        after = step - self._cycle_steps + 1
        if after <= 0:
            return _between(self.cycle_min_lr, self.cycle_max_lr, self._cycled(step + 1), len(base))
        decay = self._decay(self.decay_lr_rate, after)
        return [rate / decay for rate in _of_groups(self.cycle_min_lr, len(base))]

    def momentum(self, step: int) -> float:
        """The first beta, which falls while the rate rises; before the first step the smallest, as in DeepSpeed."""
        if step < 0:
            return self.cycle_min_mom
        after = step - self._cycle_steps + 1
        if after <= 0:
            return self.cycle_max_mom - (self.cycle_max_mom - self.cycle_min_mom) * self._cycled(step + 1)
        # After the cycle DeepSpeed divides the rate by its decay, and multiplies momentum by it: the first beta grows,
        # and passes 1 in a training that is long enough.
        return self.cycle_max_mom * self._decay(self.decay_mom_rate, after)

    def _decay(self, rate: float, steps: int) -> float:
        """By how much so many steps after the cycle decay a value."""
        return 1.0 + rate * steps / self.decay_step_size if self.decay_step_size else 1.0

    @property
    def _cycle_steps(self) -> int:
        return self.cycle_first_step_size + self._second_steps

    @property
    def _second_steps(self) -> int:
        second = self.cycle_second_step_size
        return self.cycle_first_step_size if second is None else second

    def _cycled(self, step: int) -> float:
        """The position of `step` in a cycle: 0 at its ends, 1 where the rate is largest."""
        place, first, second = step % self._cycle_steps, self.cycle_first_step_size, self._second_steps
        rises = place <= first
        stairs = self.cycle_first_stair_count
        if not rises and self.cycle_second_stair_count is not None:
            stairs = self.cycle_second_stair_count
        done, of = (place, first) if rises else (first + second - place, second)
        # With stairs the fraction is rounded down to whole stairs.
        return math.floor(done * stairs / of) / stairs if stairs else done / of


SCHEDULES: dict[str, type[ScheduleArguments]] = {
    each.__name__: each for each in (WarmupLR, WarmupDecayLR, WarmupCosineLR, LRRangeTest, OneCycle)
}


def _risen(its: WarmupLR | WarmupCosineLR, step: int) -> float:
    """The completed fraction of the warmup, from 0 to 1."""
    warmup = _warmup_steps(its)
    if step < 0:
        return 0.0
    if step >= warmup:
        return 1.0
    return math.log(step + 1) / math.log(warmup) if its.warmup_type == "log" else step / warmup


def _warmup_steps(its: WarmupLR | WarmupCosineLR) -> int:
    # DeepSpeed's bound, without which the logarithmic warmup would divide by log(1).
    return max(2, its.warmup_num_steps)


def _between(low: Rates, high: Rates, part: float, num_groups: int) -> list[float]:
    lows, highs = _of_groups(low, num_groups), _of_groups(high, num_groups)
    return [one + (other - one) * part for one, other in zip(lows, highs, strict=True)]


def _of_groups(rates: Rates, num_groups: int) -> list[float]:
    if not isinstance(rates, list):
        return [rates] * num_groups
    if len(rates) != num_groups:
        raise ValueError(f"a schedule has {len(rates)} learning rates and the optimizer {num_groups} param groups")
    return rates
