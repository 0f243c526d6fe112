"""The dynamic loss scale of fp16 training (Micikevicius et al. 2018, section 3.2), with hysteresis.

A step with a non-finite gradient is skipped. The first `hysteresis` - 1 skipped steps leave the scale as it is, and
every further one multiplies it by `backoff_factor`. `growth_interval` good steps in a row multiply it by
`growth_factor` and reset the count of skipped steps; nothing else resets it (as in Megatron and Colossal-AI). Numbers
only.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from gemini.errors import GeminiError

MAX_SKIPPED = 20
# A state dict has only what steps change: bounds and factors are those of the optimizer that loads it.
_STATE = ("scale", "num_good", "num_bad", "num_skipped")


@dataclass
class LossScale:
    """The loss scale with its bounds, factors and counters. All of them are equal on all ranks."""

    initial_scale: float = 2.0**16
    min_scale: float = 1.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 1000
    hysteresis: int = 2
    max_scale: float = 2.0**32
    scale: float = 0.0
    num_good: int = 0  # steps since the last growth or skip
    num_bad: int = 0  # skips since the last growth
    num_skipped: int = 0  # in a row

    def __post_init__(self) -> None:
        for name in ("initial_scale", "min_scale", "growth_factor", "backoff_factor", "max_scale"):
            value = getattr(self, name)
            # In Python a bool is an int: True would pass for 1.
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
                raise ValueError(f"{name} must be a finite number above 0, found {value!r}")
            setattr(self, name, float(value))
        for name in ("growth_interval", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, found {value!r}")
        if self.growth_factor < 1 or self.backoff_factor >= 1:
            raise ValueError(
                f"growth_factor must be at least 1 and backoff_factor below 1, found {self.growth_factor} and "
                f"{self.backoff_factor}"
            )
        if not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale={self.initial_scale} must lie between min_scale={self.min_scale} and "
                f"max_scale={self.max_scale}"
            )
        # 0 is the default of the field, which is no valid scale: it stands for one that nobody has set.
        self.scale = self.scale or self.initial_scale

    def update(self, skipped: bool) -> None:
        """Adjust the scale after a step. skipped: the step had a non-finite gradient and changed nothing."""
        if skipped:
            self.num_good = 0
            self.num_skipped += 1
            self.num_bad += 1
            if self.num_bad >= self.hysteresis:
                self.scale = max(self.scale * self.backoff_factor, self.min_scale)
            return
        self.num_skipped = 0
        self.num_good += 1
        if self.num_good >= self.growth_interval:  # more, if it was loaded with a longer interval
            self.num_good = self.num_bad = 0
            self.scale = min(self.scale * self.growth_factor, self.max_scale)

    def refuse_endless_skips(self, parameter: str, scale: float) -> None:
        """Raises GeminiError after MAX_SKIPPED skipped steps in a row, once the scale cannot fall any more.

        scale: of the last of these steps. A lower one, which no step has tried yet, may still help.
        """
        if self.num_skipped >= MAX_SKIPPED and scale <= self.min_scale:
            raise GeminiError(
                f"{self.num_skipped} steps in a row were skipped: the gradient of {parameter!r} is not finite at the "
                f"least loss scale, {scale:g}, either. Training has diverged, or computes something that fp16 cannot "
                "hold: lower the learning rate, or use dtype=torch.bfloat16"
            )

    def state_dict(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if name in _STATE}

    @staticmethod
    def check_state(state: dict[str, Any]) -> None:
        """Raises ValueError for a state that `load_state_dict` would refuse."""
        if not isinstance(state, dict) or sorted(state) != sorted(_STATE):
            raise ValueError(f"a loss scale's state has {', '.join(_STATE)}, found {state!r}")
        for name, value in state.items():
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
                raise ValueError(f"{name} of a loss scale must be a number, found {value!r}")
        # With a scale of 0 every gradient would be 0, and the step divides by the scale.
        if not state["scale"]:
            raise ValueError("scale of a loss scale must be more than 0, found 0")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Adopt the scale, within the bounds of this one, and the counters. Raises what `check_state` raises."""
        self.check_state(state)
        self.scale = min(max(float(state["scale"]), self.min_scale), self.max_scale)
        self.num_good, self.num_bad, self.num_skipped = (int(state[name]) for name in _STATE[1:])
