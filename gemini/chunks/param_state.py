"""The states of a chunk's parameters: who holds memory for them, and what may follow what."""

from __future__ import annotations

from enum import Enum


class ParamState(Enum):
    """Where a chunk's parameters are.

    RELEASED: in the home only, of which this rank has its shard, or all of it. There is no payload, and parameters show
        an expanded NaN.
    GATHERED: in a payload beside the home: in a slot, to be evicted when the plan says so, or, while a model is built,
        in memory of its own.
    RESIDENT: in the home, which is on the device and which this rank holds whole: the home is the payload.
    HOLDS_GRAD: in the fp32 master only. What this rank steps of the home holds the reduced gradient
        (`reuse_fp16_shard`), and there is no payload.
    GATHERED_BESIDE_GRAD: in a payload in a slot of the pool, while the home holds the reduced gradient. Once the slot
        is given up they are in the fp32 master only.
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
    ParamState.HOLDS_GRAD: (ParamState.RELEASED, ParamState.RESIDENT),
    ParamState.GATHERED_BESIDE_GRAD: (ParamState.GATHERED, ParamState.HOLDS_GRAD),
}
"""What each state may become."""
