"""One chunk's gradient on this rank: its facts, its states and the memory that holds it. Nothing is moved here.

[Note: Three states] A local gradient, a sum of reduced gradients and a sum of unreduced ones can exist at the same
time: in the second micro-batch of a step, or after backwards inside and outside `no_sync()`. A chunk's gradient
therefore has three independent states: `GradState`, `ReducedState` and `UnsyncedState`. One method writes each state,
together with everything that belongs to it, and raises for a transition that is not in `NEXT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from gemini.chunks.attached import Attached, may_attach
from gemini.chunks.chunk import Chunk
from gemini.chunks.grad_state import NEXT, Content, GradState, ReducedState, State, UnsyncedState
from gemini.chunks.gradient_home import gaps_of, numel_without_sums, shard_of
from gemini.memory.region import Region
from gemini.memory.slot import Slot
from gemini.placement.demand import Kind, Tier

_REDUCING = GradState.REDUCING  # a look-up in the Enum takes 100 ns in Python 3.11


class ChunkGradient:
    """One trainable chunk's gradient on this rank."""

    def __init__(self, chunk: Chunk, keeps_whole: bool) -> None:
        """keeps_whole: the chunk's GRAD home, if it gets one, has room for a whole payload."""
        count = len(chunk.parameters)
        self.chunk: Final = chunk
        self.is_alone: Final = chunk.layout.world_size == 1  # one rank: the local gradient is the mean already
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
        self.expect_all()

    def adopt_home(self) -> None:
        """Use the chunk's GRAD home, if it has one by now. Nothing is open or reduced at this moment."""
        self.detach_home()
        chunk, home = self.chunk, self.chunk.homes.get(Kind.GRAD)
        has_whole = home is not None and self._keeps_whole and home.tier is Tier.DEVICE
        # Without a home of its own the gradient rests in the parameter home, see manager/grad_homes.py.
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

    def rest_in(self, home: Region) -> None:
        """Have `home`, (optim_numel,), for good. Only where there is none: the parameter home could not be lent."""
        self.home = self.own_shard = home

    def add_wide(self, wide: Region) -> None:
        """Have room for the sum of several micro-batches in fp32. Only where there is none."""
        self.wide = wide

    def add_unsynced(self, unsynced: Region) -> None:
        """Have room on the host for the sum under no_sync(). Only where there is none."""
        self.unsynced = unsynced

    def drop_sums(self) -> None:
        """Have no room for sums any more: `GradMemory` has freed it. Between steps."""
        self.wide = self.unsynced = None

    def take_over(self, before: ChunkGradient) -> None:
        """Keep what `before` knew about this chunk's gradient, whose memory was replaced between steps."""
        self.in_pieces, self.num_writes = before.in_pieces, before.num_writes
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

    def note_pieces(self) -> None:
        """A parameter's gradient has come more than once in a backward."""
        self.in_pieces = True

    def become_reduced(self, state: ReducedState, backward: int = 0) -> None:
        """Move the reduced gradient to `state`. Raises RuntimeError if the transition is not in `NEXT`.

        backward: the number of the backward that made the step's first reduced gradient.
        """
        if state not in NEXT[self.reduced_state]:
            raise self._cannot(self.reduced_state, state)
        if self.reduced_state is ReducedState.NONE:
            self.first_backward = backward
        self.reduced_state = state

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
        return self.reduced_state is not ReducedState.NONE

    def resumes(self, backward: int) -> bool:
        """Whether a payload that backward number `backward` opens starts as the reduced gradient and is added to it.

        Only one rank does so: autograd computes (a + b) + c, and a + (b + c) has other bits. For 16-bit gradients of
        several micro-batches it is False: their sum is made in fp32 instead.
        """
        if not self.is_alone or self.reduced_state is not ReducedState.IN_SHARD:
            return False
        # Another piece of the same backward is added in the gradient's own dtype in any case, as by autograd.
        rests_in_full = self.chunk.dtype.itemsize >= 4 and self.chunk.gradient_dtype is self.chunk.dtype
        return rests_in_full or self.first_backward == backward

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
        self.expected = len(self.trained)

    def expect_what_came(self) -> None:
        """Count later payloads as complete with what the step's first backward brought, which has just ended.

        Otherwise parameters that are not used would keep every later one open until its backward ends.
        """
        # It is at least 1: `num_fired` would never be equal to 0 once a gradient has come.
        self.expected = max(1, sum(self.got))
