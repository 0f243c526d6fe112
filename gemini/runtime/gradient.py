"""A chunk's gradient: its states, its payload while a backward fills it, the home of the reduced sum."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from enum import Enum
from itertools import repeat
from typing import Any, Final

import torch
from torch import Tensor, nn

from gemini.memory.slot import Slot
from gemini.memory.transfer import Region, ready
from gemini.placement.demand import Kind, Tier
from gemini.placement.gradient_rules import SumRule, expected_after
from gemini.runtime.chunk import Chunk

# -- torch's own `.grad`, where autograd accumulates, past the class of wrapped parameters, which shows another one.


_GRAD: Any = Tensor.grad
grad_of, set_grad_of = _GRAD.__get__, _GRAD.__set__
"""Getter and setter. Call them where `__torch_function__` is disabled."""


def set_grads(parameters: Iterable[Tensor], grads: Iterable[Tensor | None]) -> None:
    """Set the `.grad` of each parameter; the loop over them runs in C. Local."""
    with torch._C.DisableTorchFunctionSubclass():
        deque(map(set_grad_of, parameters, grads), 0)


# -- Says which part of a chunk's GRAD home, or of a payload, holds what.


def numel_without_sums(chunk: Chunk, keeps_whole: bool) -> int:
    """Elements of a GRAD home before the part for fp32 sums of micro-batches, which a plan may append."""
    if not keeps_whole or chunk.is_stepped_whole:
        return chunk.optim_numel
    # With several units the shard lies behind the payload, see `shard_of`.
    return chunk.numel + (chunk.optim_numel if len(chunk.layout.units) > 1 else 0)


def shard_of(home: Region, chunk: Chunk, keeps_whole: bool) -> Region:
    """(optim_numel,) the part of the GRAD home that holds what this rank updates."""
    if not keeps_whole or chunk.is_stepped_whole:
        return home[: chunk.optim_numel]
    # This rank's slices of several units are not contiguous in the payload: their shard lies behind it.
    if len(chunk.layout.units) > 1:
        return home[chunk.numel : chunk.numel + chunk.optim_numel]
    start = chunk.layout.slices(chunk.rank)[0].payload_start
    return home[start : start + chunk.optim_numel]


def gaps_of(chunk: Chunk) -> tuple[tuple[int, int], ...]:
    """The parts of a payload that belong to no parameter."""
    # Parameters begin at multiples of `ALIGNMENT`, and a unit is padded so that each rank's slice has such a multiple.
    ranges = sorted((managed.offset, managed.offset + managed.numel) for managed in chunk.parameters)
    ends, starts = [0, *(end for _, end in ranges)], [*(start for start, _ in ranges), chunk.numel]
    return tuple((end, start) for end, start in zip(ends, starts, strict=True) if end < start)


# -- The states of a chunk's gradient, and what may follow what. See [Note: Three states].


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
        runtime/grad_homes.py) still holds the parameters.
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


# -- Attached gradients: the `.grad` of a chunk's parameters are views of its gradient home, where autograd adds to
# them.
#
# [Note: Attached gradients] Autograd leaves a parameter's first gradient in `.grad` as it is, and adds later ones to
# it. On a CPU, an addition by autograd takes less time than a copy of a small gradient from there to the home. So where
# one rank accumulates in the home, `.grad` is a view of it, also between steps. The home is then *blank* where a step
# has no gradient yet: negative zeros, since x + -0.0 has the bits of every x, while 0.0 + -0.0 is 0.0. On a GPU each
# addition would be a launch of its own, where one launch copies all gradients that wait.


BLANK = -0.0
_DTYPES = {torch.float32, torch.float64}
"""Of several micro-batches, 16-bit gradients are added in fp32. A complex zero cannot be filled with both signs."""


class Attached:
    """One chunk's parameters, whose `.grad` are views of the home."""

    def __init__(self, parameters: Sequence[nn.Parameter], home: Region, views: Sequence[Tensor]) -> None:
        """home: of whole payloads, on the CPU. views: of it, by parameter."""
        self._parameters = parameters
        self._home = home
        self._views = views
        self._is_blank = False
        # False while some `.grad` are views and others are not, as an interrupt may leave them. Gradients are then
        # taken over as if nothing were attached: a gradient that is in the home already is copied to itself.
        self.is_complete = False

    def attach_all(self) -> None:
        """Make the home blank, and every `.grad` a view of it. Local."""
        # While the attachment is incomplete, gradients are copied into the home, of which `_is_blank` knows nothing.
        if not (self._is_blank and self.is_complete):
            ready(self._home).fill_(BLANK)
            self._is_blank = True
        if not self.is_complete:
            set_grads(self._parameters, self._views)
            self.is_complete = True

    def note_gradients(self) -> None:
        """Autograd has added to the home."""
        self._is_blank = False

    def detach_all(self) -> None:
        """Set every `.grad` to None. What was added stays in the home. Local."""
        self.is_complete = False
        set_grads(self._parameters, repeat(None))


def may_attach(chunk: Chunk, home: Region) -> bool:
    """Whether gradients of the chunk, which one rank accumulates in `home`, may be attached."""
    return chunk.is_fine and chunk.dtype in _DTYPES and home.flat.device.type == "cpu"


# -- One chunk's gradient on this rank: its facts, its states and the memory that holds it. Nothing is moved here.
#
# [Note: Three states] A local gradient, a sum of reduced gradients and a sum of unreduced ones can exist at the same
# time: in the second micro-batch of a step, or after backwards inside and outside `no_sync()`. A chunk's gradient
# therefore has three independent states: `GradState`, `ReducedState` and `UnsyncedState`. One method writes each state,
# together with everything that belongs to it, and raises for a transition that is not in `NEXT`.


_REDUCING = GradState.REDUCING  # a look-up in the Enum takes 100 ns in Python 3.11


class ChunkGradient:
    """One trainable chunk's gradient on this rank."""

    def __init__(self, chunk: Chunk, keeps_whole: bool) -> None:
        """keeps_whole: the chunk's GRAD home, if it gets one, has room for a whole payload."""
        count = len(chunk.parameters)
        self.chunk: Final = chunk
        self.is_alone: Final = chunk.layout.world_size == 1  # one rank: the local gradient is the mean already
        self._sums: Final = SumRule.of(
            chunk.layout.world_size, chunk.dtype.itemsize, rests_as_is=chunk.gradient_dtype is chunk.dtype
        )
        self.gaps: Final = gaps_of(chunk)  # (start, end) of each padding, in payload elements
        # A home in another dtype than the parameters' cannot take payloads as they are.
        self._keeps_whole: Final = keeps_whole and chunk.gradient_dtype is chunk.dtype

        # memory, taken when it is needed for the first time, and kept from step to step
        self.wide: Region | None = None  # fp32, (optim_numel,)
        self.wide_is_planned = False  # `wide` is a view of the last part of the GRAD home
        self._attached: Attached | None = None
        self.adopt_home()
        self.unsynced: Region | None = None  # fp32 (fp64 for fp64), (numel,), on the host

        # the local gradient: written by `become`, and by `note_fired` where a parameter's gradient comes
        self.state = GradState.CLOSED
        self.content = Content.UNDEFINED
        self.slot: Slot | None = None  # IN_SLOT, and REDUCING from there
        self.payload: Region | None = None  # (numel,) in the parameter dtype, while it is on the device
        self.views: tuple[Tensor, ...] = ()  # of the payload, by position
        self.spilled: Region | None = None  # (numel,) the payload's content on the host, while SPILLED
        self.fired = bytearray(count)  # by position: a gradient came since the payload was opened
        self.num_fired = 0  # number of ones in `fired`
        self.expects: list[Tensor | None] = [None] * count  # by position: see `expect`

        # the reduced gradient and unreduced sums: written by `become_reduced` and `become_unsynced`
        self.reduced_state = ReducedState.NONE
        self.first_backward = 0  # number of the backward whose gradient was reduced first in this step
        self.unsynced_state = UnsyncedState.NONE

        # which parameters got a gradient, by position
        self.got = bytearray(count)  # a gradient came since the last step, on this rank
        # whether any rank got one, as of the last reduction; equal on all ranks
        # One array serves both on one rank: what this rank got is what all have agreed on.
        self.agreed = self.got if self.is_alone else bytearray(count)
        self.had = bytearray(count)  # `agreed` of any step since gradients were last set to None
        self.num_writes = 0  # writes of users to the reduced gradient so far

        # what is expected
        self.in_pieces = False  # a parameter's gradient came more than once in some backward
        # In some backward some rank had gradients of a part of the trained parameters only; equal on all ranks.
        self.came_in_part = False
        self.expect_all()

    def adopt_home(self) -> None:
        """Use the chunk's GRAD home, if it has one by now. Nothing is open or reduced at this moment."""
        self.detach_home()
        chunk, home = self.chunk, self.chunk.homes.get(Kind.GRAD)
        has_whole = home is not None and self._keeps_whole and home.tier is Tier.DEVICE
        # Without a home of its own the gradient rests in the parameter home, see runtime/grad_homes.py.
        self.home = home
        self.own_shard = None if home is None else shard_of(home, chunk, self._keeps_whole)  # (optim_numel,)
        # A GRAD home with room for a whole payload on the device takes gradients directly, without a slot.
        self.whole = home[: chunk.numel] if home is not None and has_whole else None
        self.whole_views = () if self.whole is None else chunk.views_of(self.whole.flat)
        # The plan may put the fp32 sums of micro-batches at the end of the home.
        sums = None if home is None else home[numel_without_sums(chunk, self._keeps_whole) :]
        # Memory for sums that was taken outside of the plan stays. A view of the old home's last part is replaced, or
        # dropped.
        if (sums is not None and sums.numel > 0) or self.wide_is_planned:
            self.wide_is_planned = sums is not None and sums.numel > 0
            self.wide = sums.view(torch.float32) if sums is not None and self.wide_is_planned else None
        # One rank: a gradient in `whole` needs no reduction and no copy.
        self.in_place = has_whole and self.is_alone

    def take_over(self, before: ChunkGradient) -> None:
        """Keep what `before` knew about this chunk's gradient, whose memory was replaced between steps."""
        self.in_pieces, self.num_writes = before.in_pieces, before.num_writes
        self.came_in_part = before.came_in_part
        for flags, old in ((self.got, before.got), (self.agreed, before.agreed), (self.had, before.had)):
            # In place: on one rank `got` and `agreed` are one array.
            flags[:] = old

    @property
    def attached(self) -> Attached | None:
        """What autograd adds to, or None if gradients are copied. See [Note: Attached gradients]."""
        return self._attached if self._attached is not None and self._attached.is_complete else None

    def attach_home(self) -> None:
        """Let autograd add to the home, if it may, and make it blank. Nothing is open or reduced now. Local."""
        if self._attached is None and self.in_place and self.whole is not None and may_attach(self.chunk, self.whole):
            self._attached = Attached(self.chunk.raw, self.whole, self.whole_views)
        if self._attached is not None:
            self._attached.attach_all()

    def detach_home(self) -> None:
        """Let gradients come in `.grad` from now on. Local."""
        if self._attached is not None:
            self._attached.detach_all()
            self._attached = None

    # -- transitions

    def become(self, state: GradState, held: Slot | Region | None = None, content: Content | None = None) -> None:
        """Move the local gradient to `state`. Raises RuntimeError if the transition is not in `NEXT`.

        held: the slot of an IN_SLOT gradient, with the chunk's views; the host memory of a SPILLED one.
        content: what a newly opened payload holds; a payload that only moves keeps its content.
        """
        if state not in NEXT[self.state]:
            raise self._cannot(self.state, state)
        slot, spilled = (held, None) if isinstance(held, Slot) else (None, held)
        # Only these two states are given their memory. The payload of the others is the home, or stays as it was.
        if (slot is None, spilled is None) != (state is not GradState.IN_SLOT, state is not GradState.SPILLED):
            raise RuntimeError(f"chunk {self.chunk.index}: a gradient that is {state.value} has other memory than that")
        if state is not GradState.CLOSED:
            self.state = state  # first: after an interrupt below `discard` still closes it
        # The payload stays where it is for the collective, but accepts no more gradients.
        if state is GradState.REDUCING:
            self.expects = [None] * len(self.fired)
            return
        if slot is not None:
            self.payload, self.views = slot.views[self.chunk.index]
        elif state is GradState.AT_HOME:
            self.payload, self.views = self.whole, self.whole_views
        else:
            self.payload, self.views = None, ()
        self.slot, self.spilled = slot, spilled
        if content is not None:
            self.content = content
        if state is GradState.CLOSED:
            self.content, self.fired, self.num_fired = Content.UNDEFINED, bytearray(len(self.fired)), 0
        if self.payload is None:
            self.expects = [None] * len(self.fired)
        else:
            self.expect()
        # CLOSED is written last: an interrupt before this line leaves a gradient that is closed once more.
        self.state = state

    def note_fired(self, position: int) -> None:
        """The gradient of the parameter at `position` is in the open payload. Raises RuntimeError if none is open."""
        # This runs once a parameter and backward: a check by `is_open` would take as long as all of the rest.
        if self.payload is None or self.state is _REDUCING:
            raise self._not_open(position)
        self.expects[position] = None
        # A second piece of a parameter's gradient is not counted: `num_fired` is compared with a number of parameters.
        self.num_fired += not self.fired[position]
        self.fired[position] = self.got[position] = 1

    def note_all_fired(self, positions: Sequence[int]) -> None:
        """Note several parameters, none of which has fired since the payload was opened. Raises as `note_fired`."""
        if self.payload is None or self.state is _REDUCING:
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

    def count_write(self) -> None:
        """The reduced gradient was written to: whole copies that were gathered before are stale."""
        self.num_writes += 1

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
            f"chunk {self.chunk.index} ({self.chunk.names()}): its gradient is {before.value!r} and cannot become "
            f"{after.value!r}. This is an error in gemini"
        )

    def _not_open(self, position: int) -> RuntimeError:
        return RuntimeError(
            f"chunk {self.chunk.index}: the gradient of {self.chunk.parameters[position].name!r} came into a payload "
            f"that is {self.state.value!r}. This is an error in gemini"
        )

    # -- what follows from the states

    @property
    def is_open(self) -> bool:
        """There is a local gradient, and its reduction has not begun."""
        return self.state is not GradState.CLOSED and self.state is not GradState.REDUCING

    @property
    def is_reduced(self) -> bool:
        """There is a reduced gradient of this step."""
        return self.reduced_state is not ReducedState.NONE and self.reduced_state is not ReducedState.USED

    @property
    def is_used(self) -> bool:
        """The backward has updated parameters of the chunk with their gradients of this step."""
        return self.reduced_state is ReducedState.USED

    def resumes(self, backward: int) -> bool:
        """Whether a payload that backward number `backward` opens starts as the reduced gradient and is added to it.

        See `SumRule`.
        """
        if self.reduced_state is not ReducedState.IN_SHARD:
            return False
        return self._sums.resumes or (self._sums.resumes_pieces and self.first_backward == backward)

    @property
    def may_write_home(self) -> bool:
        """Whether gradients go to `whole` now, which then needs no slot. See `SumRule`."""
        is_first = self.reduced_state is ReducedState.NONE
        return self.whole is not None and (is_first or self._sums.adds_at_home)

    @property
    def is_behind(self) -> bool:
        """Backwards ran under no_sync() since the last reduction. Equal on all ranks."""
        return self.unsynced_state is not UnsyncedState.NONE

    @property
    def resting(self) -> Region:
        """The home where the reduced gradient rests: its own, or the parameters'."""
        return self.chunk.homes[Kind.PARAM] if self.home is None else self.home

    @property
    def shard(self) -> Region:
        """(optim_numel,) the reduced gradient at rest."""
        return self.chunk.lendable() if self.own_shard is None else self.own_shard

    def reduced(self) -> Region:
        """(optim_numel,) the gradient of this step, `chunk.gradient_dtype` or fp32."""
        if self.reduced_state is ReducedState.WIDE:
            assert self.wide is not None
            return self.wide
        return self.shard

    # -- what is expected of autograd

    def expect(self) -> None:
        """Set for each position the view that the next gradient is copied to.

        None means that the gradient must be added to what its view holds, or refused: see `Arrivals.add`.
        """
        # In a sum the first gradient of a parameter is copied, and not added: what its view holds is no gradient.
        held = self.got if self.content is Content.SUM else self.fired
        # The common case of a payload that was just opened: without a loop over the parameters.
        if self.all_trained and not any(held):
            self.expects = list(self.views)
            return
        rows = zip(self.fired, held, self.trained, self.views, strict=True)
        self.expects = [None if fired or is_held or not trained else view for fired, is_held, trained, view in rows]

    def expect_all(self) -> None:
        """Count the payload as complete once every parameter has a gradient. Call it again after flags changed."""
        self.trained = bytes(managed.requires_grad for managed in self.chunk.parameters)
        self.all_trained = all(self.trained)
        self.num_trained = sum(self.trained)
        self.expected = len(self.trained)
        self.came_in_part = False

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

    def expect_what_came(self) -> None:
        """Count later payloads as complete with what the step's first backward brought, which has just ended."""
        self.expected = expected_after(sum(self.got))
