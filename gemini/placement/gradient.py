"""The books of one chunk's gradient, in numbers: its states, what may follow what, what is expected of autograd."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Protocol

from gemini.placement.demand import ChunkDtypes


@dataclass(frozen=True)
class SumRule:
    """How the gradients of one chunk are added up within a step, so that the bits are autograd's.

    adds_at_home: a home that holds a reduced gradient takes others directly. Only one rank in full precision does so:
    with several ranks the home holds a mean, and in 16 bits the sum of micro-batches is made in fp32.

    resumes: a payload that is opened beside a reduced gradient at rest starts as that gradient. Only one rank does so:
    autograd computes (a + b) + c, and a + (b + c) has other bits.

    resumes_pieces: it does so where both are pieces of one backward, which are added in the gradient's own dtype in any
    case, as by autograd. In 16 bits those of several micro-batches are added in fp32.

    widens: the reduced gradient becomes fp32 when a second micro-batch is added.
    """

    adds_at_home: bool
    resumes: bool
    resumes_pieces: bool
    widens: bool

    @staticmethod
    def of(world_size: int, itemsize: int, rests_as_is: bool, widens: bool) -> SumRule:
        """itemsize: of the weights. rests_as_is: the reduced gradient has the weights' dtype."""
        is_alone, has_full_precision = world_size == 1, itemsize >= 4
        return SumRule(
            adds_at_home=is_alone and has_full_precision,
            resumes=is_alone and has_full_precision and rests_as_is,
            resumes_pieces=is_alone,
            widens=widens,
        )

    @staticmethod
    def planned(world_size: int, dtypes: ChunkDtypes) -> SumRule:
        """The rule of a chunk that is planned."""
        return SumRule.of(world_size, dtypes.weight.itemsize, rests_as_is=dtypes.rests_as_is, widens=dtypes.widens)


# -- The states of a chunk's gradient, and what may follow what.
#
# [Note: Three states] A local gradient, a sum of reduced gradients and a sum of unreduced ones can exist at the same
# time: in the second micro-batch of a step, or after backwards inside and outside `no_sync()`. A chunk's gradient
# therefore has three independent states: `GradState`, `ReducedState` and `UnsyncedState`. One method writes each state,
# together with everything that belongs to it, and raises for a transition that is not in `NEXT`.


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

    NONE: there is none yet. Its memory is reserved but its content is undefined; a lent parameter home still
        holds the parameters.
    IN_SHARD: in `shard`, in `gradient_dtype`: in a home of its own, or in the parameter home.
    WIDE: in `wide`, in fp32, since several micro-batches were added to a 16-bit gradient. `shard` is undefined.
    USED: nowhere: the backward has updated the weights with it (`update_in_backward`).
    """

    NONE = "none"
    IN_SHARD = "in its shard"
    WIDE = "in fp32"
    USED = "used by the backward"


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
    ReducedState.NONE: (ReducedState.IN_SHARD, ReducedState.WIDE, ReducedState.USED),
    ReducedState.USED: (ReducedState.NONE,),
    ReducedState.IN_SHARD: (ReducedState.WIDE, ReducedState.NONE),
    # A sum in fp32 stays so until the step has used it: in 16 bits a small gradient would be lost beside a large one.
    ReducedState.WIDE: (ReducedState.NONE,),
    UnsyncedState.NONE: (UnsyncedState.ELSEWHERE, UnsyncedState.HELD),
    # A later backward under no_sync() may bring this rank a gradient of its own.
    UnsyncedState.ELSEWHERE: (UnsyncedState.HELD, UnsyncedState.NONE),
    UnsyncedState.HELD: (UnsyncedState.NONE,),
}


# -- One chunk's gradient, in numbers.


_AT_HOME, _IN_SLOT = GradState.AT_HOME, GradState.IN_SLOT  # a look-up in the Enum takes 100 ns in Python 3.11


class SlotOfGradients(Protocol):
    """A gradient slot."""

    @property
    def views(self) -> Mapping[int, tuple[Any, tuple[Any, ...]]]:
        """By chunk that has been in the slot: its payload and the views of its parameters, by position."""


class Gradient:
    """The books of one trainable chunk's gradient on this rank. `ChunkGradient`, which extends it, has the homes."""

    # Its own home and the fp32 memory beside it, once they were taken. Without a home it rests in the parameter home.
    home: object | None = None
    wide: object | None = None
    # It is written to its own home directly, which is on the device and has room for a whole payload.
    has_whole = False
    whole: Any = None  # that payload
    whole_views: tuple[Any, ...] = ()  # of its parameters, by position

    def __init__(
        self,
        index: int,
        oversize: bool,
        sums: SumRule,
        trained: bytes,
        *,
        is_alone: bool,
        is_chosen: bool,
        has_replicas: bool = False,
        in_groups: bool = False,
    ) -> None:
        """trained: by position of the chunk's parameters. is_alone: one rank, whose gradient is the mean already.

        is_chosen: routing chooses which of its parameters are used, on each rank from its data.
        has_replicas: other groups of ranks hold the same shards, and their means may be exchanged later.
        in_groups: other groups have it, too, and each rank uses a part of what its group shares.
        """
        count = len(trained)
        self.index: Final = index
        self.oversize: Final = oversize  # of slots of the larger size
        self.is_alone: Final = is_alone
        self.is_chosen: Final = is_chosen
        self.sums: Final = sums
        self.has_replicas: Final = has_replicas or in_groups
        self.in_groups: Final = in_groups

        # the local gradient: written by `become`, and by `note_fired` where a parameter's gradient comes
        self.state = GradState.CLOSED
        self.content = Content.UNDEFINED
        self.fired = bytearray(count)  # by position: a gradient came since the payload was opened
        self.num_fired = 0  # number of ones in `fired`
        self.slot: Any = None  # IN_SLOT, and REDUCING from there
        self.payload: Any = None  # (numel,) in the parameter dtype, while it is on the device
        self.views: tuple[Any, ...] = ()  # of the payload, by position
        self.spilled: Any = None  # (numel,) the payload's content on the host, while SPILLED
        # By position: the view that the next gradient is copied to. None: it must be added to what its view holds, or
        # refused, see `Reductions.add`.
        self.expects: list[Any] = [None] * count

        # the reduced gradient and unreduced sums: written by `become_reduced` and `become_unsynced`
        self.reduced_state = ReducedState.NONE
        self.first_backward = 0  # number of the backward whose gradient was reduced first in this step
        self.awaits_replicas = False  # some of it is a mean of this group alone; equal on all ranks
        self.unsynced_state = UnsyncedState.NONE

        # which parameters got a gradient, by position
        self.got = bytearray(count)  # a gradient came since the last step, on this rank
        # whether any rank got one, as of the last reduction; equal on all ranks
        # One array serves both on one rank: what this rank got is what all have agreed on.
        self.agreed = self.got if is_alone else bytearray(count)
        self.had = bytearray(count)  # `agreed` of any step since gradients were last set to None

        # what is expected
        self.in_pieces = False  # a parameter's gradient came more than once in some backward
        # In some backward some rank had gradients of a part of the trained parameters only; equal on all ranks.
        self.came_in_part = False
        self.expect_from(trained)

    def names(self) -> str:
        """What the chunk is called in errors."""
        return "simulated"

    # -- transitions

    def become(
        self,
        state: GradState,
        content: Content | None = None,
        *,
        slot: SlotOfGradients | None = None,
        spilled: object | None = None,
    ) -> None:
        """Move the local gradient to `state`. Raises RuntimeError if the transition is not in `NEXT`.

        content: what a newly opened payload holds; a payload that only moves keeps its content.
        slot: of an IN_SLOT gradient, with the chunk's views. spilled: the host memory of a SPILLED one.
        """
        if state not in NEXT[self.state]:
            raise self._cannot(self.state, state)
        # Only these two states are given their memory. The payload of the others is the home, or stays as it was.
        if (slot is None) is (state is _IN_SLOT) or (spilled is None) is (state is GradState.SPILLED):
            raise RuntimeError(f"chunk {self.index}: a gradient that is {state.value} has other memory than that")
        count = len(self.fired)
        # CLOSED is written last: an interrupt in here leaves a gradient that is closed once more.
        if state is GradState.CLOSED:
            self.payload, self.views, self.slot, self.spilled = None, (), None, None
            self.content, self.fired, self.num_fired = Content.UNDEFINED, bytearray(count), 0
            self.expects = [None] * count
            self.state = state
            return
        self.state = state  # first: after an interrupt below `discard` still closes it
        # The payload stays where it is for the collective, but accepts no more gradients.
        if state is GradState.REDUCING:
            self.expects = [None] * count
            return
        if content is not None:
            self.content = content
        payload: Any = None
        views: tuple[Any, ...] = ()
        if slot is not None:
            payload, views = slot.views[self.index]
        elif state is _AT_HOME:
            payload, views = self.whole, self.whole_views
        self.payload, self.views, self.slot, self.spilled = payload, views, slot, spilled
        # In a sum the first gradient of a parameter is copied, and not added: what its view holds is no gradient.
        held = self.got if self.content is Content.SUM else self.fired
        # The common case of a payload that was just opened: without a loop over the parameters.
        if views and self.all_trained and not any(held):
            self.expects = list(views)
        elif views:
            rows = zip(self.fired, held, self.trained, views, strict=True)
            self.expects = [None if came or is_held or not trained else view for came, is_held, trained, view in rows]
        else:
            self.expects = [None] * count

    def note_fired(self, position: int) -> None:
        """The gradient of the parameter at `position` is in the open payload. Raises RuntimeError if none is open."""
        # This runs once a parameter and backward: a check by `is_open` would take as long as all of the rest.
        if self.state is not _AT_HOME and self.state is not _IN_SLOT:
            raise self._not_open(position)
        self.expects[position] = None
        # A second piece of a parameter's gradient is not counted: `num_fired` is compared with a number of parameters.
        if self.fired[position]:
            self.in_pieces = True
        else:
            self.num_fired += 1
        self.fired[position] = self.got[position] = 1

    def note_all_fired(self, positions: Sequence[int]) -> None:
        """Note several parameters, none of which has fired since the payload was opened. Raises as `note_fired`."""
        if self.state is not _AT_HOME and self.state is not _IN_SLOT:
            raise self._not_open(positions[0])
        if len(positions) == len(self.fired):  # without a loop over the parameters
            self.fired[:] = self.got[:] = b"\1" * len(positions)
            self.expects = [None] * len(positions)
        else:
            for position in positions:
                self.fired[position] = self.got[position] = 1
                self.expects[position] = None
        self.num_fired += len(positions)

    def note_given(self, position: int) -> None:
        """The parameter at `position` has a gradient, on all ranks, that no backward made."""
        self.got[position] = self.agreed[position] = 1

    def note_discarded(self, position: int) -> None:
        """The gradient of the parameter at `position` was set to None, on all ranks."""
        self.got[position] = self.agreed[position] = 0
        self.had[position] = 0

    def note_agreed(self, flags: bytes) -> None:
        """The ranks have exchanged which parameters have a gradient on any of them. Called before they are reduced."""
        self.agreed[:] = flags

    def note_leftovers(self, had: bytes, got: bytes, agreed: bytes) -> None:
        """A step or zero_grad() has left gradients of these parameters."""
        # On one rank `got` and `agreed` are one array, to which both write the same flags.
        self.had[:], self.got[:], self.agreed[:] = had, got, agreed

    def become_reduced(self, state: ReducedState, backward: int = 0) -> None:
        """Move the reduced gradient to `state`. Raises RuntimeError if the transition is not in `NEXT`.

        backward: the number of the backward that made the step's first reduced gradient.
        """
        if state not in NEXT[self.reduced_state]:
            raise self._cannot(self.reduced_state, state)
        if self.reduced_state is ReducedState.NONE:
            self.first_backward = backward
        if state is ReducedState.NONE:
            self.awaits_replicas = False
        self.reduced_state = state

    def note_mean_of_group(self) -> None:
        """The mean of this group of ranks is about to be added, and not that of all replicas."""
        self.awaits_replicas = True

    def note_mean_of_all(self) -> None:
        """Replicas have taken the mean over their sums."""
        self.awaits_replicas = False

    def note_used(self) -> None:
        """The backward updates the parameters whose gradients are in the payload, which is closed next."""
        self.become_reduced(ReducedState.USED)

    def outlive_step(self) -> None:
        """A step left the reduced gradient in place: whatever is added to it belongs to a later backward."""
        self.first_backward = 0

    def become_unsynced(self, state: UnsyncedState) -> None:
        """Move the unreduced sum to `state`. Raises RuntimeError if the transition is not in `NEXT`."""
        if state not in NEXT[self.unsynced_state]:
            raise self._cannot(self.unsynced_state, state)
        self.unsynced_state = state

    def _cannot(self, before: State, after: State) -> RuntimeError:
        return RuntimeError(
            f"chunk {self.index} ({self.names()}): its gradient is {before.value!r} and cannot become "
            f"{after.value!r}. This is an error in gemini"
        )

    def _not_open(self, position: int) -> RuntimeError:
        return RuntimeError(
            f"chunk {self.index} ({self.names()}): the gradient of its parameter {position} came into a payload "
            f"that is {self.state.value!r}. This is an error in gemini"
        )

    def take_over(self, before: Gradient) -> None:
        """Keep what `before` knew about this chunk's gradient."""
        self.in_pieces, self.came_in_part = before.in_pieces, before.came_in_part
        self.awaits_replicas = before.awaits_replicas
        for flags, old in ((self.got, before.got), (self.agreed, before.agreed), (self.had, before.had)):
            # In place: on one rank `got` and `agreed` are one array.
            flags[:] = old

    # -- what follows from the states

    @property
    def is_open(self) -> bool:
        """There is a local gradient, and its reduction has not begun."""
        return self.state is not GradState.CLOSED and self.state is not GradState.REDUCING

    @property
    def is_complete(self) -> bool:
        """The local gradient is open, and has all that is expected of it."""
        return self.num_fired == self.expected and self.is_open

    @property
    def is_reduced(self) -> bool:
        """There is a reduced gradient of this step."""
        return self.reduced_state is not ReducedState.NONE and self.reduced_state is not ReducedState.USED

    @property
    def holds_any(self) -> bool:
        """There is a gradient of any kind, or the backward has used one."""
        is_local = self.state is not GradState.CLOSED or self.unsynced_state is not UnsyncedState.NONE
        return is_local or self.reduced_state is not ReducedState.NONE

    @property
    def is_used(self) -> bool:
        """The backward has updated parameters of the chunk with their gradients of this step."""
        return self.reduced_state is ReducedState.USED

    @property
    def is_behind(self) -> bool:
        """Backwards ran under no_sync() since the last reduction. Equal on all ranks."""
        return self.unsynced_state is not UnsyncedState.NONE

    @property
    def in_place(self) -> bool:
        """One rank: a gradient that is written to its home needs no reduction and no copy."""
        return self.is_alone and self.has_whole

    def resumes(self, backward: int) -> bool:
        """Whether a payload that backward number `backward` opens starts as the reduced gradient and is added to it.

        See `SumRule`.
        """
        if self.reduced_state is not ReducedState.IN_SHARD:
            return False
        return self.sums.resumes or (self.sums.resumes_pieces and self.first_backward == backward)

    @property
    def may_write_home(self) -> bool:
        """Whether gradients go to the home now, and need no slot. See `SumRule`."""
        return self.has_whole and (self.reduced_state is ReducedState.NONE or self.sums.adds_at_home)

    def may_wait(self, backward: int) -> bool:
        """Whether gradients of backward number `backward` may wait for one another, before the first is taken over."""
        if self.num_fired or self.is_open:
            return False
        # Else these gradients are added to the sum one by one, in autograd's order: (a + b) + c has other bits than
        # a + (b + c).
        return not self.is_reduced or not (self.in_place or self.resumes(backward))

    # -- what is expected of autograd

    def expect_from(self, trained: bytes) -> None:
        """Count the payload as complete once every parameter has a gradient. trained: by position."""
        self.trained = trained
        self.all_trained = all(trained)
        self.num_trained = sum(trained)
        self.expected = len(trained)
        self.came_in_part = False

    def expect_what_came(self) -> None:
        """Count later payloads as complete with what the step's first backward brought, which has just ended."""
        # Unused parameters must not keep a chunk open, and its slot taken, until the end of every later backward. It is
        # at least 1: no count of gradients that have come is ever equal to 0.
        self.expected = max(1, sum(self.got))

    @property
    def is_whole(self) -> bool:
        """The open payload has gradients of all trained parameters of the chunk, from this rank."""
        return self.num_fired == self.num_trained

    @property
    def missing(self) -> bytes:
        """By position: a trained parameter of which this rank has no gradient in the open payload."""
        if self.is_whole:
            return bytes(len(self.trained))
        return bytes(trained > fired for trained, fired in zip(self.trained, self.fired, strict=True))

    def note_part(self) -> None:
        """Some rank has had gradients of a part of the chunk only. Every rank calls it at the same point."""
        self.came_in_part = True
