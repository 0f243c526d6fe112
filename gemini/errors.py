"""Every error class of gemini, in one place.

User mistakes are one of these (or `TypeError`/`ValueError`); a bare `AssertionError` is always our own bug.
Each message says what is wrong, what was found, and what to do.
"""

from typing import Any


class GeminiError(RuntimeError):
    """Base of all errors that gemini raises on purpose."""


class BudgetError(GeminiError):
    """A tier cannot hold what it is asked to. The message names the tier, the bytes needed and there, and the argument.

    Args:
        message: the message.
        tier: "device" or "host". None where a policy of the user's does not say it.
        needed_bytes: what that tier would have to hold in all. None where nobody knows.
        budget_bytes: what it may hold. None where no budget was set and the machine itself has no memory left.
        enough_bytes: the least `device_memory=` with room for `needed_bytes`, where a part of it is left to
            activations and the message names it.
        needed_numel: elements that slots would have to hold, where `max_live_parameters` is what forbids it.
        is_shortage: the budget would allow it, and the machine itself has no memory left.
    """

    def __init__(
        self,
        message: str,
        *,
        tier: str | None = None,
        needed_bytes: int | None = None,
        budget_bytes: int | None = None,
        enough_bytes: int | None = None,
        needed_numel: int | None = None,
        is_shortage: bool = False,
    ) -> None:
        super().__init__(message)
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.budget_bytes = budget_bytes
        self.enough_bytes = enough_bytes
        self.needed_numel = needed_numel
        self.is_shortage = is_shortage

    def as_shortage(self, is_shortage: bool) -> "BudgetError":
        """The same refusal, of which ranks have agreed whether it is one of the device's memory.

        Local; raises nothing.
        """
        self.is_shortage = is_shortage
        return self

    def reworded(self, message: str, needed_bytes: int | None = None, enough_bytes: int | None = None) -> "BudgetError":
        """The same refusal, with its numbers, in other words. needed_bytes, enough_bytes: in place of its own.

        Local; raises nothing.
        """
        return BudgetError(
            message,
            tier=self.tier,
            needed_bytes=self.needed_bytes if needed_bytes is None else needed_bytes,
            budget_bytes=self.budget_bytes,
            enough_bytes=self.enough_bytes if enough_bytes is None else enough_bytes,
            needed_numel=self.needed_numel,
            is_shortage=self.is_shortage,
        )


class CheckpointError(GeminiError):
    """A checkpoint cannot be written, found or read, or is not this model's.

    The message names the file or the parameter, what was found, and what to do.
    """


class ConfigError(GeminiError):
    """A config cannot be read, or a key of it is not valid. The message names file, line and key, and what is valid."""


class SlotError(GeminiError):
    """No slot can be freed for a fetch. The message names the operator and what holds the slots."""


class DivergenceError(GeminiError):
    """Ranks gave different arguments or reached different collectives. The message names both sides."""


class RemoteRankError(GeminiError):
    """Another rank failed.

    Args:
        rank: the rank that failed.
        message: its error.
    """

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} failed: {message}")
        self.rank = rank
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors are pickled where a launcher reports them from its processes. An exception's default would give
        # `__init__` the message alone.
        return type(self), (self.rank, self.message)


class RankLostError(GeminiError):
    """A rank did not answer within `rank_timeout`, its process was killed, or its connection closed without a word."""


class ReleasedParameterError(GeminiError):
    """A parameter was used outside its operator in a way that needs its memory. The message says what to do instead."""


class StaleGraphError(GeminiError):
    """A backward needs values that have changed since its forward: weights, by a step or an in-place operation."""


class UnsupportedError(GeminiError):
    """Something that gemini refuses because its result would be wrong. The message says what to do instead."""


class UpdatedInBackwardError(GeminiError):
    """The backward has updated weights (`update_in_backward`), and something was asked for that needs those before.

    Raised between `backward()` and `step()`, on every rank that asks. Nothing has changed, and `step()` may follow.
    """


def torn(words: str) -> GeminiError:
    """The error for going on after a failure, described by `words`, that left some weights changed and some not."""
    return GeminiError(
        f"an optimizer step, or a change of what is trained, failed half way ({words}): some weights are changed and "
        "some are not. Build model and optimizer again and load a checkpoint"
    )


def of_closed_optimizer(what: str) -> GeminiError:
    """The error for what comes after the `close()` of a model's optimizer. what: was called."""
    return GeminiError(f"{what} of an optimizer that was closed: use the model's present one")


def closed(use: str = "") -> GeminiError:
    """The error for what comes after the model's `close()`. use: what it needs, in words."""
    why = f" ({use})" if use else ""
    return GeminiError(f"the model is closed: close() comes after the last use, such as state_dict(){why}")
