"""Specs: the description of a model for planning. Names, shapes, dtypes and operators; no module and no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from gemini.placement.dtypes import Dtype


@dataclass(frozen=True)
class WeightSpec:
    """One distinct parameter. Tied parameters are one `WeightSpec`."""

    name: str  # the first of its names
    shape: tuple[int, ...]
    dtype: Dtype  # in its chunk
    trainable: bool  # its `requires_grad` when the model is wrapped
    is_rounded: bool = False  # given in another dtype than its chunk's 16 bits: the fp32 master holds more than it

    @property
    def numel(self) -> int:
        """Elements, without padding."""
        return prod(self.shape)


@dataclass(frozen=True)
class OperatorSpec:
    """A module whose weights are fetched and released together."""

    name: str
    weights: tuple[int, ...]  # places in `ModelSpec.weights`; a tied weight is in every operator that uses it
    ancestors: tuple[int, ...]  # places in `ModelSpec.operators` of those on the call stack around this one
    is_chosen: bool = False  # each rank's data decides whether that rank uses it
    edits_weights: bool = False  # its forward may write to its weights
    routes: bool = False  # ranks may use different parts of it
    is_compiled: bool = False


@dataclass(frozen=True)
class ModelSpec:
    """All operators, parents before children, and all weights in order of their first operator."""

    weights: tuple[WeightSpec, ...]
    operators: tuple[OperatorSpec, ...]

    def first_uses(self) -> list[list[WeightSpec]]:
        """The weights that each operator is the first to use, by operator. Every weight is in one row only."""
        taken: set[int] = set()  # membership only
        rows = []
        for operator in self.operators:
            # A tied weight is packed with the first operator that uses it: it is one parameter and has one home.
            own = [place for place in dict.fromkeys(operator.weights) if place not in taken]
            taken.update(own)
            rows.append([self.weights[place] for place in own])
        return rows
