"""`PreparedOptimizer`: a sharded optimizer in Accelerate's hands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from gemini.optimizer.sharded_optimizer import ShardedOptimizer


class PreparedOptimizer(AcceleratedOptimizer):
    """A `ShardedOptimizer` as Accelerate hands it out: it steps where a window of micro-batches is full."""

    optimizer: ShardedOptimizer
    # This is an attribute because Accelerate calls `state_dict()` without arguments.
    _rank0_only = False

    def state_dict(self) -> dict[str, Any]:
        """See `ShardedOptimizer.state_dict`. Collective. Raises GeminiError inside a forward or backward."""
        return self.optimizer.state_dict(rank0_only=self._rank0_only)

    @contextmanager
    def for_rank_0(self) -> Iterator[None]:
        """Inside, `state_dict()` is empty on the other ranks, which write no file. Local. Raises nothing."""
        self._rank0_only = True
        try:
            yield
        finally:
            self._rank0_only = False

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, since a gradient was not finite: schedules stay then. Local."""
        # Accelerate's own flag is set by its GradScaler alone, which does not exist here.
        report = self.optimizer.last_step
        return report is not None and report.skipped is not None
