"""`PreparedOptimizer`: a sharded optimizer in Accelerate's hands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer

from gemini.optimizer.sharded_optimizer import ShardedOptimizer


class Whole(Enum):
    """Where `state_dict()` has the whole state."""

    ON_ALL = "on all ranks"
    ON_RANK_0 = "on rank 0, which writes it"
    NOWHERE = "nowhere: each rank writes its part"


class PreparedOptimizer(AcceleratedOptimizer):
    """A `ShardedOptimizer` as Accelerate hands it out: it steps where a window of micro-batches is full."""

    optimizer: ShardedOptimizer
    # This is an attribute because Accelerate calls `state_dict()` without arguments.
    _whole = Whole.ON_ALL

    def state_dict(self) -> dict[str, Any]:
        """See `ShardedOptimizer.state_dict`. Collective. Raises GeminiError inside a forward or backward."""
        if self._whole is Whole.NOWHERE:
            return {}
        return self.optimizer.state_dict(rank0_only=self._whole is Whole.ON_RANK_0)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `ShardedOptimizer.load_state_dict`; an empty one stands for a state that ranks have in parts."""
        if state_dict:
            self.optimizer.load_state_dict(state_dict)

    @contextmanager
    def showing(self, whole: Whole) -> Iterator[None]:
        """Inside, `state_dict()` is empty on the other ranks. Local. Raises nothing."""
        self._whole = whole
        try:
            yield
        finally:
            self._whole = Whole.ON_ALL

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed nothing, since a gradient was not finite: schedules stay then. Local."""
        # Accelerate's own flag is set by its GradScaler alone, which does not exist here.
        report = self.optimizer.last_step
        return report is not None and report.skipped is not None
