"""Runs: the elements of a chunk that one update works on, what the update gets for them, and what it tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from gemini.chunks.chunk import Chunk
from gemini.optimizer.shard_view import ShardView
from optim import Spans


@dataclass(frozen=True)
class Run:
    """Elements [start, start + numel) of the optimizer's flat tensors, and the positions of their parameters.

    A run without elements stands for parameters that are entirely in other ranks' shards. Every rank counts their steps
    too, so that all ranks have the same scalars.
    """

    start: int
    numel: int
    positions: tuple[int, ...]
    group: int
    spans: Spans | None = None  # the elements of the run that are updated; None: all


@dataclass
class RunUpdate:
    """The inputs and results of one run's update."""

    run: Run
    weights: ShardView | None  # those of the whole chunk; None for a run without elements
    grad: Tensor  # (numel,)
    flat: dict[str, Tensor]  # (numel,) each: views into the chunk's state
    scalars: dict[str, Any]  # shared by all elements; the update replaces them
    is_new: bool  # these elements have not been updated before
    room: dict[str, Tensor] = field(default_factory=dict)  # (numel,) each: of states that the update may create
    made: dict[str, Tensor] = field(default_factory=dict)  # (numel,) each: states that the update created

    def count_step(self) -> int:
        """Count this update among the elements' steps. Returns their number."""
        step = self.scalars["step"] = int(self.scalars.get("step", 0)) + 1
        return step

    def note_scalars(self, scalars: dict[str, Any]) -> None:
        """The update is done, and has left these scalars."""
        self.scalars.update(scalars)

    def create(self, name: str, state: Tensor) -> Tensor:
        """Have a state that the update creates, (numel,). Returns that which the first tile of the run created."""
        return self.made.setdefault(name, state)


class GradientFactors(NamedTuple):
    """The factors that every gradient is multiplied by before the update, in this order."""

    inv_scale: float = 1.0
    clip: float = 1.0


class EntryNames(NamedTuple):
    """The keys of a parameter's entry in an optimizer state dict."""

    needed: tuple[str, ...]  # without one of these an update would fail, or continue from zeros
    flat: tuple[str, ...]  # per-element states: tensors of the parameter's shape
    known: tuple[str, ...] | None  # any other key is of another optimizer; None: this optimizer's keys are not known


def spans_of(chunk: Chunk, positions: Sequence[int]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Return (first element, number of elements, positions) of contiguous runs in the optimizer shard, in order.

    Parameters that follow each other in the chunk are one run, with the padding between them.
    """
    found: list[tuple[int, int, tuple[int, ...]]] = []
    last = -2
    for position in positions:
        for piece in chunk.parameters[position].pieces:
            start, end = piece.shard_start, piece.shard_start + piece.numel
            # Only neighbours are joined: between others lie elements of parameters that this update must not change.
            if found and last in (position - 1, position) and start >= found[-1][0] + found[-1][1]:
                first, _, its = found[-1]
                found[-1] = first, end - first, (*its, position) if position not in its[-1:] else its
            else:
                found.append((start, piece.numel, (position,)))
            last = position
    return sorted(found)


def runs_of(chunk: Chunk, positions: Sequence[int], group: int, in_one: bool) -> list[Run]:
    """The runs of the parameters at `positions`. in_one: one run with spans, else one for each contiguous piece."""
    spans = spans_of(chunk, positions)
    # Without spans all of these parameters are in other ranks' shards. The run without elements below counts their
    # steps.
    if in_one and spans:
        first, last = spans[0], spans[-1]
        start, end = first[0], last[0] + last[1]
        # Spans are counted from the start of the run, because the update gets tensors that begin there.
        inside = None if len(spans) == 1 else Spans((each - start, numel) for each, numel, _ in spans)
        return [Run(start, end - start, tuple(positions), group, inside)]
    # Parameters without elements in this rank's shard share one run without elements.
    here = {position for *_, its in spans for position in its}  # membership only
    elsewhere = tuple(position for position in positions if position not in here)
    runs = [Run(start, numel, its, group) for start, numel, its in spans]
    return [*runs, Run(0, 0, elsewhere, group)] if elsewhere else runs
