"""Round robin, and what is said about it: medians, quartiles, and ratios paired by round.

A shared machine drifts by tens of percent within minutes. So all cases take turns, one step each per round, in an
order that rotates; two cases are compared by the ratio within each round, and the median of those ratios counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step: forward and backward, then clipping and the optimizer; and of all threads' CPU time.

    CPU time says less than the clock, but other programs on the machine hardly change it.
    """

    forward_backward_s: float
    optimizer_s: float
    cpu_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.forward_backward_s + self.optimizer_s


PARTS = ("forward_backward_s", "optimizer_s", "step_s", "cpu_s")


@dataclass(frozen=True)
class Spread:
    """A sample by its median, its quartiles and its ends."""

    median: float
    lower: float
    upper: float
    minimum: float
    maximum: float

    @classmethod
    def of(cls, sample: Sequence[float]) -> Spread:
        """Raises ValueError for an empty sample."""
        if not sample:
            raise ValueError("a spread needs at least one value")
        several = [*sample, *sample] if len(sample) == 1 else sample
        lower, middle, upper = statistics.quantiles(several, n=4, method="inclusive")
        return cls(middle, lower, upper, min(sample), max(sample))

    def text(self, scale: float = 1.0, digits: int = 1) -> str:
        """Return the median and the range in parentheses: "median (lower–upper)"."""
        return f"{self.median * scale:.{digits}f} ({self.lower * scale:.{digits}f}–{self.upper * scale:.{digits}f})"


def part_of(times: Sequence[StepTime], part: str) -> list[float]:
    """One of PARTS, round by round."""
    return [getattr(time, part) for time in times]


def paired_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> Spread:
    """The spread of the ratios within each round. Raises ValueError if the rounds differ in number."""
    return Spread.of([a / b for a, b in zip(numerator, denominator, strict=True)])


def turn(names: Sequence[str], round_number: int) -> list[str]:
    """The order of one round: each case comes first equally often."""
    start = round_number % len(names)
    return [*names[start:], *names[:start]]


def slowest_rank(by_rank: Sequence[Sequence[StepTime]]) -> list[StepTime]:
    """Per round the times of the rank that took longest for the step, and the CPU time of all ranks together."""
    slowest = []
    for times in zip(*by_rank, strict=True):
        longest = max(times, key=lambda time: time.step_s)
        slowest.append(replace(longest, cpu_s=sum(time.cpu_s for time in times)))
    return slowest
