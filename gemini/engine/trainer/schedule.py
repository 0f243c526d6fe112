"""The hook that moves a schedule which is the script's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemini.engine.moving import moves_by_metric
from gemini.engine.trainer.metrics import LearningRate
from gemini.errors import UnsupportedError

if TYPE_CHECKING:
    from gemini.engine.trainer.trainer import Trainer


class LRSchedulerHook(LearningRate):
    """Moves a schedule, under Colossal-AI's name: after every optimizer step that was not skipped, or every epoch.

    `Trainer.fit` makes one itself, by step, for a schedule that was given to `initialize` as an object.

    Args:
        lr_scheduler: of the engine's optimizer.
        by_epoch: whether it counts epochs. False: optimizer steps.
        store_lr_in_state: whether the rate of each step is put into `trainer.metrics` as `lr`.
        priority: see `Hook`.

    Raises UnsupportedError for a schedule that moves by a metric.
    """

    def __init__(
        self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = LearningRate.priority
    ) -> None:
        super().__init__()
        if moves_by_metric(lr_scheduler):
            raise UnsupportedError(
                "ReduceLROnPlateau moves by a metric: call its step(metric) in the after_test() of a hook of your own"
            )
        self.schedule, self.by_epoch, self.priority = lr_scheduler, by_epoch, priority
        self._stores = store_lr_in_state

    def before_train(self, trainer: Trainer) -> None:
        """Raises UnsupportedError if the engine moves the schedule already."""
        # Both would call `step()`, and the schedule would move twice for each update.
        if trainer.engine.moves_schedule and trainer.engine.lr_scheduler is self.schedule:
            raise UnsupportedError(
                "LRSchedulerHook: the engine moves this schedule after every optimizer step, since the config or a "
                "callable made it: leave the hook out, or give initialize(lr_scheduler=...) a schedule"
            )

    def after_step(self, trainer: Trainer) -> None:
        if self._stores:
            super().after_step(trainer)
        # A schedule that was given to the hook as it is, not as `initialize` returned it, does not know of skipped
        # steps.
        report = trainer.optimizer.last_step
        if not self.by_epoch and (report is None or report.skipped is None):
            self.schedule.step()

    def after_epoch(self, trainer: Trainer) -> None:
        if self.by_epoch:
            self.schedule.step()
