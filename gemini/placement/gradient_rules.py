"""Every decision about gradients, which a training run and its simulation share.

`PlaceRules` decide where gradients are: in which slot they are opened, which one is spilled, where the sum rests, and
when a parameter home is lent to it. `GradientRules` decide when: what is complete, when ranks reduce it, and what
becomes of the mean. Numbers only: no tensor, no device, no other rank. What only a run knows, or a simulation only
counts, is an abstract method here, which both have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import gt
from typing import Protocol

from gemini.errors import GeminiError
from gemini.placement.gradient import Gradient, GradState, ReducedState, SlotOfGradients
from gemini.placement.next_use import PassKind, Touch
from gemini.placement.payload_rules import PayloadRules

MAX_WAITING = 2
"""Fine chunks whose gradients may wait in `.grad`, beyond the gradient slots."""


# -- Where gradients are: open in a slot or at home, spilled, at rest.
#
# A gradient is *open* from its first to its last local gradient; then it is reduced and merged. Where this rank holds
# the whole gradient on the device anyway, gradients are written to the home directly. Else they come into a gradient
# slot. An open payload that must make room is spilled to the host unreduced, by this rank alone, and comes back when it
# is needed.
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

    def forget_step(self) -> None:
        """What is reduced from now on belongs to the next step. Every chunk's gathers were noted."""
        self._gathers.clear()

    def reset_history(self) -> None:
        """Drop all history, after a failed step, of which ranks may have seen more or less."""
        self._used_after.clear()


class GradientPool(Protocol):
    """The gradient slots of one size."""

    def first_free(self) -> SlotOfGradients | None:
        """A slot that is free now; None without any."""


class PlaceRules(ABC):
    """Where the gradients of all trainable chunks of one model are, by chunk index. All of it is local."""

    def __init__(self, books: Mapping[int, Gradient], pools: Sequence[GradientPool], payloads: PayloadRules) -> None:
        """books: of all trainable chunks. The dict has other chunks once others are trained. pools: by size."""
        self._books = books
        self._pools = pools
        self.payloads = payloads  # where the parameters are beside their homes, and who uses them
        self._lending = LendingHistory()
        self.lendable: Collection[int] = ()  # whose home may be lent, unless it gets a GRAD home in time

    def note_lendable(self) -> None:
        """Find out whose home may be lent: other chunks are trained from now on, or homes have moved."""
        self.lendable = dict.fromkeys(chunk for chunk in self._books if self._lends_home(chunk))

    # -- open gradients

    def open(self, chunk: int, backward: int, zero: bool = False, *, may_spill: bool = True) -> bool:
        """Make the payload writable: the home if it may be written, else a slot, filled from a spill if there is one.

        backward: the number of the backward that opens it. zero: fill it with zeros, unless gradients stay in the home.
        may_spill: another gradient makes room where no slot is free. Else nothing happens then, and it returns False.
        """
        gradient = self._books[chunk]
        state = gradient.state
        if state is not GradState.CLOSED and state is not GradState.SPILLED:
            return True
        if gradient.has_whole and state is GradState.CLOSED and gradient.may_write_home:
            self._open_at_home(chunk, zero)
            return True
        slot = self._pools[gradient.oversize].first_free()
        if slot is None:
            if not may_spill:
                return False
            # None of those inside is being reduced, and could not be spilled then: a reduction that held the last slot
            # was finished, see `GradientRules.open`.
            slot = self._spill(self._first_to_spill(gradient.oversize), chunk)
        if state is GradState.SPILLED:
            self._unspill(chunk, slot)
        else:
            # One rank continues the sum so far, in autograd's order of additions.
            resumes = gradient.reduced_state is ReducedState.IN_SHARD and gradient.resumes(backward)
            self._open_in_slot(chunk, slot, resumes, zero)
        return True

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

    # -- reduced gradients at rest

    def begin(self, chunk: int, backward: int, is_sum: bool = False) -> bool:
        """Make memory ready for what backward number `backward` reduces. True if it is the first of the step.

        is_sum: it is a sum of several backwards already, and rests in fp32 from the start.
        """
        gradient = self._books[chunk]
        is_first = gradient.reduced_state is ReducedState.NONE or gradient.reduced_state is ReducedState.USED
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
            self._take_memory(chunk, wide=True)
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
                self._take_memory(chunk, wide=False)
        gradient.become_reduced(ReducedState.IN_SHARD, backward)

    def move_out(self, chunk: int) -> None:
        """The parameters are needed before the step: move the gradient out of their home and restore them there."""
        # The new home is taken first: without memory for it the home stays lent.
        self._take_memory(chunk, wide=False)
        self._copy_out(chunk)
        self.restore(chunk)

    def restore(self, chunk: int) -> None:
        """Make the parameters again from the master in a home that no longer holds the gradient."""
        if chunk in self.lendable and self.is_lent(chunk):
            self._remake(chunk)
            self.consumed(chunk)

    def before_reduction(self, chunk: int) -> None:
        """Leave a kept slot that may be lent. See [Note: Lent payloads]. Every rank calls it at the same point."""
        if not self._lends_home(chunk):
            return
        payloads = self.payloads
        if not payloads.is_kept(chunk):
            return
        is_in_use, num_gathers = payloads.is_in_use(chunk), payloads.num_gathers[chunk]
        is_gathered = payloads.is_there(chunk) and not self.is_lent(chunk)
        if self._lending.releases(chunk, num_gathers, is_in_use=is_in_use, is_gathered=is_gathered):
            self._release_slot(chunk)

    def note_step(self) -> None:
        """A step ends: what is reduced from now on belongs to the next one."""
        for chunk in self.lendable:
            self._lending.note(chunk, self.payloads.num_gathers[chunk])
        self._lending.forget_step()

    def reset_history(self) -> None:
        """Forget the history of lent slots after a failed step, of which ranks may have seen more or less."""
        # Ranks that failed at different points would release different kept slots, and gather other chunks from then
        # on.
        self._lending.reset_history()

    def _can_lend_now(self, chunk: int) -> bool:
        payloads = self.payloads
        # A gather on its way sends this home to the other ranks.
        if payloads.is_coming(chunk):
            return False
        if payloads.at_home[chunk]:
            return not payloads.pins[chunk] and self._release_resident(chunk)
        # A slot of the pool lies beside the home. A kept slot has the home inside.
        return not (payloads.is_kept(chunk) and payloads.is_there(chunk))

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
    def _spill(self, victim: int, wanted: int) -> SlotOfGradients:
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
    def _release_slot(self, chunk: int) -> None:
        """Take the chunk out of its kept slot."""

    @abstractmethod
    def _release_resident(self, chunk: int) -> bool:
        """Take the parameters out of a home that is their payload. False if something holds a view of it."""

    @abstractmethod
    def _lend(self, chunk: int) -> None:
        """The parameter home holds the gradient from now on."""

    @abstractmethod
    def _take_memory(self, chunk: int, *, wide: bool) -> None:
        """Take a home for a gradient that has none, or fp32 memory beside it, for good. Raises BudgetError."""

    @abstractmethod
    def _move_to_wide(self, chunk: int) -> None:
        """The sum so far moves to fp32."""

    @abstractmethod
    def _copy_out(self, chunk: int) -> None:
        """Copy the gradient from the lent home to its own."""

    @abstractmethod
    def _remake(self, chunk: int) -> None:
        """Round the parameters from the master into the home that was lent."""


# -- When each chunk's gradient is reduced, so that every rank does it at the same point of the backward.
#
# Which gradients a rank gets, and when, may depend on its data (an expert without a token). Collectives may not. So the
# first backward of a kind is *recorded*: ranks agree step by step on the chunks that are complete. From then on all
# ranks reduce a chunk at the point where the slowest rank had its last gradient. A rank without a gradient by then
# contributes zeros, and a gradient that arrives later is reduced at the end of the backward.
#
# There are two kinds of points. If backward gathers parameters, points are touches: a chunk is reduced right before its
# touch, or before the next later one in the trace that the pass has. A touch is named by its event, so
# touches that a pass leaves out shift no point. If backward gathers nothing, only the order of the reductions matters:
# `order` has the chunks that every rank completed, and in every backward all ranks reduce all of them in this order
# before they agree on the remaining ones.


class ReductionOrder:
    """The points at which one model's trainable chunks are reduced, by chunk index."""

    def __init__(self, chunks: Sequence[int]) -> None:
        self.chunks = tuple(chunks)
        self.order = tuple(reversed(self.chunks))  # a first guess: backward reaches the last operator first
        self.points: dict[int, Touch] | None = None  # chunk -> touch before which it is reduced; None: not recorded yet
        self.last_fire = dict.fromkeys(self.chunks, -1)  # this backward: touches before the chunk's last gradient
        self._places: Mapping[Touch, int] = {}  # the trace that `_in_turn` was made from
        self._in_turn: list[tuple[int, int]] = []  # (place of the point, -chunk), sorted
        self._next = 0  # index in `_in_turn` of the first chunk that is not due yet
        self.completed: list[int] = []  # this backward: chunks whose expected gradients have all come, in this order

    def begin(self, places: Mapping[Touch, int] | None) -> None:
        """Begin a backward. places: the place of each touch in the trace. None: this kind of backward has no points."""
        # A trace that has changed is another object (`NextUse.places`): only then the points are looked up again.
        if places is not None and places is not self._places:
            self._place_points(places)
        self._next = 0
        self.last_fire = dict.fromkeys(self.chunks, -1)
        self.completed = []

    def note_unsynced(self, *, as_expected: bool) -> None:
        """Follow a backward under no_sync(), which reduced nothing. The next one is expected to touch the same chunks.

        If this one had unexpected touches, a chunk may get its last gradient after its point. That gradient would be
        reduced apart from the sum that no_sync() left, with other bits than a sum that each rank makes before the
        exchange. So the next backward is recorded.
        """
        if not as_expected:
            self.points = None

    def due(self, position: int) -> list[int]:
        """The chunks whose points are before `position` in the trace and that were not due earlier."""
        first = self._next
        # Points are sorted, so each is passed once in a backward, however many touches ask.
        while self._next < len(self._in_turn) and self._in_turn[self._next][0] < position:
            self._next += 1
        return [-chunk for _, chunk in self._in_turn[first : self._next]]

    def adopt(self, points: Sequence[int], ranking: Sequence[int], touches: Collection[Touch]) -> None:
        """Adopt the points and the order that the ranks agreed on.

        points: for each chunk the number of touches before its last gradient on the slowest rank, -1 for none anywhere.
        ranking: for each chunk its place in the order of completion on the slowest rank.
        touches: the touches of the pass that ends, in order. A gradient that comes after all of them has no point.

        A chunk without a gradient on any rank, such as an idle expert's, keeps its earlier point.
        """
        named = list(touches)
        pairs = zip(self.chunks, points, strict=True)
        points_by_chunk = dict(pairs)
        kept = {chunk: touch for chunk, touch in (self.points or {}).items() if points_by_chunk[chunk] < 0}
        found = {chunk: named[point] for chunk, point in points_by_chunk.items() if 0 <= point < len(named)}
        self.points = kept | found
        self._places = {}  # makes the next `begin` look up the new points
        # Chunks that some rank did not complete are left out of the order: ranks agree on them at the end.
        places = dict(zip(self.chunks, ranking, strict=True))
        complete = [chunk for chunk in self.chunks if places[chunk] < len(self.chunks)]
        # Of equal places the later chunk comes first: backward reaches it first.
        self.order = tuple(sorted(complete, key=lambda chunk: (places[chunk], -chunk)))

    def ranking(self) -> list[int]:
        """This rank's contribution to the `ranking` of `adopt`. Chunks that did not complete come last."""
        places = {chunk: place for place, chunk in enumerate(self.completed)}
        # A place beyond all others survives the maximum over ranks, so one rank without the chunk keeps it out of the
        # order.
        return [places.get(chunk, len(self.chunks)) for chunk in self.chunks]

    def _place_points(self, places: Mapping[Touch, int]) -> None:
        """Look up the points in another trace. If it lacks one of them, the next backward records all points again."""
        self._places, self._in_turn = places, []
        if self.points is not None and all(touch in places for touch in self.points.values()):
            self._in_turn = sorted((places[touch], -chunk) for chunk, touch in self.points.items())
        else:
            self.points = None


# -- The gradients of a backward: when they are complete, when all ranks reduce them, and what becomes of the means.
#
# Which gradients a rank gets, and when, may depend on its data; collectives may not. All ranks reduce a chunk at the
# same point (see `ReductionOrder`), and at the end of a backward whatever is open on any rank. If the backward gathers
# parameters, ranks reduce before a certain fetch. If not, the order of reductions is all they share.
#
# One rank has nothing to agree on: its gradient is the mean. Where the home is on the device in full precision,
# gradients are written and added there. Others are opened in a slot and merged into the home when they are complete.
#
# [Note: One exchange with replicas] Where groups of ranks hold the same shards, the mean over all ranks takes an
# exchange with the replicas, over the slower link. Several backwards of a step need one in all: each group adds its own
# means up, in the order of backwards, as if it were alone, and the groups take the mean of these sums, in their order,
# when gradients are used: by a step, a norm, a read, a write, a checkpoint. A sum may have means of all ranks in it
# already, as a user has read it or written to it: these are equal in all groups, and the mean over groups leaves them.
# So any mixture is right. A step's first backward exchanges its means at once, beside its own work, unless the user has
# said that others follow (`gradient_accumulation_steps`): in most trainings it is the only one. Where all ranks share
# optimizer states (`optimizer_shard="all"`) each has room for its own part of a mean of all, so every backward leaves
# the exchange, in which each rank then gets the mean of its part alone. What decides is the
# number of the backward, and what the user has said, so the bits follow from these, and from no budget and no place.


class GradientBooks:
    """What is known of one model's gradients in a backward, and from one backward to the next."""

    def __init__(self, of: Mapping[int, Gradient], *, is_alone: bool, has_several: bool = False) -> None:
        """of: the books of each trainable chunk. is_alone: this rank's gradients are all there are.

        has_several: a step is known to have several backwards.
        """
        self.of = of
        self._has_several = has_several
        self.is_alone = is_alone
        self.synchronizes = True  # False inside no_sync()
        self.awaits_reduction = False  # gradients from under no_sync() are left; equal on all ranks
        self.leaves_replicas = False  # the user has said that the exchange with replicas comes later
        self.awaits_replicas = False  # replicas may still have other gradients; equal on all ranks
        self.uses_up = False  # the running backward, or the last one, updates weights with its gradients
        self.in_flight: int | None = None  # the chunk whose reduction was started and not finished
        self.reduced: set[int] = set()  # chunks reduced in this backward: membership only
        self.changed: dict[int, None] = {}  # complete, or no more, perhaps, since ranks last asked each other
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

    def forget_step(self, *, has_zeros: bool) -> None:
        """Forget the step's gradients: they were used, discarded or zeroed, or their reduction has failed. Local.

        has_zeros: zeros are left, so ranks still agree on which parameters had a gradient.
        """
        # A reduction is in flight here only after a failure, or inside a backward.
        self.in_flight = None
        if not self.is_alone:
            self.changed.update(dict.fromkeys(self.of))
        if self.awaits_reduction and not has_zeros:
            # Of parameters that another optimizer updates they stay.
            self.awaits_reduction = any(gradient.is_behind for gradient in self.of.values())

    def leave_replicas(self, leaves: bool) -> None:
        """Whether backwards leave the exchange with replicas for later, whatever their number. Local."""
        self.leaves_replicas = leaves

    def defers(self, chunk: int, backward: int) -> bool:
        """Whether what backward number `backward` reduces is exchanged with replicas only when gradients are used.

        The first backward of a step exchanges its gradients beside its own work, if it may be the only one. See
        [Note: One exchange with replicas].
        """
        gradient = self.of[chunk]
        is_early = self._has_several or self.leaves_replicas or backward > 1 or gradient.in_groups
        return is_early and gradient.has_replicas and not self.uses_up

    def note_mean_of_group(self, chunk: int) -> None:
        """The chunk's mean over this group is about to be added. Every rank calls it at the same point."""
        self.awaits_replicas = True
        self.of[chunk].note_mean_of_group()

    def take_awaiting(self) -> list[int]:
        """The chunks whose gradients replicas must exchange before they are used, in order: the caller does it."""
        self.awaits_replicas = False
        return [chunk for chunk, gradient in self.of.items() if gradient.awaits_replicas and gradient.is_reduced]

    @property
    def knows_parts(self) -> bool:
        """Ranks know whose gradients come in part, which decides about updates inside the backward."""
        return self.has_told_parts or not self.uses_up


class GradientRules(ABC):
    """The gradients of one model's trainable chunks, by chunk index, from their arrival until they rest."""

    def __init__(
        self,
        books: GradientBooks,
        places: PlaceRules,
        waiting: Collection[int],
        *,
        gathers: bool,
    ) -> None:
        """waiting: the chunks whose gradients wait for `collect`. The object has others in every backward.
        gathers: the backward gathers parameters, so that ranks share the points of its fetches.
        """
        self._books = books
        self._places = places
        self._waiting = waiting
        self._next_use = places.payloads.next_use  # its touches are points that all ranks share
        self._gathers = gathers
        self._backward = 0  # number of the running backward within its step
        self._is_ending = False  # autograd is done with it

    def _begin(self, backward: int, *, uses_up: bool) -> None:
        """Backward number `backward` begins. uses_up: it updates weights with its gradients."""
        self._backward, self._is_ending = backward, False
        places = self._next_use.places if self._next_use.kind is PassKind.TRAINING else None
        self._books.begin_backward(places, uses_up=uses_up)

    # -- gradients that arrive

    def open(self, chunk: int, zero: bool = False) -> None:
        """Open the gradient for what has come, once a reduction that is in the way is finished. Local.

        Without a free slot another gradient is spilled, and one that is being reduced cannot be. A piece may also come
        while its own chunk is reduced, as with reentrant checkpointing.
        """
        books, places = self._books, self._places
        before = books.in_flight
        if before is None:
            places.open(chunk, self._backward, zero)
        elif before == chunk or not places.open(chunk, self._backward, zero, may_spill=False):
            books.in_flight = None
            self._rest(before)
            places.open(chunk, self._backward, zero)

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
        books.order.last_fire[chunk] = self._next_use.num_passed
        # More than what is expected may come: in the step's first backward some of the parameters may have been idle.
        if gradient.num_fired >= gradient.expected:
            books.changed[chunk] = None
        if chunk in books.reduced:
            # A piece came after the chunk was reduced: it is reduced by itself at the end, and the recorded point is
            # too early.
            books.is_off = gradient.in_pieces = True
        elif is_complete:
            books.order.completed.append(chunk)
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
        at = self._next_use.recorded_position
        if books.order.points is not None and at is not None:
            due: Sequence[int] = [i for i in books.order.due(at) if i not in books.reduced]
        else:
            due = self._complete_on_all_ranks()
        for chunk in due:
            # Gradients that wait in `.grad` are a part of what is reduced.
            if chunk in self._waiting:
                self.collect(chunk)
            self.reduce(chunk)

    def _is_as_recorded(self) -> bool:
        """Whether this pass has had the recorded touches only, so that gradients come by their recorded points."""
        return self._next_use.recorded_position is not None

    def end(self) -> None:
        """The backward is over, and no gradient waits: reduce what is open on any rank, or leave it under no_sync().

        Ranks agree on the points of the next backward. Collective, but for under no_sync(), which reduces nothing.
        """
        self._is_ending = True
        books, order = self._books, self._books.order
        if books.is_alone:
            for chunk, gradient in books.of.items():
                # Chunks without a gradient are left alone: on one rank nobody else needs zeros of them.
                if gradient.state is GradState.AT_HOME:
                    self._places.rest_in_place(chunk, self._backward)
                elif gradient.is_open:
                    self.reduce(chunk)
                if books.synchronizes:
                    self._expect_what_came(gradient)
            return
        if not books.synchronizes:
            self.finish()
            self._keep_unsynced()
            books.awaits_reduction = True
            order.note_unsynced(as_expected=self._is_as_recorded() or not self._gathers)
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
        is_other = not self._is_as_recorded() if self._gathers else tuple(order.completed) != order.order
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
        books, places = self._books, self._places
        # What is exchanged in tiles, or was left by no_sync(), comes to rest at once.
        if not books.is_alone and self._reduce_apart(chunk):
            return
        before, books.in_flight = books.in_flight, None
        if before is not None:
            self._rest(before)
        books.reduced.add(chunk)
        # The gradient may have been spilled. A rank without one takes part all the same, with a payload of zeros.
        places.open(chunk, self._backward)
        if chunk in places.lendable and not books.is_alone:
            places.before_reduction(chunk)
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
            self._merge(chunk, self._places.begin(chunk, self._backward))
        self._places.close(chunk)

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
        # Others are to be added to a gradient at rest. A chunk in use must keep its weights.
        if gradient.is_reduced or gradient.is_behind or self._places.payloads.is_in_use(chunk):
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
    def _keep_unsynced(self) -> None:
        """Add what is open to the sums that no rank has reduced. Local."""

    @abstractmethod
    def _latest(self, points: Sequence[int], ranking: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        """The latest point, and rank, of each chunk over all ranks. Collective."""

    @abstractmethod
    def _reduce_apart(self, chunk: int) -> bool:
        """Reduce to the end what cannot stay in flight. False if the chunk is reduced like others. Collective."""

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
