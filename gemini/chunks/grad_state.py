"""The states of a chunk's gradient, and what may follow what. See [Note: Three states] in gradient.py."""

from enum import Enum


class State(Enum):
    """A state that is looked up in `NEXT` for every gradient. Enum's own hash is a Python call: too slow there."""

    __hash__ = object.__hash__


class GradState(State):
    """Where the local gradient is: what autograd made in this backward, before it is merged into the reduced gradient.

    CLOSED: there is none, and no memory is held for it.
    AT_HOME: open, in the chunk's gradient home, which is on the device and has room for a whole payload. It takes no
        slot. With one rank the gradient stays there; with several the same memory holds the reduced gradient later.
    IN_SLOT: open, in a gradient slot of the device.
    SPILLED: open, in temporary host memory, because another chunk needed the slot. Other ranks do not know of it.
    REDUCING: still in its home or slot, where the collective reads it. Nothing may write to it.
    """

    CLOSED = "closed"
    AT_HOME = "open at home"
    IN_SLOT = "open in a slot"
    SPILLED = "spilled to the host"
    REDUCING = "being reduced"


class Content(Enum):
    """The content of an open payload's elements to which no gradient was written since it was opened.

    UNDEFINED: whatever was in that memory before. They must be zeroed before the payload is read as a whole.
    ZERO: zeros, or negative zeros in an attached home.
    SUM: the reduced gradient of this step. New gradients are added to it, so the merge replaces the shard.
    """

    UNDEFINED = "undefined"
    ZERO = "zero"
    SUM = "the sum so far"


class ReducedState(State):
    """Where this rank's part of this step's reduced gradient is: the part that this rank updates.

    NONE: there is none yet. Its memory is reserved but its content is undefined; a lent parameter home (see
        manager/grad_homes.py) still holds the parameters.
    IN_SHARD: in `shard`, in `gradient_dtype`: in a home of its own, or in the parameter home.
    WIDE: in `wide`, in fp32, since several micro-batches were added to a 16-bit gradient. `shard` is undefined.
    """

    NONE = "none"
    IN_SHARD = "in its shard"
    WIDE = "in fp32"


class UnsyncedState(State):
    """Whether backwards under no_sync() have left gradients to be reduced. With one rank it is always NONE.

    NONE: every gradient so far was reduced.
    ELSEWHERE: this rank has none left, other ranks may. This rank contributes zeros to the next reduction.
    HELD: `unsynced` on the host holds this rank's sum, a whole payload in fp32.
    """

    NONE = "none"
    ELSEWHERE = "left on other ranks only"
    HELD = "held on the host"


NEXT: dict[State, tuple[State, ...]] = {
    GradState.CLOSED: (GradState.AT_HOME, GradState.IN_SLOT),
    # A gradient at home takes no slot, so it is never spilled.
    GradState.AT_HOME: (GradState.REDUCING, GradState.CLOSED),
    GradState.IN_SLOT: (GradState.SPILLED, GradState.REDUCING, GradState.CLOSED),
    # A spilled gradient is closed without coming back where it is discarded.
    GradState.SPILLED: (GradState.IN_SLOT, GradState.CLOSED),
    GradState.REDUCING: (GradState.CLOSED,),
    ReducedState.NONE: (ReducedState.IN_SHARD, ReducedState.WIDE),
    ReducedState.IN_SHARD: (ReducedState.WIDE, ReducedState.NONE),
    # A sum in fp32 stays so until the step has used it: in 16 bits a small gradient would be lost beside a large one.
    ReducedState.WIDE: (ReducedState.NONE,),
    UnsyncedState.NONE: (UnsyncedState.ELSEWHERE, UnsyncedState.HELD),
    # A later backward under no_sync() may bring this rank a gradient of its own.
    UnsyncedState.ELSEWHERE: (UnsyncedState.HELD, UnsyncedState.NONE),
    UnsyncedState.HELD: (UnsyncedState.NONE,),
}
