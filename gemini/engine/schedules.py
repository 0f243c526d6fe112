"""Learning rates and other settings that move while training goes on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gemini.engine.config.config import TORCH_SCHEDULES, SchedulerConfig
from gemini.engine.config.key import (
    SCHEDULES,
    LRRangeTest,
    OneCycle,
    Rates,
    ScheduleArguments,
    WarmupCosineLR,
    WarmupDecayLR,
    WarmupLR,
)
from gemini.log import warn_at_script

# -- MovingSchedule a learning rate schedule: by the engine after every optimizer step, or by the script that passed it.
#
# The engine moves a schedule that the config names, as DeepSpeed's does. In Colossal-AI's call form a schedule that is
# passed as an object is moved by the script: it, or a hook of the `Trainer`, calls `lr_scheduler.step()` after a step
# or an epoch.


class MovingSchedule(Protocol):
    """A schedule of an engine, and the events by which it moves."""

    @property
    def shown(self) -> Any:
        """The schedule that users see."""

    def after_backward(self) -> None:
        """Called after the backward of a micro-batch."""

    def after_update(self) -> None:
        """Called after an optimizer step that was not skipped."""

    def after_load(self) -> None:
        """Called after the schedule has taken the state of a checkpoint."""


class MovedByEngine:
    """Moves the schedule once after each update. Warns if the script moves it too, which would skip rates."""

    def __init__(self, schedule: Any) -> None:
        self.shown = schedule
        # `last_epoch` of the schedule after its last move. None before: a script may load a checkpoint's count first.
        self._count: int | None = None

    def after_backward(self) -> None:
        """Nothing happens at a backward: the schedule moves with updates."""

    def after_update(self) -> None:
        count = getattr(self.shown, "last_epoch", None)
        # A smaller count is that of a checkpoint which the script has loaded. A schedule that is not torch's may have
        # no count.
        if self._count is not None and count is not None and count > self._count:
            warn_at_script(
                f"the schedule has moved by {count - self._count} since the last optimizer step: the engine moves it "
                "after every one, so leave out lr_scheduler.step()"
            )
        self.shown.step()
        self._count = getattr(self.shown, "last_epoch", None)

    def after_load(self) -> None:
        """The count of the checkpoint is no move of the script's."""
        self._count = None


class MovedByScript:
    """A schedule whose `step()` the script calls: after a micro-batch, a step or an epoch, or to reach a checkpoint.

    A call has no effect if there were backwards since the last move but no update: the window of micro-batches is open,
    or the step was skipped. Other attributes are those of the schedule.
    """

    def __init__(self, schedule: Any) -> None:
        self.plain = schedule
        # Both are since the last move. Without either, as before the first step, a call moves the schedule: a script
        # may call `step()` in a loop to reach the count of a checkpoint.
        self._has_gradients = self._has_update = False

    @property
    def shown(self) -> MovedByScript:
        """The object itself."""
        return self

    def after_backward(self) -> None:
        """Let `step()` wait for an update."""
        self._has_gradients = True

    def after_update(self) -> None:
        """Let `step()` move the schedule again."""
        self._has_update = True

    def after_load(self) -> None:
        """Let `step()` move the schedule: there were no backwards since."""
        self._has_gradients = self._has_update = False

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Call the schedule's `step` with its arguments, such as a metric. Local, alike on every rank."""
        # Scripts for Colossal-AI call this after every micro-batch, whatever the window is. Without the test the
        # schedule would move as often, and also after skipped steps.
        if self._has_gradients and not self._has_update:
            return
        self.plain.step(*args, **kwargs)
        self._has_gradients = self._has_update = False

    def __getattr__(self, name: str) -> Any:
        """Forward `state_dict()`, `get_last_lr()`, `last_epoch` and all other attributes to the schedule."""
        # `copy` looks up attributes before `plain` is set. Without this the lookup would recurse for ever.
        if "plain" not in vars(self):
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __repr__(self) -> str:
        return repr(self.plain)


def moves_by_metric(schedule: Any) -> bool:
    """Whether `step` of this schedule, or of this class of schedules, takes a metric. Local."""
    # `LRSchedulerHook` is also given what `initialize` has returned, which is no `ReduceLROnPlateau` itself.
    if isinstance(schedule, MovedByScript):
        schedule = schedule.plain
    kind = schedule if inspect.isclass(schedule) else type(schedule)
    return issubclass(kind, ReduceLROnPlateau)


# -- Learning rate schedules that a config names: torch's own, and DeepSpeed's as torch schedulers.
#
# A schedule moves once per optimizer step. The rates are those of DeepSpeed 0.19.8. Its schedules count from -1, so the
# first two steps of a warmup have the same rate, and torch's `last_epoch` is DeepSpeed's count plus one.


# The second beta while the first one is cycled. DeepSpeed sets it, too, whatever the optimizer's own is.
_BETA2 = 0.99


def make_schedule(config: SchedulerConfig, optimizer: Optimizer) -> LRScheduler:
    """The schedule that a config names, for an optimizer's param groups, which it sets to its first rates.

    Raises ValueError if a list of rates does not have one for each param group.
    """
    if config.type in SCHEDULES:
        return NamedSchedule(optimizer, SCHEDULES[config.type].model_validate(config.params))
    made: LRScheduler = TORCH_SCHEDULES[config.type](optimizer, **config.params)
    return made


class NamedSchedule(LRScheduler):
    """One of DeepSpeed's schedules."""

    def __init__(self, optimizer: Optimizer, arguments: ScheduleArguments) -> None:
        self._arguments = arguments
        self._cycles_betas = isinstance(arguments, OneCycle) and arguments.cycle_momentum
        # As in DeepSpeed, momentum is not cycled where the optimizer has no betas.
        if "betas" not in optimizer.defaults:
            self._cycles_betas = False
        # This comes last: torch asks for the first rates here, which follow from what is set above.
        super().__init__(optimizer)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        """The rate of every param group after `last_epoch` optimizer steps. Local; changes betas too in a cycle."""
        # `step` is DeepSpeed's count, which is -1 before the first step. All formulas below are written in it.
        groups, step = self.optimizer.param_groups, self.last_epoch - 1
        if self._cycles_betas:
            assert isinstance(self._arguments, OneCycle)
            # torch's base class only sets `lr`, so betas are written here: torch asks for the rates at every move.
            for group in groups:
                group["betas"] = _momentum(self._arguments, step), _BETA2
        return _RATES[type(self._arguments)](self._arguments, step, self.base_lrs)

    def state_dict(self) -> dict[str, Any]:
        """The progress of the schedule, without its arguments. Local."""
        # torch puts the whole `__dict__` there. The arguments are an object of a class of ours, which neither JSON nor
        # `torch.load(weights_only=True)` takes, and the config has them in any case.
        return {name: value for name, value in super().state_dict().items() if name != "_arguments"}


def _warmup(its: WarmupLR, step: int, base: Sequence[float]) -> list[float]:
    return _between(its.warmup_min_lr, _highest(its, base), _risen(its, step), len(base))


def _warmup_decay(its: WarmupDecayLR, step: int, base: Sequence[float]) -> list[float]:
    warmup = _warmup_steps(its)
    part = _risen(its, step)
    if step >= warmup:
        part = max(0.0, (its.total_num_steps - step) / max(1.0, its.total_num_steps - warmup))
    return _between(its.warmup_min_lr, _highest(its, base), part, len(base))


def _highest(its: WarmupLR, base: Sequence[float]) -> Rates:
    return list(base) if its.warmup_max_lr is None else its.warmup_max_lr


def _warmup_cosine(its: WarmupCosineLR, step: int, base: Sequence[float]) -> list[float]:
    warmup = _warmup_steps(its)
    # Before the first step the rate is 0, not `warmup_min_ratio` of it, as in DeepSpeed.
    if step < 0:
        ratio = 0.0
    elif step < warmup:
        ratio = its.warmup_min_ratio + (1.0 - its.warmup_min_ratio) * _risen(its, step)
    else:
        # Behind `total_num_steps` the rate stays at its least. The cosine would rise again.
        done = min(1.0, (step - warmup + 1) / max(1, its.total_num_steps - warmup))
        ratio = max(0.0, its.cos_min_ratio + (1.0 - its.cos_min_ratio) * (1 + math.cos(math.pi * done)) / 2)
    return [rate * ratio for rate in base]


def _range_test(its: LRRangeTest, step: int, base: Sequence[float]) -> list[float]:
    intervals = (step + 1) / its.lr_range_test_step_size
    if its.lr_range_test_staircase:
        intervals = math.floor(intervals)
    factor = 1 + its.lr_range_test_step_rate * intervals
    return [rate * factor for rate in _of_groups(its.lr_range_test_min_lr, len(base))]


def _one_cycle(its: OneCycle, step: int, base: Sequence[float]) -> list[float]:
    after = step - _cycle_steps(its) + 1
    if after <= 0:
        return _between(its.cycle_min_lr, its.cycle_max_lr, _cycled(its, step + 1), len(base))
    decay = 1.0
    if its.decay_step_size and its.decay_lr_rate:
        decay += its.decay_lr_rate * after / its.decay_step_size
    return [rate / decay for rate in _of_groups(its.cycle_min_lr, len(base))]


def _momentum(its: OneCycle, step: int) -> float:
    """The first beta, which falls while the rate rises. Before the first step it is the smallest, as in DeepSpeed."""
    if step < 0:
        return its.cycle_min_mom
    after = step - _cycle_steps(its) + 1
    if after <= 0:
        return its.cycle_max_mom - (its.cycle_max_mom - its.cycle_min_mom) * _cycled(its, step + 1)
    # After the cycle DeepSpeed divides the rate by its decay, and multiplies momentum by it: the first beta grows, and
    # passes 1 in a training that is long enough.
    decay = 1.0
    if its.decay_step_size and its.decay_mom_rate:
        decay += its.decay_mom_rate * after / its.decay_step_size
    return its.cycle_max_mom * decay


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


def _cycle_steps(its: OneCycle) -> int:
    return its.cycle_first_step_size + _second_steps(its)


def _second_steps(its: OneCycle) -> int:
    second = its.cycle_second_step_size
    return its.cycle_first_step_size if second is None else second


def _cycled(its: OneCycle, step: int) -> float:
    """The position of `step` in a cycle: 0 at its ends, 1 where the rate is largest."""
    place, first, second = step % _cycle_steps(its), its.cycle_first_step_size, _second_steps(its)
    rises = place <= first
    stairs = its.cycle_first_stair_count
    if not rises and its.cycle_second_stair_count is not None:
        stairs = its.cycle_second_stair_count
    done, of = (place, first) if rises else (first + second - place, second)
    # With stairs the fraction is rounded down to whole stairs.
    return math.floor(done * stairs / of) / stairs if stairs else done / of


def _between(low: Rates, high: Rates, part: float, num_groups: int) -> list[float]:
    lows, highs = _of_groups(low, num_groups), _of_groups(high, num_groups)
    return [one + (other - one) * part for one, other in zip(lows, highs, strict=True)]


def _of_groups(rates: Rates, num_groups: int) -> list[float]:
    if not isinstance(rates, list):
        return [rates] * num_groups
    if len(rates) != num_groups:
        raise ValueError(f"a schedule has {len(rates)} learning rates and the optimizer {num_groups} param groups")
    return rates


_RATES: dict[type[ScheduleArguments], Callable[..., list[float]]] = {
    WarmupLR: _warmup,
    WarmupDecayLR: _warmup_decay,
    WarmupCosineLR: _warmup_cosine,
    LRRangeTest: _range_test,
    OneCycle: _one_cycle,
}
