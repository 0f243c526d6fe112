"""Learning rates and other settings that move while training goes on."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from gemini.engine.config.config import TORCH_SCHEDULES, SchedulerConfig
from gemini.engine.config.schedules import SCHEDULES, OneCycle, ScheduleArguments
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
# A schedule moves once per optimizer step. DeepSpeed's counts begin at -1: torch's `last_epoch` is one more.


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
        # `step` is DeepSpeed's count, which is -1 before the first step. The formulas are written in it.
        groups, step = self.optimizer.param_groups, self.last_epoch - 1
        if self._cycles_betas:
            assert isinstance(self._arguments, OneCycle)
            # torch's base class only sets `lr`, so betas are written here: torch asks for the rates at every move.
            for group in groups:
                group["betas"] = self._arguments.momentum(step), _BETA2
        base: list[Any] = self.base_lrs  # an optimizer may have a tensor for a rate
        return self._arguments.rates(step, base)

    def state_dict(self) -> dict[str, Any]:
        """The progress of the schedule, without its arguments. Local."""
        # torch puts the whole `__dict__` there. The arguments are an object of a class of ours, which neither JSON nor
        # `torch.load(weights_only=True)` takes, and the config has them in any case.
        return {name: value for name, value in super().state_dict().items() if name != "_arguments"}
