"""The states of a chunk's parameters: who holds memory in each of them, and which transitions are legal."""

from __future__ import annotations

from enum import Enum


class ParamState(Enum):
    """Where a chunk's parameters are.

    RELEASED: in the home only, as this rank's shard or whole. There is no payload, and the parameters show an expanded
        NaN.
    GATHERED: in a payload beside the home: in a slot, until it is evicted or, while a model is built, in memory of its
        own.
    RESIDENT: in the home, which is on the device and which this rank holds whole: the home is the payload.
    HOLDS_GRAD: in the fp32 master only. The part of the home that this rank updates holds the reduced gradient
        (`reuse_fp16_shard`), and there is no payload.
    GATHERED_BESIDE_GRAD: in a payload in a slot of the pool, while the home holds the reduced gradient. Once the slot
        is given up the parameters are in the fp32 master only.

    [Note: Lent homes] in manager/grad_homes.py says when a home holds the gradient.
    """

    RELEASED = "released"
    GATHERED = "gathered"
    RESIDENT = "resident"
    HOLDS_GRAD = "holding the gradient"
    GATHERED_BESIDE_GRAD = "gathered beside the gradient"


NEXT = {
    ParamState.RELEASED: (ParamState.GATHERED, ParamState.RESIDENT, ParamState.HOLDS_GRAD),
    ParamState.GATHERED: (ParamState.RELEASED, ParamState.GATHERED_BESIDE_GRAD),
    ParamState.RESIDENT: (ParamState.RELEASED, ParamState.HOLDS_GRAD),
    # No fetch is possible before the parameters are restored: the home has no weights to copy or to send.
    ParamState.HOLDS_GRAD: (ParamState.RELEASED, ParamState.RESIDENT),
    ParamState.GATHERED_BESIDE_GRAD: (ParamState.GATHERED, ParamState.HOLDS_GRAD),
}
"""The legal transitions. `Chunk.become` raises for any other."""
