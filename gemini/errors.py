"""Every error class of gemini, in one place.

User mistakes are one of these (or `TypeError`/`ValueError`); a bare `AssertionError` is always our own bug.
Each message says what is wrong, what was found, and what to do.
"""

from typing import Any


class GeminiError(RuntimeError):
    """Base of all errors that gemini raises on purpose."""


class BudgetError(GeminiError):
    """A tier cannot hold what was asked of it: names tier, bytes needed, bytes there, and the knob.

    `tier` and `needed_bytes` (of the tier in all) are for whoever tries something smaller; None where nobody can.
    """

    def __init__(self, message: str, *, tier: str | None = None, needed_bytes: int | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes


class SlotError(GeminiError):
    """No slot can be freed for a fetch: names the operator and what holds the slots."""


class DivergenceError(GeminiError):
    """Ranks reached different collectives: names the operators of both sides."""


class RemoteRankError(GeminiError):
    """Another rank failed; carries its rank and its message."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank = rank
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        # the default would hand the message to __init__; errors cross processes when a launcher reports
        return type(self), (self.rank, self.message)


class RankLostError(GeminiError):
    """A rank did not answer within `rank_timeout`, or its connection closed without a word."""


class ReleasedParameterError(GeminiError):
    """A released parameter was used in a way that needs its memory: names the parameter and the way to do it."""


class StaleGraphError(GeminiError):
    """backward() needs what has changed since the forward: weights by a step, or a tensor by an in-place operation."""


class UnsupportedError(GeminiError):
    """Something that gemini refuses rather than gets wrong (double backward, deepcopy, GradScaler)."""


def torn(words: str) -> GeminiError:
    """The error for going on after a failure, described by `words`, that left some weights changed and some not."""
    return GeminiError(
        f"an optimizer step, or a change of what is trained, failed half way ({words}): some weights are changed and "
        "some are not. Build model and optimizer anew and load a checkpoint"
    )
