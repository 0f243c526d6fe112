"""The exponential moving average of the weights (EMA): its settings, how many there were, and the weights in its place.

The average is one more flat state of each chunk, fp32 beside fp32 masters: it rests and is sharded as the moments are,
and is moved by the update that changes the weights, while these are where the update runs. Chunks that a step does not
update are averaged by the step all the same, as `torch.optim.swa_utils.AveragedModel` averages every parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from typing import Any

from gemini.errors import GeminiError, UnsupportedError

_END = "the end of optimizer.ema.weights()"
AVERAGE = "ema"
"""The name of the state, in state dicts, checkpoints and `safe_get_full_optimizer_state`."""
OTHERS = "averages"
"""The key of a state dict for averages of parameters that have no entry: no step has updated them."""


@dataclass(frozen=True, kw_only=True)
class Ema:
    """How `ShardedOptimizer` averages the weights: `average += (1 - decay) * (weight - average)`, after each step.

    The first averaging copies the weights, as in `torch.optim.swa_utils.AveragedModel`. A step that was skipped because
    of a gradient that is not finite averages nothing.

    Moments that are reset, and a parameter that moves to another optimizer, leave its average as it is.
    `discard_state()` gives it up with the rest: the average of a frozen parameter is its weights from then on. So is
    that of one frozen from the start, in whose chunk nothing has been trained, also after an edit by hand.

    Args:
        decay: the share of the old average, from 0 to 1.
        every: average after each step whose number is a multiple of it, 1 or more.
        after: steps before the first averaging.
        warmup: let the decay grow to its value with the number `n` of averagings before:
            `1 - (1 + n / warmup_gamma) ** -warmup_power`, as timm's `ModelEmaV3` and diffusers' `EMAModel` do.
        warmup_gamma: above 0.
        warmup_power: above 0.
        min_decay: with `warmup` the decay is at least this.

    Raises ValueError for a value that is not valid.

    Example:
        >>> Ema(decay=0.9999, warmup=True).decay_after(7)
        0.75
    """

    decay: float = 0.999
    every: int = 1
    after: int = 0
    warmup: bool = False
    warmup_gamma: float = 1.0
    warmup_power: float = 2 / 3
    min_decay: float = 0.0

    def __post_init__(self) -> None:
        for name in ("decay", "min_decay"):
            _check_number(name, getattr(self, name), "from 0 to 1", lambda value: 0 <= value <= 1)
        for name in ("warmup_gamma", "warmup_power"):
            _check_number(name, getattr(self, name), "above 0", lambda value: 0 < value < float("inf"))
        for name, least in (("every", 1), ("after", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} of an Ema must be an integer of {least} or more, found {value!r}")
        if not isinstance(self.warmup, bool):
            raise ValueError(f"warmup of an Ema must be True or False, found {self.warmup!r}")

    def decay_after(self, num_averaged: int) -> float:
        """The decay of an averaging before which there were so many. Local; raises nothing."""
        if num_averaged == 0:
            return 0.0
        if not self.warmup:
            return self.decay
        grown: float = 1 - (1 + num_averaged / self.warmup_gamma) ** -self.warmup_power
        return max(min(self.decay, grown), self.min_decay)

    def averages_after(self, num_steps: int) -> bool:
        """Whether the weights are averaged after step `num_steps`, which counts from 1. Local; raises nothing."""
        return num_steps > self.after and num_steps % self.every == 0


def _check_number(name: str, value: object, wanted: str, is_valid: Callable[[float], bool]) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not is_valid(value):
        raise ValueError(f"{name} of an Ema must be a number {wanted}, found {value!r}")


def checked_ema(value: float | Ema | Mapping[str, Any] | None) -> Ema | None:
    """The setting `ema` of a `ShardedOptimizer`, or of a config, where it may be a table.

    Raises ValueError for one that is not valid.
    """
    if value is None or isinstance(value, Ema):
        return value
    if isinstance(value, Mapping):
        valid = [each.name for each in fields(Ema)]
        unknown = [str(name) for name in value if name not in valid]
        if unknown:
            raise ValueError(f"ema has no {', '.join(unknown)}; it has {', '.join(valid)}")
        return Ema(**value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"ema must be a decay such as 0.999, a gemini.Ema or None, found {value!r}")
    return Ema(decay=float(value))


class Averages:
    """How often the weights of one model were averaged, and whether they are in the place of the average now."""

    def __init__(self, ema: Ema) -> None:
        self.ema = ema
        self.num_steps = 0  # without skipped ones
        self.num_averaged = 0
        self.are_exchanged = False

    def share_to_come(self) -> float | None:
        """The share of the new weights in the average after the next step. None: it averages nothing."""
        if not self.ema.averages_after(self.num_steps + 1):
            return None
        return 1 - self.ema.decay_after(self.num_averaged)

    def note_step(self) -> None:
        """A step has updated weights, and averaged them if it was to."""
        self.num_averaged += self.ema.averages_after(self.num_steps + 1)
        self.num_steps += 1

    def counts(self) -> dict[str, int]:
        """What goes on in another process with `count_from`."""
        return {"num_steps": self.num_steps, "num_averaged": self.num_averaged}

    def count_from(self, counts: Mapping[str, int] | None) -> None:
        """Go on from `counts()` of another process. None: there were no averages."""
        self.num_steps, self.num_averaged = (counts["num_steps"], counts["num_averaged"]) if counts else (0, 0)

    def note_exchange(self) -> None:
        """The averages are where the weights were, or back."""
        self.are_exchanged = not self.are_exchanged

    def refuse_exchanged(self, what: str) -> None:
        """Raises GeminiError inside `optimizer.ema.weights()`."""
        if self.are_exchanged:
            raise GeminiError(
                f"{what} inside optimizer.ema.weights(), where the model has the averages and its own weights lie in "
                "their place: leave the block first"
            )


class AveragedWeights:
    """`optimizer.ema`: the exponential moving average of a model's weights."""

    def __init__(self, averages: Averages, exchange: Callable[[str], None]) -> None:
        """exchange: swaps weights and averages. It is told what is called. Collective."""
        self._averages = averages
        self._exchange = exchange

    def __repr__(self) -> str:
        return f"{self._averages.ema} after {self.num_averaged} averagings"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            "optimizer.ema cannot be pickled or copied: its averages are in optimizer.state_dict(), and a copy of the "
            "model inside optimizer.ema.weights() has them"
        )

    @property
    def num_averaged(self) -> int:
        """How often the weights were averaged; as `n_averaged` of torch's `AveragedModel`."""
        return self._averages.num_averaged

    @property
    def decay(self) -> float:
        """The share of the old average at the next averaging; 0 before the first one, which copies."""
        return self._averages.ema.decay_after(self.num_averaged)

    @contextmanager
    def weights(self) -> Iterator[None]:
        """Inside, the model has the averages: evaluate, save or export them. Collective, between steps.

        Weights and averages change places, chunk by chunk where they rest, so it takes no memory for another model.
        16-bit weights are the averages' rounding. Buffers stay as they are. Leaving the block, also by an exception,
        brings the same bits back. A step, a change of the optimizer and a checkpoint with the optimizer are refused
        inside; what is written to the weights inside is written to the averages.

        Raises GeminiError inside a forward or backward, inside another such block, of an optimizer or a model that was
        closed, and where gradients wait for a step with `update_in_backward`; nothing has changed then.

        Example:
            >>> with optimizer.ema.weights():  # doctest: +SKIP
            ...     model.state_dict()
        """
        self._averages.refuse_exchanged("optimizer.ema.weights()")
        try:
            self._exchange("optimizer.ema.weights()")
            yield
        finally:
            # An interrupt may have come before they were exchanged.
            if self._averages.are_exchanged:
                self._leave()

    def _leave(self) -> None:
        try:
            self._exchange(_END)
        except BaseException:
            # One that came before anything was brought back must not leave the averages there.
            if self._averages.are_exchanged:
                with suppress(GeminiError):  # a failure half way is said at the next use
                    self._exchange(_END)
            raise
