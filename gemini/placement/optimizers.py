"""What optimizers keep of each weight, by name: for plans that are made before there is an optimizer. Numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemini.placement.demand import ModelSpec, WeightSpec
from gemini.placement.packing import Packing

NOT_HIDDEN = ("embed", "lm_head")
"""What the names of matrices that are not hidden have in them, by DeepSpeed's rule."""


def is_hidden(name: str, num_dims: int, not_hidden: Sequence[str] = NOT_HIDDEN) -> bool:
    """Whether a weight is a hidden one of two dimensions or more, which Muon is for.

    not_hidden: parts of the names of those that are not. Case does not count.
    """
    return num_dims > 1 and not any(word.lower() in name.lower() for word in not_hidden)


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer, by the states per element that it keeps of a weight. Other states are small and not counted."""

    name: str
    of_hidden: int  # of hidden matrices
    of_matrices: int  # of other weights of two dimensions or more
    of_others: int

    def states_of(self, weight: WeightSpec) -> int:
        """The states per element of a weight. Local; raises nothing."""
        num_dims = len(weight.shape)
        if is_hidden(weight.name, num_dims):
            return self.of_hidden
        return self.of_matrices if num_dims > 1 else self.of_others


KINDS = {
    each.name: each
    for each in (
        OptimizerKind("adam", 2, 2, 2),
        OptimizerKind("muon", 1, 2, 2),  # beside Adam
        OptimizerKind("adafactor", 0, 0, 1),
        OptimizerKind("sgd", 0, 0, 0),
        OptimizerKind("momentum", 1, 1, 1),
        OptimizerKind("amsgrad", 3, 3, 3),
    )
}


def states_by_chunk(states: float | OptimizerKind, packing: Packing, spec: ModelSpec) -> list[float]:
    """States per element of each chunk: the most of any of its weights, since a chunk has a state for all or none."""
    if not isinstance(states, OptimizerKind):
        return [states] * len(packing.chunks)
    weights = {weight.name: states.states_of(weight) for weight in spec.weights}
    return [max((weights[name] for name in chunk.names), default=0) for chunk in packing.chunks]


def states_in_all(states: float | OptimizerKind, weights: Sequence[WeightSpec]) -> int:
    """Bytes of the states of these weights, without what chunks have beside: fp32, or fp64 of fp64 weights."""
    found = 0.0
    for weight in weights:
        count = states.states_of(weight) if isinstance(states, OptimizerKind) else states
        found += count * weight.numel * max(4, weight.dtype.itemsize)
    return int(found)
