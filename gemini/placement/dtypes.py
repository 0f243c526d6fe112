"""Dtypes as planning sees them: a name and a number of bytes. No tensor and no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """A dtype by its name in torch."""

    name: str  # "bfloat16"
    itemsize: int  # bytes per element

    @property
    def is_half(self) -> bool:
        """Weights of this dtype have fp32 masters."""
        return self.name in ("float16", "bfloat16")


FLOAT32 = Dtype("float32", 4)


@dataclass(frozen=True)
class ChunkDtypes:
    """Of one chunk's weights, and of their gradients."""

    weight: Dtype
    travel: Dtype  # of gradients between ranks
    rest: Dtype  # of the reduced gradient
    sums: Dtype  # between ranks, of several unreduced gradients that a rank has added up
    widens: bool  # the reduced gradient becomes fp32 when a second micro-batch is added

    @property
    def narrows(self) -> bool:
        """A gradient is rounded when it comes to rest."""
        return self.rest.is_half and self.rest != self.weight
