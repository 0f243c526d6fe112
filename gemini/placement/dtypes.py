"""Dtypes for planning: a name and a number of bytes. No tensor and no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A dtype by its name in torch."""

    name: str  # "bfloat16"
    itemsize: int  # bytes per element

    @property
    def is_half(self) -> bool:
        """Whether weights of this dtype have fp32 masters."""
        return self.name in ("float16", "bfloat16")


FLOAT32 = Dtype("float32", 4)


@dataclass(frozen=True)
class ChunkDtypes:
    """The dtypes of one chunk's weights and of their gradients."""

    weight: Dtype
    travel: Dtype  # a gradient on its way between ranks
    rest: Dtype  # the reduced gradient
    sums: Dtype  # on its way between ranks: the sum of several gradients that a rank has not reduced yet
    widens: bool  # the reduced gradient becomes fp32 when a second micro-batch is added

    @property
    def narrows(self) -> bool:
        """Whether a gradient is rounded when it comes to rest."""
        return self.rest.is_half and self.rest != self.weight
