"""What a hook of a `Trainer` is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gemini.engine.trainer.batches import Outcome

if TYPE_CHECKING:
    from gemini.engine.trainer.trainer import Trainer


class Hook:
    """A hook is called at points of a `Trainer`'s loop, after hooks of a smaller `priority`, equals in the order given.

    Override what is needed. What a hook raises ends the training on every rank. A hook that makes collectives makes
    them on every rank. All methods are called on every rank.
    """

    priority = 50
    """Metrics that are measured have 0 to 49, those who write them 50 and more."""

    def before_train(self, trainer: Trainer) -> None:
        """Called before the first epoch."""

    def before_epoch(self, trainer: Trainer) -> None:
        """Called before an epoch's first micro-batch."""

    def after_micro_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        """Called after a backward, before a step."""

    def after_step(self, trainer: Trainer) -> None:
        """Called after an optimizer step, also one that was skipped."""

    def after_epoch(self, trainer: Trainer) -> None:
        """Called after an epoch's last step, before its evaluation."""

    def before_test(self, trainer: Trainer) -> None:
        """Called before an evaluation's first forward."""

    def after_test_batch(self, trainer: Trainer, batch: Any, outcome: Outcome) -> None:
        """Called after a forward of an evaluation."""

    def after_test(self, trainer: Trainer) -> None:
        """Called after an evaluation."""

    def after_train(self, trainer: Trainer) -> None:
        """Called when the training ends, also by a signal; not after an exception."""
