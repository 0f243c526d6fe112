"""The books of gradients, which a training run and its simulation share: states, and every decision about them.

They decide which gradient is spilled, which may wait, how the gradients of a step are added up, where the sum rests,
and when a parameter home is lent to it. Numbers only: no tensor, no device, no other rank. What only a run knows, or a
simulation only counts, is an abstract method here, which both have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from operator import gt
from typing import Any, Final, NamedTuple

from gemini.errors import GeminiError
from gemini.placement.next_use import NextUse, PassKind, ReductionOrder, Touch

MAX_WAITING = 2
"""Fine chunks whose gradients may wait in `.grad`, beyond the gradient slots."""


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


class Gradient:
    """The books of one trainable chunk's gradient on this rank. The memory is in `ChunkGradient`, which extends it."""

    # Its own home and the fp32 memory beside it, once they were taken. Without a home it rests in the parameter home.
    home: object | None = None
    wide: object | None = None
    # It is written to its own home directly, which is on the device and has room for a whole payload.
    has_whole = False

    def __init__(
        self, index: int, oversize: bool, sums: SumRule, trained: bytes, *, is_alone: bool, is_chosen: bool
    ) -> None:
        """trained: by position of the chunk's parameters. is_alone: one rank, whose gradient is the mean already.

        is_chosen: routing chooses which of its parameters are used, on each rank from its data.
        """
        count = len(trained)
        self.index: Final = index
        self.oversize: Final = oversize  # of slots of the larger size
        self.is_alone: Final = is_alone
        self.is_chosen: Final = is_chosen
        self.sums: Final = sums

        # the local gradient: written by `_become`, and by `note_fired` where a parameter's gradient comes
        self.state = GradState.CLOSED
        self.content = Content.UNDEFINED
        self.fired = bytearray(count)  # by position: a gradient came since the payload was opened
        self.num_fired = 0  # number of ones in `fired`
        # By position: the view that the next gradient is copied to. None: it must be added to what its view holds, or
        # refused, see `Arrivals.add`.
        self.expects: list[Any] = [None] * count

        # the reduced gradient and unreduced sums: written by `become_reduced` and `become_unsynced`
        self.reduced_state = ReducedState.NONE
        self.first_backward = 0  # number of the backward whose gradient was reduced first in this step
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

    def become(self, state: GradState, content: Content | None = None) -> None:
        """Move the local gradient to `state`. Raises RuntimeError if the transition is not in `NEXT`.

        content: what a newly opened payload holds; a payload that only moves keeps its content.
        """
        self._become(state, content, ())

    def _become(self, state: GradState, content: Content | None, views: Sequence[Any]) -> None:
        """See `become`. views: of a payload that takes gradients, by position."""
        if state not in NEXT[self.state]:
            raise self._cannot(self.state, state)
        if state is not GradState.CLOSED:
            self.state = state  # first: after an interrupt below `discard` still closes it
        if state is GradState.CLOSED:
            self.content, self.fired, self.num_fired = Content.UNDEFINED, bytearray(len(self.fired)), 0
        elif content is not None:
            self.content = content
        # In a sum the first gradient of a parameter is copied, and not added: what its view holds is no gradient.
        held = self.got if self.content is Content.SUM else self.fired
        # The common case of a payload that was just opened: without a loop over the parameters.
        if views and self.all_trained and not any(held):
            self.expects = list(views)
        elif views:
            rows = zip(self.fired, held, self.trained, views, strict=True)
            self.expects = [None if came or is_held or not trained else view for came, is_held, trained, view in rows]
        else:
            self.expects = [None] * len(self.fired)
        # CLOSED is written last: an interrupt before this line leaves a gradient that is closed once more.
        self.state = state

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
        self.reduced_state = state

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


# -- Open gradients: a gradient is *open* from its first to its last local gradient. Then it is reduced and merged.
#
# Where this rank holds the whole gradient on the device anyway, gradients are written to the home directly. Else they
# come into a gradient slot. An open payload that must make room is spilled to the host unreduced, by this rank alone,
# and comes back when it is needed.


class SlotRules(ABC):
    """The open gradients of all trainable chunks of one model, by chunk index. All of it is local."""

    def __init__(self, books: Mapping[int, Gradient]) -> None:
        """books: of all trainable chunks. The dict has other chunks once others are trained."""
        self._books = books

    def lacks_slot(self, chunk: int) -> bool:
        """Whether the gradient can only be opened in a slot, and none is free."""
        gradient = self._books[chunk]
        if gradient.has_whole and gradient.state is GradState.CLOSED and gradient.may_write_home:
            return False
        return self._free_slot(gradient.oversize) is None

    def open(self, chunk: int, backward: int, zero: bool = False) -> None:
        """Make the payload writable: the home if it may be written, else a slot, filled from a spill if there is one.

        backward: the number of the backward that opens it. zero: fill it with zeros, unless gradients stay in the home.
        """
        gradient = self._books[chunk]
        state = gradient.state
        if state is not GradState.CLOSED and state is not GradState.SPILLED:
            return
        if gradient.has_whole and state is GradState.CLOSED and gradient.may_write_home:
            self._open_at_home(chunk, zero)
            return
        slot = self._free_slot(gradient.oversize)
        # None of those inside is being reduced, and could not be spilled then: a reduction that held the last slot was
        # finished, see `GradientRules.make_way`.
        if slot is None:
            slot = self._spill(self._first_to_spill(gradient.oversize), chunk)
        if state is GradState.SPILLED:
            self._unspill(chunk, slot)
        else:
            # One rank continues the sum so far, in autograd's order of additions.
            self._open_in_slot(chunk, slot, gradient.resumes(backward), zero)

    def _first_to_spill(self, oversize: bool) -> int:
        """The chunk whose gradient leaves its slot."""
        # Complete gradients only wait to be reduced, so they go first. Of incomplete ones the first chunk of the model
        # goes: backward reaches it last.
        found, is_complete = -1, False
        for chunk in self._inside(oversize):
            gradient = self._books[chunk]
            has_all = gradient.num_fired == gradient.expected
            if found < 0 or (has_all, -chunk) > (is_complete, -found):
                found, is_complete = chunk, has_all
        return found

    def rest_in_place(self, chunk: int, backward: int) -> None:
        """Close a gradient that was written to its home. Elements that got no gradient become zero."""
        gradient = self._books[chunk]
        # In a later backward of the step, elements without a gradient keep the sum so far. Paddings have held zeros, of
        # either sign, since the home was made.
        if gradient.reduced_state is ReducedState.NONE:
            gradient.become_reduced(ReducedState.IN_SHARD, backward)
            self._zero_rest_of_home(chunk)
        self.close(chunk)

    # -- what a run does and a simulation counts

    @abstractmethod
    def close(self, chunk: int) -> None:
        """Free the payload's slot, or its spilled memory: the content is not needed any more."""

    @abstractmethod
    def _zero_rest_of_home(self, chunk: int) -> None:
        """Zero the elements of an open home to which no gradient was written."""

    @abstractmethod
    def _inside(self, oversize: bool) -> Iterable[int]:
        """The chunks in slots of this size."""

    @abstractmethod
    def _free_slot(self, oversize: bool) -> object | None:
        """A slot of this size that is free now; None without any."""

    @abstractmethod
    def _spill(self, victim: int, wanted: int) -> object:
        """Move an open payload to the host, unreduced: `wanted` needs its slot, which is returned."""

    @abstractmethod
    def _unspill(self, chunk: int, slot: object) -> None:
        """Bring a spilled payload back into a free slot."""

    @abstractmethod
    def _open_in_slot(self, chunk: int, slot: object, resumes: bool, zero: bool) -> None:
        """Open a payload in a free slot. resumes: it begins as the reduced gradient."""

    @abstractmethod
    def _open_at_home(self, chunk: int, zero: bool) -> None:
        """Open a payload in the gradient's home, which may be written to."""


# -- Lending of parameter homes to gradients. See [Note: Lent homes] and [Note: Lent payloads].


class LendingHistory:
    """Which chunks with kept slots were gathered again after their reduction. It is the same on all ranks."""

    def __init__(self) -> None:
        self._gathers: dict[int, int] = {}  # by chunk: gathers so far, at the step's last reduction
        self._used_after: set[int] = set()  # membership only

    @property
    def used_after(self) -> frozenset[int]:
        """The chunks whose parameters were needed between a reduction and the step, in any step so far."""
        return frozenset(self._used_after)

    def releases(self, chunk: int, num_gathers: int, *, is_in_use: bool, is_gathered: bool) -> bool:
        """Whether the chunk leaves its kept slot at a reduction that begins now.

        is_in_use: its parameters are pinned, or on their way. is_gathered: they are in the slot.
        """
        self.note(chunk, num_gathers)
        self._gathers[chunk] = num_gathers
        # A release would have them gathered once more.
        if is_in_use:
            self._used_after.add(chunk)
            return False
        return is_gathered and chunk not in self._used_after

    def note(self, chunk: int, num_gathers: int) -> None:
        """The chunk was gathered `num_gathers` times so far. More than at its reduction: it was needed after it."""
        if self._gathers.get(chunk, num_gathers) < num_gathers:
            self._used_after.add(chunk)

    def end_step(self) -> None:
        """What is reduced from now on belongs to the next step. Every chunk's gathers were noted."""
        self._gathers.clear()

    def reset_history(self) -> None:
        """Drop all history, after a failed step, of which ranks may have seen more or less."""
        self._used_after.clear()


# -- Reduced gradients at rest: where they rest, and what moves there.
#
# A reduced gradient rests in a home of its own, in its chunk's parameter home (`reuse_fp16_shard`), or in fp32 beside
# its home once several micro-batches were added to a 16-bit gradient.
#
# [Note: Lent homes] Once a 16-bit chunk's gradient is reduced, its parameters are not needed before the step, which
# makes them again from the fp32 master. Until then the home is *lent* to the gradient. If the parameters are needed
# earlier, the home is taken back: the gradient moves to memory of its own, which it keeps for later steps, and the
# parameters are rounded from the master again, to the same bits. Only the part of the home that this rank updates is
# lent, so lending is local: no collective.
#
# [Note: Lent payloads] A home that is a payload is lent only while the chunk is released and no view of it is alive. A
# resident chunk is released for that by this rank alone, as its fetches launch nothing. Releasing a kept slot decides
# whether the next fetch is a collective, so all ranks must decide alike. They do so at the start of the reduction,
# which all ranks share, and from shared history only: was the chunk gathered again after its reduction in an earlier
# step? Where this rank's gradient rests must not matter.


class PayloadNow(NamedTuple):
    """Where the parameters of a chunk are, beside their home, and who uses them."""

    is_pinned: bool
    is_coming: bool  # on its way into a slot
    is_gathered: bool  # in a slot, and the home holds parameters
    is_resident: bool  # the home is the payload
    has_own_slot: bool
    num_gathers: int  # so far


class HomeRules(ABC):
    """The reduced gradients of all trainable chunks of one model, by chunk index. All of it is local."""

    def __init__(self, books: Mapping[int, Gradient]) -> None:
        """books: of all trainable chunks. The dict has other chunks once others are trained."""
        self._books = books
        self._lending = LendingHistory()
        self._lendable: tuple[int, ...] = ()

    def note_lendable(self) -> None:
        """Find out whose home may be lent: other chunks are trained from now on, or homes have moved."""
        self._lendable = tuple(chunk for chunk in self._books if self._lends_home(chunk))

    def begin(self, chunk: int, backward: int, is_sum: bool = False) -> bool:
        """Make memory ready for what backward number `backward` reduces. True if it is the first of the step.

        is_sum: it is a sum of several backwards already, and rests in fp32 from the start.
        """
        gradient = self._books[chunk]
        is_first = not gradient.is_reduced
        # Pieces of one backward are added in the gradient's own dtype, as by autograd. Those of another backward are
        # added in fp32, if the chunk widens.
        if is_sum or not (is_first or gradient.first_backward == backward):
            self.widen(chunk, backward)
        # The sum has left the home: a home that was lent to the first micro-batch gets its parameters back.
        if gradient.reduced_state is ReducedState.WIDE:
            self.restore(chunk)
        elif is_first:
            # For any other reduction this was done when it was launched.
            if is_sum:
                self.before_reduction(chunk)
            self.make_room(chunk, backward)
        return is_first

    def widen(self, chunk: int, backward: int) -> None:
        """Continue a 16-bit gradient in fp32, from the second micro-batch on. The memory is kept for later steps.

        backward: the number of the backward that is added, or that is the first of this step and comes in fp32.
        """
        gradient = self._books[chunk]
        if gradient.reduced_state is ReducedState.WIDE or not gradient.sums.widens:
            return
        if gradient.wide is None:
            self._take_wide(chunk)
        is_first = not gradient.is_reduced
        gradient.become_reduced(ReducedState.WIDE, backward)
        if not is_first:
            self._move_to_wide(chunk)

    def make_room(self, chunk: int, backward: int) -> None:
        """Before a step's first reduced gradient is written: lend it the parameter home, or take one for it."""
        gradient = self._books[chunk]
        if gradient.home is None and not self.is_lent(chunk):
            if self._lends_home(chunk) and self._can_lend_now(chunk):
                self._lend(chunk)
            else:
                self._take_home(chunk)
        gradient.become_reduced(ReducedState.IN_SHARD, backward)

    def move_out(self, chunk: int) -> None:
        """The parameters are needed before the step: move the gradient out of their home and restore them there."""
        # The new home is taken first: without memory for it the home stays lent.
        self._take_home(chunk)
        self._copy_out(chunk)
        self.restore(chunk)

    def restore(self, chunk: int) -> None:
        """Make the parameters again from the master in a home that no longer holds the gradient."""
        if self.is_lent(chunk):
            self._remake(chunk)
            self.consumed(chunk)

    def before_reduction(self, chunk: int) -> None:
        """Leave a kept slot that may be lent. See [Note: Lent payloads]. Every rank calls it at the same point."""
        if not self._lends_home(chunk):
            return
        now = self.payload_of(chunk)
        if not now.has_own_slot:
            return
        is_in_use = now.is_pinned or now.is_coming
        if self._lending.releases(chunk, now.num_gathers, is_in_use=is_in_use, is_gathered=now.is_gathered):
            self._release_slot(chunk)

    def end_step(self) -> None:
        """A step ends: what is reduced from now on belongs to the next one."""
        for chunk in self._lendable:
            self._lending.note(chunk, self.payload_of(chunk).num_gathers)
        self._lending.end_step()

    def reset(self) -> None:
        """Forget the history of lent slots after a failed step, of which ranks may have seen more or less."""
        # Ranks that failed at different points would release different kept slots, and gather other chunks from then
        # on.
        self._lending.reset_history()

    def _can_lend_now(self, chunk: int) -> bool:
        now = self.payload_of(chunk)
        # A gather on its way sends this home to the other ranks.
        if now.is_coming:
            return False
        if now.is_resident:
            return not now.is_pinned and self._release_resident(chunk)
        # A slot of the pool lies beside the home. A kept slot has the home inside.
        return not (now.has_own_slot and now.is_gathered)

    # -- what a run does and a simulation counts

    @abstractmethod
    def is_lent(self, chunk: int) -> bool:
        """Whether the parameter home holds the gradient."""

    @abstractmethod
    def consumed(self, chunk: int) -> None:
        """Mark the home as the parameters' again. Their values are in it, or about to be written."""

    @abstractmethod
    def _lends_home(self, chunk: int) -> bool:
        """Whether the plan has no memory for the gradient beside the parameters."""

    @abstractmethod
    def payload_of(self, chunk: int) -> PayloadNow:
        """Where the chunk's parameters are now."""

    @abstractmethod
    def _release_slot(self, chunk: int) -> None:
        """Take the chunk out of its kept slot."""

    @abstractmethod
    def _release_resident(self, chunk: int) -> bool:
        """Take the parameters out of a home that is their payload. False if something holds a view of it."""

    @abstractmethod
    def _lend(self, chunk: int) -> None:
        """The parameter home holds the gradient from now on."""

    @abstractmethod
    def _take_home(self, chunk: int) -> None:
        """Take a home for a gradient that has none, for good. Raises BudgetError."""

    @abstractmethod
    def _take_wide(self, chunk: int) -> None:
        """Take fp32 memory beside the home, for good. Raises BudgetError."""

    @abstractmethod
    def _move_to_wide(self, chunk: int) -> None:
        """The sum so far moves to fp32."""

    @abstractmethod
    def _copy_out(self, chunk: int) -> None:
        """Copy the gradient from the lent home to its own."""

    @abstractmethod
    def _remake(self, chunk: int) -> None:
        """Round the parameters from the master into the home that was lent."""


# -- The gradients of a backward: when they are complete, when all ranks reduce them, and what becomes of the means.
#
# Which gradients a rank gets, and when, may depend on its data; collectives may not. All ranks reduce a chunk at the
# same point (see `ReductionOrder`), and at the end of a backward whatever is open on any rank. If the backward gathers
# parameters, ranks reduce before a certain fetch. If not, the order of reductions is all they share.
#
# One rank has nothing to agree on: its gradient is the mean. Where the home is on the device in full precision,
# gradients are written and added there. Others are opened in a slot and merged into the home when they are complete.


class GradientBooks:
    """What is known of one model's gradients in a backward, and from one backward to the next."""

    def __init__(self, of: Mapping[int, Gradient], *, is_alone: bool) -> None:
        """of: the books of each trainable chunk. is_alone: this rank's gradients are all there are."""
        self.of = of
        self.is_alone = is_alone
        self.synchronizes = True  # False inside no_sync()
        self.awaits_reduction = False  # gradients from under no_sync() are left; equal on all ranks
        self.uses_up = False  # the running backward, or the last one, updates weights with its gradients
        self.in_flight: int | None = None  # the chunk whose reduction was started and not finished
        self.reduced: set[int] = set()  # chunks reduced in this backward: membership only
        self.changed: dict[int, None] = {}  # chunks that may have become complete since ranks last asked each other
        self.next_in_order = 0
        self.is_off = False  # a gradient came late or early: record again
        self.reset_order()

    def reset_order(self) -> None:
        """Forget which gradients to expect, and when: other chunks are trained. Local."""
        self.order = ReductionOrder(list(self.of))
        self.has_told_parts = False  # ranks have told each other whose gradients come in part

    @contextmanager
    def unsynchronized(self) -> Iterator[None]:
        """A context in which backwards add gradients up on this rank and reduce none. Local."""
        before, self.synchronizes = self.synchronizes, False
        try:
            yield
        finally:
            # The old value is restored, since a no_sync() may stand inside another.
            self.synchronizes = before

    def begin_backward(self, places: Mapping[Touch, int] | None, *, uses_up: bool) -> None:
        """A backward starts. places: of its touches in the trace. uses_up: it updates weights with its gradients."""
        self.uses_up = uses_up
        self.reduced.clear()
        self.changed.clear()
        self.next_in_order, self.is_off = 0, False
        if not self.is_alone:
            self.order.begin(places)

    def end_step(self, *, has_zeros: bool) -> None:
        """Forget the step's gradients: they were used, discarded or zeroed, or their reduction has failed. Local.

        has_zeros: zeros are left, so ranks still agree on which parameters had a gradient.
        """
        # A reduction is in flight here only after a failure, or inside a backward.
        self.in_flight = None
        if not self.is_alone:
            is_behind = any(gradient.is_behind for gradient in self.of.values())
            self.awaits_reduction = is_behind or (has_zeros and self.awaits_reduction)

    @property
    def knows_parts(self) -> bool:
        """Ranks know whose gradients come in part, which decides about updates inside the backward."""
        return self.has_told_parts or not self.uses_up


class GradientRules(ABC):
    """The gradients of one model's trainable chunks, by chunk index, from their arrival until they rest."""

    def __init__(
        self, books: GradientBooks, slots: SlotRules, homes: HomeRules, next_use: NextUse, *, gathers: bool
    ) -> None:
        """next_use: of the running pass; its touches are points that all ranks share.

        gathers: the backward gathers parameters, so that ranks share the points of its fetches.
        """
        self._books = books
        self._slots = slots
        self._homes = homes
        self._next_use = next_use
        self._gathers = gathers
        self._backward = 0  # number of the running backward within its step
        self._is_ending = False  # autograd is done with it

    def _begin(self, backward: int, *, uses_up: bool) -> None:
        """Backward number `backward` begins. uses_up: it updates weights with its gradients."""
        self._backward, self._is_ending = backward, False
        places = self._next_use.places if self._next_use.kind is PassKind.TRAINING else None
        self._books.begin_backward(places, uses_up=uses_up)

    # -- gradients that arrive

    def make_way(self, chunk: int) -> None:
        """Finish a reduction that is in the way of opening the gradient. Local.

        Without a free slot another gradient is spilled, and one that is being reduced cannot be. A piece may also come
        while its own chunk is reduced, as with reentrant checkpointing.
        """
        if self._books.in_flight is None:
            return
        state = self._books.of[chunk].state
        is_out = state is GradState.CLOSED or state is GradState.SPILLED
        if state is GradState.REDUCING or (is_out and self._slots.lacks_slot(chunk)):
            self.finish()

    def arrived(self, chunk: int) -> None:
        """Some of the chunk's gradients have come. Collective if that makes chunks complete whose turn it is."""
        books = self._books
        gradient = books.of[chunk]
        is_complete = gradient.num_fired == gradient.expected
        if books.is_alone:
            if chunk in books.reduced:
                # A piece came after the chunk was merged in this backward, as reentrant checkpointing does.
                gradient.in_pieces = True
            # A gradient at home takes no slot and needs no merge: it comes to rest at the end of the backward. Pieces
            # are added in their own dtype first, as by autograd, so they wait for the end, too.
            elif is_complete and gradient.state is GradState.IN_SLOT and not gradient.in_pieces:
                self.reduce(chunk)
            return
        # The number of touches before this gradient: the chunk may be reduced from the next touch on.
        books.order.last_fire[chunk] = len(self._next_use.passed)
        # More than what is expected may come: in the step's first backward some of the parameters may have been idle.
        if gradient.num_fired >= gradient.expected:
            books.changed[chunk] = None
        if chunk in books.reduced:
            # A piece came after the chunk was reduced: it is reduced by itself at the end, and the recorded point is
            # too early.
            books.is_off = gradient.in_pieces = True
        elif is_complete:
            books.order.note_complete(chunk)
            if not self._gathers and books.synchronizes and books.knows_parts:
                self._reduce_in_order()

    def _reduce_in_order(self) -> None:
        """Reduce complete gradients whose turn it is: one that is complete early waits for those before it."""
        books, order = self._books, self._books.order.order
        while books.next_in_order < len(order) and books.of[order[books.next_in_order]].is_complete:
            self.reduce(order[books.next_in_order])
            books.next_in_order += 1

    # -- points at which gradients are reduced

    def before_touch(self) -> None:
        """Reduce what is due before a fetch: a point that all ranks share if backward gathers. Collective then."""
        books = self._books
        if not (self._gathers and books.synchronizes):
            return
        if books.order.points is not None and self._is_as_recorded():
            due: Sequence[int] = [i for i in books.order.due(self._next_use.position) if i not in books.reduced]
        else:
            due = self._complete_on_all_ranks()
        for chunk in due:
            # Gradients that wait in `.grad` are a part of what is reduced.
            self.collect(chunk)
            self.reduce(chunk)

    def _is_as_recorded(self) -> bool:
        """Whether this pass has had the recorded touches only, so that gradients come by their recorded points."""
        return self._next_use.is_in_order and self._next_use.kind is PassKind.TRAINING

    def _end(self) -> None:
        """Reduce what is open on any rank, and agree on the points of the next backward. None waits. Collective."""
        self._is_ending = True
        books, order = self._books, self._books.order
        if books.is_alone:
            for chunk, gradient in books.of.items():
                # Chunks without a gradient are left alone: on one rank nobody else needs zeros of them.
                if gradient.state is GradState.AT_HOME:
                    self._slots.rest_in_place(chunk, self._backward)
                elif gradient.is_open:
                    self.reduce(chunk)
                if books.synchronizes:
                    self._expect_what_came(gradient)
            return
        # They are reduced with zeros where some gradients did not come.
        if not self._gathers and books.knows_parts:
            for chunk in order.order[books.next_in_order :]:
                self.reduce(chunk)
        # Ranks are about to tell one another what they have used up.
        if books.uses_up:
            self.finish()
        # Where nothing is gathered, the order of reductions is all that ranks share. Another order on one rank makes
        # all ranks agree on an order again.
        is_other = not self._is_as_recorded() if self._gathers else tuple(order.fired) != order.order
        # Before the first record no rank has points: then every backward counts as off its plan.
        is_off = books.is_off or is_other or order.points is None
        is_off = self._reduce_open("end of backward", self._backward, is_off)
        # A backward that follows no forward of the model has a trace of its own, in which points mean nothing.
        if is_off and not (self._gathers and self._next_use.kind is not PassKind.TRAINING):
            # This backward was not the recorded one: the next one follows what it has shown.
            points = [order.last_fire[chunk] for chunk in order.chunks]
            order.adopt(*self._latest(points, order.ranking()), self._next_use.passed)
            for gradient in books.of.values():
                # If routing chooses the parameters that are used, all are still expected: a gradient that came late on
                # some ranks only would be added in another order.
                if not gradient.is_chosen:
                    self._expect_what_came(gradient)

    def _reduce_open(self, when: str, backward: int, is_off: bool = False) -> bool:
        """Reduce what is open or unsynced on any rank. Returns whether some rank is off its plan. Collective.

        backward: the number of the last backward within the step.
        """
        self._backward = backward
        left, is_off = self._open_on_any_rank(when, is_off)
        for chunk in left:
            self.reduce(chunk)
        self.finish()
        self._books.awaits_reduction = False
        return is_off

    def _expect_what_came(self, gradient: Gradient) -> None:
        """The step's first backward has brought these gradients: later ones are expected to bring as many."""
        # `got` counts since the last step: only in the first backward does it tell what one backward brings.
        # A backward that updates uses a chunk up once it is whole. With one of its gradients, of which nothing came
        # for once, it would not be.
        if self._backward == 1 and (not self._books.uses_up or any(gradient.got)):
            gradient.expect_what_came()

    # -- reductions, and what becomes of a mean

    def reduce(self, chunk: int) -> None:
        """Start to reduce a chunk's open gradient (zeros if this rank has none) to the mean over ranks. Collective.

        The reduction in flight is finished first: both use the same scratch.
        """
        books = self._books
        before, books.in_flight = books.in_flight, None
        if before is not None:
            self._rest(before)
        books.reduced.add(chunk)
        # The gradient may have been spilled. A rank without one takes part all the same, with a payload of zeros.
        self._slots.open(chunk, self._backward)
        if not books.is_alone:
            self._homes.before_reduction(chunk)
        if self._start(chunk):
            books.in_flight = chunk
        else:
            self._rest(chunk)

    def finish(self) -> None:
        """Finish the reduction in flight, if there is one. Local."""
        # After a failure it must not be finished twice.
        chunk, self._books.in_flight = self._books.in_flight, None
        if chunk is not None:
            self._rest(chunk)

    def _rest(self, chunk: int) -> None:
        """Let the backward update the weights with a mean, or let it come to rest for the step."""
        if self._books.uses_up and self._may_use(chunk):
            self._use(chunk)
        else:
            self._merge(chunk, self._homes.begin(chunk, self._backward))
        self._slots.close(chunk)

    def _may_use(self, chunk: int) -> bool:
        """Whether the backward may update the chunk now: its gradient is whole, and nothing needs the old weights.

        Where it may not, the gradient rests as without the setting, in memory that no plan has counted. Raises
        GeminiError for a gradient of weights that were updated with another part.
        """
        gradient = self._books.of[chunk]
        if gradient.is_used:
            raise GeminiError(
                f"a second gradient came in one backward to {gradient.names()}, after these weights were updated. "
                "Reentrant checkpointing makes such gradients: use checkpoint(..., use_reentrant=False), or wrap the "
                "model without update_in_backward=True"
            )
        # The node that made the gradient is over, and holds its chunks no longer.
        self._leave_node()
        if not self._takes(chunk):
            return False
        now = self._homes.payload_of(chunk)
        # Others are to be added to a gradient at rest. A chunk in use must keep its weights.
        if gradient.is_reduced or gradient.is_behind or now.is_pinned or now.is_coming:
            return False
        # Weights whose gradients have not come may still be needed. What gets no gradient may have a zero to move by.
        if gradient.is_alone:
            return gradient.is_whole or (self._is_ending and not any(map(gt, gradient.got, gradient.fired)))
        # All ranks must use it up or none: a slot that leaves decides about collectives. So what counts is whether the
        # chunk has come whole on all ranks so far.
        if gradient.came_in_part or gradient.is_chosen:
            return False
        if not gradient.is_whole:
            # Other ranks may have all of it, and use it up, which the end of the backward tells. Until then slots must
            # be alike on all ranks: they decide about collectives.
            self._leave_slot(chunk)
        return gradient.is_whole

    # -- what a run does and a simulation counts

    @abstractmethod
    def collect(self, chunk: int) -> None:
        """Take over the chunk's gradients that wait."""

    @abstractmethod
    def _complete_on_all_ranks(self) -> Sequence[int]:
        """The chunks whose open gradient is complete on every rank, in the model's order. Collective."""

    @abstractmethod
    def _open_on_any_rank(self, when: str, is_off: bool) -> tuple[Sequence[int], bool]:
        """The chunks whose gradient is open on any rank, and whether some rank is off its plan. Collective."""

    @abstractmethod
    def _latest(self, points: Sequence[int], ranking: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The latest point, and rank, of each chunk over all ranks. Collective."""

    @abstractmethod
    def _start(self, chunk: int) -> bool:
        """Start the exchange of an open payload. Returns whether it may stay in flight. Collective."""

    @abstractmethod
    def _merge(self, chunk: int, is_first: bool) -> None:
        """Write the mean to where it rests, or add it. is_first: it is the first of this step."""

    @abstractmethod
    def _leave_node(self) -> None:
        """Lift the pins of the node that made the gradient."""

    @abstractmethod
    def _takes(self, chunk: int) -> bool:
        """Whether the backward updates the whole chunk, and this rank alone."""

    @abstractmethod
    def _leave_slot(self, chunk: int) -> None:
        """Take the chunk's parameters out of their slot: their values are about to change."""

    @abstractmethod
    def _use(self, chunk: int) -> None:
        """Update the chunk with the mean, and call `Gradient.note_used` before."""


# -- Chunks that stay. See [Note: Staying chunks] in runtime/params.py.


def is_resident_for_good(*, is_payload_at_home: bool, may_lend_home: bool, is_trained: bool) -> bool:
    """Whether the home is the payload and is never lent to a gradient."""
    return is_payload_at_home and not (may_lend_home and is_trained)


def may_stay(*, is_fine: bool, has_own_slot: bool, may_lend_home: bool) -> bool:
    """Whether a chunk may stay gathered between two updates."""
    # A home that may be lent leaves its slot at a reduction.
    return is_fine and has_own_slot and not may_lend_home
