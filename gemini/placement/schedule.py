"""The schedule of one micro-batch: which operators run, which weights backward reads, and when gradients are made.

A schedule refers to weights and operators by their places in `ModelSpec` and knows neither chunks nor ranks, so one
schedule serves every plan of a model. `Schedule.expected` derives it from the module tree, before anything has run. A
dry run of the plain module records the true one, with recomputations, tied weights and skipped operators.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from gemini.placement.specs import ModelSpec


class Act(Enum):
    """The kind of a moment.

    BEGIN: the model is called once more before the backward of its earlier calls.
    ENTER, LEAVE: an operator's forward begins and ends, recomputed forwards included.
    READ: an autograd node reads a weight that it has saved.
    GRADIENT: autograd has made a weight's gradient.
    """

    BEGIN = "begin"
    ENTER = "enter"
    LEAVE = "leave"
    READ = "read"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a schedule.

    Args:
        act: the kind.
        which: place in `ModelSpec` of an operator for BEGIN, ENTER and LEAVE, of a weight for READ and GRADIENT.
        task: nesting depth of the running backward, from 0; -1 in a forward.
        node: a number that identifies the autograd node of that backward.
        operator: for READ, the operator in whose forward the weight was saved.
    """

    act: Act
    which: int
    task: int = -1
    node: int = -1
    operator: int = -1


@dataclass(frozen=True)
class Schedule:
    """One forward and its backward, the same on all ranks and in every micro-batch."""

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]

    @staticmethod
    def expected(spec: ModelSpec, recomputed: Sequence[str] = ()) -> Schedule:
        """The schedule of a model whose operators run in the order of the module tree, and backward in reverse.

        Backward reads what operators have behind the first one that is trained: its input, and that of all before it,
        needs no gradient. An operator with several weights uses them in their order, as fused experts do, so that the
        gradient of the last one comes before the one before is read. A tied weight's gradient comes with the first of
        its operators.

        recomputed: names of modules whose forward runs again before their backward (activation checkpointing).
        """
        first_user: dict[int, int] = {}
        for index, operator in enumerate(spec.operators):
            for weight in operator.weights:
                first_user.setdefault(weight, index)
        trained = (any(spec.weights[weight].trainable for weight in operator.weights) for operator in spec.operators)
        first_trained = next((index for index, is_trained in enumerate(trained) if is_trained), len(spec.operators))
        inside = _operators_inside(spec, recomputed)
        backward: list[Moment] = []
        for index, operator in reversed(list(enumerate(spec.operators))):
            # Backward reaches the last operator of a checkpointed module first, and runs the module's forward again.
            block = inside.get(index, [])
            # A block in front of everything that is trained has no backward, so it is not recomputed.
            if block and index == block[-1] >= first_trained:
                backward += _forward(spec, block, task=0, node=index)
            for weight in reversed(dict.fromkeys(operator.weights)):
                # A weight is read for the gradient of its operator's input, which nobody asks for at the first trained
                # operator.
                if index > first_trained:
                    backward.append(Moment(Act.READ, weight, 0, index, index))
                # A tied weight's gradient is there once autograd has added those of all its uses. Backward reaches the
                # first user last.
                if spec.weights[weight].trainable and first_user[weight] == index:
                    backward.append(Moment(Act.GRADIENT, weight, 0, index))
        return Schedule(tuple(_forward(spec, range(len(spec.operators)))), tuple(backward))


def _forward(spec: ModelSpec, indices: Iterable[int], task: int = -1, node: int = -1) -> list[Moment]:
    """The ENTER and LEAVE moments of these operators, parents first. An operator leaves after those inside it."""
    moments: list[Moment] = []
    path: list[int] = []
    for index in indices:
        # An operator that is not around the next one has returned before that one begins.
        while path and path[-1] not in spec.operators[index].ancestors:
            moments.append(Moment(Act.LEAVE, path.pop(), task, node))
        moments.append(Moment(Act.ENTER, index, task, node))
        path.append(index)
    return moments + [Moment(Act.LEAVE, index, task, node) for index in reversed(path)]


def _operators_inside(spec: ModelSpec, names: Sequence[str]) -> dict[int, list[int]]:
    """All operators in the same module, for each operator in one of the named modules."""
    wanted, groups = frozenset(names), dict[str, list[int]]()
    found: dict[int, list[int]] = {}
    for index, operator in enumerate(spec.operators):
        parts = operator.name.split(".")
        # From the outermost module inwards: where named modules are nested, the outermost one recomputes all operators
        # inside.
        above = (".".join(parts[: count + 1]) for count in range(len(parts)))
        block = next((name for name in above if name in wanted), None)
        if block is not None:
            # All operators of a block share one list, which is complete once the loop has ended.
            found[index] = groups.setdefault(block, [])
            found[index].append(index)
    return found
