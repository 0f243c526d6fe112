"""Gradients from their arrival until they rest: reduced over ranks; then at rest, or used up by the backward."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import repeat
from types import NoneType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from gemini.errors import GeminiError, UnsupportedError
from gemini.memory.modes import untracked
from gemini.memory.transfer import Region
from gemini.placement.demand import Tier
from gemini.placement.gradient import Content, GradState, UnsyncedState
from gemini.placement.gradient_rules import GradientBooks, GradientRules
from gemini.placement.next_use import Phase
from gemini.ranks.communicator import Communicator
from gemini.runtime.arrivals import graph_refused
from gemini.runtime.calls import Underway
from gemini.runtime.chunk import Chunk
from gemini.runtime.grad_places import GradPlaces
from gemini.runtime.gradient import ChunkGradient, grad_of, set_grads
from gemini.runtime.grads import GradStore
from gemini.runtime.params import ParamStore
from gemini.runtime.recovery import Failures
from gemini.runtime.tiles import fill_from, join_replicas, keep_unsynced, mean_across, reduce_in_tiles, reduce_unsynced
from sharding import ShardLayout

# -- Agrees on which gradients are complete on every rank, while a backward is recorded.
#
# [Note: News] Ranks ask at every touch. A message about every chunk at each touch would cost the square of the number
# of chunks, so a rank sends only what has changed since the last touch. Mostly the news is equal on all ranks, which a
# digest of fixed size shows. Only where digests differ do ranks send the news itself. Each rank then counts, by chunk,
# how many ranks have its gradient complete.


_WHAT = "agreement on complete gradients"
_DIGEST_WORDS = 2


class Completion:
    """The complete gradients of one backward of one model, on several ranks."""

    def __init__(self, books: GradientBooks, communicator: Communicator) -> None:
        self._books = books
        self._communicator = communicator
        self._told: dict[int, None] = {}  # chunks that this rank last reported as complete
        self._num_ranks: dict[int, int] = {}  # by chunk: ranks that last reported it complete; equal on all ranks
        self.has_asked = False

    def begin(self) -> None:
        """A backward starts."""
        self.has_asked = False
        self._told.clear()
        self._num_ranks.clear()

    def note_reduced(self, index: int) -> None:
        """The chunk's gradient is being reduced. Every rank calls it at the same point."""
        self._told.pop(index, None)
        self._num_ranks.pop(index, None)

    def agree(self) -> list[int]:
        """Chunks whose open gradient is complete on every rank, in the model's order. Collective."""
        news = self._news()
        digest = array("q", blake2b(news.tobytes(), digest_size=8 * _DIGEST_WORDS).digest()).tolist()
        # One all-reduce gives maximum and minimum: the largest complement is that of the smallest word.
        words = [*digest, *(~word for word in digest)]
        packed_words = torch.tensor(words, dtype=torch.int64, device=self._communicator.device)
        self._communicator.all_reduce_max_(packed_words, _WHAT)
        # The host waits for the device here, at each touch, but only in backwards that are recorded.
        agreed: list[int] = packed_words.tolist()
        world_size = self._communicator.world_size
        # Maximum and minimum of each word are equal: all ranks have the same news.
        if all(agreed[i] == ~agreed[i + _DIGEST_WORDS] for i in range(_DIGEST_WORDS)):
            of_ranks = [news] * world_size
        else:
            of_ranks = [array("q", sent) for sent in self._communicator.all_gather_bytes(news.tobytes(), _WHAT)]
        for its_news in of_ranks:
            for word in its_news:
                index, is_complete = divmod(word, 2)
                self._num_ranks[index] = self._num_ranks.get(index, 0) + (1 if is_complete else -1)
        # A chunk can have become complete everywhere only by news of some rank, so the others need no look.
        touched = sorted({word // 2 for its_news in of_ranks for word in its_news})
        return [index for index in touched if self._num_ranks[index] == world_size]

    def _news(self) -> array[int]:
        """Words of each chunk that became complete or incomplete: two times its index, plus 1 if it is complete."""
        gradients, changed = self._books.of, self._books.changed
        # What was told stays so until the chunk is reduced, or noted in `changed`: ranks with other news ask at every
        # touch, and a look at all that was told would cost the square of the number of chunks.
        if self.has_asked:
            suspects = sorted(changed)
        # First question of this backward: earlier touches may have followed the schedule without asking, and an
        # interrupted backward may have left gradients.
        else:
            suspects = sorted(gradients)
        self.has_asked = True
        changed.clear()
        news = array("q")
        for index in suspects:
            is_complete = gradients[index].is_complete
            # A suspect whose state this rank has told already is no news.
            if is_complete == (index in self._told):
                continue
            news.append(2 * index + is_complete)
            if is_complete:
                self._told[index] = None
            else:
                del self._told[index]
        return news


# -- Carries `GradientRules` out: the exchange over ranks, the mean into its home, or the update of the weights with it.
#
# A reduction is first only started. It is finished when the next one starts, when its slot is wanted, or when the
# backward ends. The mean is made in fp32 (fp64 for fp64) and rounded once, to the dtype in which the gradient rests.


class UpdatesInBackward(Protocol):
    """What updates weights while the backward runs. All of it is local. It knows no step."""

    def begin(self, grads: GradStore) -> None:
        """A backward begins. Raises what a step would refuse, and GeminiError if there are gradients to add to."""

    def takes(self, chunk: Chunk) -> bool:
        """Whether it updates the whole chunk, and this rank alone."""

    def use(self, gradient: ChunkGradient, reduced: Region) -> None:
        """Update the chunk with its gradient, (optim_numel,) on the device, which is not needed any more."""


class SumsInBackward(Protocol):
    """What sums up gradients for the norm while the backward runs. All of it is local."""

    def begin(self, gradient: ChunkGradient, backward: int) -> None:
        """Begin to sum up a gradient of this backward that has come to rest on the host, or is on its way there."""


USES_UP = "and update_in_backward=True uses them up at once: wrap the model without it"


# Getters as functions: `map` then reads the attribute of many gradients in C.
_has_graph: Callable[[Tensor], bool] = cast(Any, Tensor).requires_grad.__get__
_layout_of: Callable[[Tensor], torch.layout] = cast(Any, Tensor).layout.__get__
_STRIDED = {torch.strided}


class Reductions(GradientRules):
    """The gradients of one model that autograd makes, their reductions, and what becomes of the means.

    Whoever calls it in a backward does so inside of `untracked`.
    """

    def __init__(
        self, params: ParamStore, grads: GradStore, underway: Underway, failures: Failures, stage: int
    ) -> None:
        super().__init__(grads.books, grads.places, grads.arrivals.begun, gathers=False)
        self.updates: UpdatesInBackward | None = None  # None: all gradients rest until a step
        self._sums: SumsInBackward | None = None
        self._params = params
        self._grads = grads
        self._places: GradPlaces = grads.places
        self._gradients = grads.places.gradients
        self._scratch = grads.scratch
        self._arrivals = grads.arrivals
        self._communicator = params.communicator
        self._completion = Completion(grads.books, params.communicator)
        self._underway = underway
        self._failures = failures
        self._stage = stage
        self._missing: dict[int, bytes] = {}  # by chunk that was reduced in this backward: see `Gradient.missing`

    def serve(self, updates: UpdatesInBackward | None, sums: SumsInBackward | None) -> None:
        """There is an optimizer, whose parts use gradients in the backward, or there is none any more. Local."""
        self.updates, self._sums = updates, sums

    def note_placement(self, is_resident: bool) -> None:
        """is_resident: no payload leaves between forward and update, so that backward launches no gathers."""
        self._gathers = self._stage == 3 and not is_resident and not self._books.is_alone

    def begin_backward(self) -> None:
        """A backward has reached the model. Local. Raises BudgetError for the first one without an optimizer."""
        # If this finds no memory, no backward has begun.
        self._grads.begin_training()
        if self.updates is not None:
            self.updates.begin(self._grads)
        self._grads.begin_backward()
        self._missing.clear()
        self._completion.begin()
        self._begin(self._grads.num_backwards, uses_up=self.updates is not None)

    # -- gradients that arrive

    def take_gradient(self, index: int, position: int, grad: Tensor, *, are_more: bool = False) -> None:
        """Take the dense gradient of the parameter at `position` of chunk `index`. are_more: others follow at once.

        Raises UnsupportedError for a parameter that was unfrozen after its forward began.
        """
        gradient = self._gradients.get(index)
        view = None if gradient is None else gradient.expects[position]
        if gradient is not None and view is not None:  # the common way: a copy and some flags
            view.copy_(grad)
        # It opens its chunk, comes in pieces, or is added to a sum.
        else:
            if gradient is None or not gradient.all_trained:
                self._check_trained(index, position)
            assert gradient is not None, "a chunk of which nothing is trained was refused"
            self.open(index)
            view = gradient.views[position]
            if gradient.fired[position] or (gradient.content is Content.SUM and gradient.got[position]):
                view.add_(grad)
            else:
                view.copy_(grad)
        gradient.note_fired(position)
        if not are_more:
            self.arrived(index)

    def collect(self, chunk: int, are_all: bool = True) -> None:
        """Copy the chunk's waiting gradients, of which there are some, to its payload.

        are_all: no others of the chunk will wait for now. Raises UnsupportedError for a gradient that has a graph.
        """
        arrivals, gradient = self._arrivals, self._gradients[chunk]
        waiting = arrivals.waiting_of(gradient.chunk)
        arrived, positions, has_pieces = waiting.take_arrived()
        # Autograd has added the gradients of a parameter that came twice.
        if has_pieces:
            gradient.in_pieces = True
        num_missing = gradient.expected - gradient.num_fired - len(positions)
        # The chunk goes on waiting only while more of its gradients are to come and no other chunk needs its slot.
        if are_all or num_missing <= 0 or not self._places.is_in_nobodys_way(gradient):
            arrivals.begun.remove(chunk)
            waiting.end()
        else:
            arrivals.expect(gradient, num_missing)
            # Autograd itself adds to what is attached.
            if gradient.attached is None:
                waiting.note_copied(arrived)
        if gradient.attached is not None:
            self._note_added(gradient, positions)
        elif not self._copy_waiting(gradient, positions):
            return
        self.arrived(chunk)

    def _note_added(self, gradient: ChunkGradient, positions: Sequence[int]) -> None:
        """Note gradients that autograd has added to the home."""
        if not gradient.all_trained:
            for position in positions:
                self._check_trained(gradient.index, position)
        self.open(gradient.index)
        if gradient.num_fired:  # they were read inside of this backward
            positions = [each for each in positions if not gradient.fired[each]]
        gradient.note_all_fired(positions)

    def _copy_waiting(self, gradient: ChunkGradient, positions: Sequence[int]) -> bool:
        """Copy gradients from `.grad` to the payload. False if hooks of the user's have left none."""
        chunk = gradient.chunk
        # A range stands for all parameters, which needs no list of them.
        if len(positions) == len(chunk.raw):
            positions = range(len(chunk.raw))
        parameters = _at(positions, chunk.raw)
        with torch._C.DisableTorchFunctionSubclass():
            # The loops over parameters run in C. `.grad` is cleared first: autograd would add the next gradient to it.
            grads = list(map(grad_of, parameters))
            set_grads(parameters, repeat(None))
            # A post-accumulate hook of the user's has set `.grad` to None.
            if NoneType in map(type, grads):
                positions = [position for position, grad in zip(positions, grads, strict=True) if grad is not None]
                grads = [grad for grad in grads if grad is not None]
            if not grads:
                return False
            if any(map(_has_graph, grads)):
                raise graph_refused(chunk.parameters[positions[list(map(_has_graph, grads)).index(True)]].name)
            if not _STRIDED.issuperset(map(_layout_of, grads)):
                # Added to a blank home, a sparse gradient would leave negative zeros in the rows that it does not have.
                self._arrivals.waiting_of(chunk).may_attach = False
                grads = [grad.to_dense() if grad.layout is not torch.strided else grad for grad in grads]
            fired = gradient.fired
            # Gradients that must be added, or refused, are taken one by one.
            if not gradient.all_trained or (gradient.num_fired and any(map(fired.__getitem__, positions))):
                for position, grad in zip(positions, grads, strict=True):
                    self.take_gradient(chunk.index, position, grad, are_more=True)
                return True
            # Zero the whole payload: this chunk has too many paddings to zero them one by one.
            self.open(chunk.index, zero=True)
            torch._foreach_copy_(_at(positions, gradient.views), grads)
        gradient.note_all_fired(positions)
        return True

    def _check_trained(self, index: int, position: int) -> None:
        managed = self._params.chunks[index].parameters[position]
        if not managed.requires_grad:
            raise UnsupportedError(
                f"{managed.name!r} was unfrozen while a forward ran, or after it: do it before the forward"
            )

    def collect_all(self) -> None:
        """Take over all waiting gradients: they are about to be read, reduced or discarded."""
        if self._arrivals.begun:
            with untracked():
                # The loop has a copy, because `collect` removes chunks from the list.
                for chunk in list(self._arrivals.begun):
                    self.collect(chunk)

    def refuse_gift(self, name: str) -> None:
        """Raises GeminiError for a gradient that a user sets, of the parameter of this name, where none would wait."""
        if self.updates is not None:
            raise GeminiError(f"the gradient of {name!r} cannot be set: none waits for the step, {USES_UP}")

    # -- points at which gradients are reduced

    def _reduce_in_order(self) -> None:
        position = self._communicator.position
        before = position.now
        # Ranks may be at different operators here, and the position travels in the tags: use one that all share.
        position.set(0, Phase.BACKWARD)
        super()._reduce_in_order()
        position.return_to(before)

    def _keep_unsynced(self) -> None:
        for gradient in self._gradients.values():
            if gradient.is_open:
                keep_unsynced(gradient, self._backward, self._places)
            # Other ranks may have left something: this rank takes part in its reduction later, with zeros.
            elif not gradient.is_behind:
                gradient.become_unsynced(UnsyncedState.ELSEWHERE)

    def catch_up(self) -> None:
        """Do what was put off, before gradients are read or used. Collective.

        Only where backwards ran under no_sync(), or replicas have added up by themselves, ranks exchange something.
        """
        self.catch_up_flags()
        self.join_replicas()

    def catch_up_flags(self) -> None:
        """Do what was put off and decides who has a gradient. Collective if backwards ran under no_sync()."""
        # Reductions come first: zeros are then written only for chunks without a gradient, by flags on which ranks have
        # agreed.
        if self._books.awaits_reduction:
            with untracked():
                self._reduce_open("unsynced gradients", self._grads.num_backwards)
        self._grads.write_zeros()

    def join_replicas(self) -> None:
        """Have replicas take the mean of what they have added up by themselves, before gradients are used. Collective.

        See [Note: One exchange with replicas]. Nothing may be open or on its way.
        """
        if not self._books.awaits_replicas:
            return
        with untracked():
            for chunk in self._books.take_awaiting():
                gradient = self._gradients[chunk]
                exchange = mean_across if gradient.in_groups else join_replicas
                exchange(gradient, self._places, self._scratch, self._communicator)

    # -- what ranks tell each other

    def _complete_on_all_ranks(self) -> Sequence[int]:
        return self._completion.agree()

    def _open_on_any_rank(self, when: str, is_off: bool) -> tuple[Sequence[int], bool]:
        # The all-reduce also carries which parameters have a gradient on any rank. So `.grad is None` has the same
        # answer on all ranks and costs no collective of its own.
        books = self._books
        gradients = list(self._gradients.values())
        own = bytearray([is_off, *(g.is_open or g.unsynced_state is UnsyncedState.HELD for g in gradients)])
        for gradient in gradients:
            own += gradient.got
        if books.uses_up:
            for gradient in gradients:
                self._note_missing(gradient)
                own += self._missing[gradient.chunk.index]
            own += bytes(sum(self._missing[g.chunk.index]) < g.num_trained for g in gradients)
            own += bytes(g.is_used for g in gradients)
        words = torch.frombuffer(own, dtype=torch.uint8).to(self._communicator.device)
        # One byte a flag, in one all-reduce: off | chunk to be reduced, by chunk | parameter has a gradient, by chunk |
        # where the backward updates: parameter lacks a gradient, by chunk | chunk has some gradient | chunk is updated.
        self._communicator.all_reduce_max_(words, when)
        # Reading the flags makes the host wait for the device.
        agreed: bytes = words.cpu().numpy().tobytes()
        left: list[int] = []
        start = len(gradients) + 1
        if books.uses_up:
            self._note_parts(gradients, agreed[start + sum(len(gradient.got) for gradient in gradients) :])
        for number, gradient in enumerate(gradients):
            end = start + len(gradient.got)
            gradient.note_agreed(agreed[start:end])
            start = end
            if agreed[number + 1]:
                left.append(gradient.index)
            # Where some rank held a sum its reduction ends this state. Here no rank holds one.
            elif books.awaits_reduction and gradient.is_behind:
                gradient.become_unsynced(UnsyncedState.NONE)
        return left, bool(agreed[0])

    def _note_missing(self, gradient: ChunkGradient) -> None:
        """Note which gradients this backward has not brought to this rank, before the payload is closed. Local."""
        index, missing = gradient.chunk.index, gradient.missing
        before = self._missing.get(index)  # what comes in pieces is reduced several times
        self._missing[index] = missing if before is None else bytes(map(min, before, missing))

    def _note_parts(self, gradients: Sequence[ChunkGradient], agreed: bytes) -> None:
        """Note whose gradients have come in part, where the backward updates. Equal on all ranks.

        agreed: what `_open_on_any_rank` has exchanged for it. Raises GeminiError on all ranks if some have updated a
        chunk of which others had a part.
        """
        count, is_first, start = len(gradients), not self._books.has_told_parts, 0
        have_some, are_used = agreed[-2 * count : -count], agreed[-count:]
        self._books.has_told_parts = True
        for gradient, has_some, is_used in zip(gradients, have_some, are_used, strict=True):
            missing = agreed[start : start + len(gradient.got)]
            start += len(gradient.got)
            if is_used and any(missing):
                raise GeminiError(
                    f"no gradient of {gradient.chunk.parameters[missing.index(1)].name!r} came in this backward, as in "
                    "all before, and other ranks have updated its chunk: wrap the model without update_in_backward=True"
                )
            # A branch that all ranks alike leave out for once is no part. One that none has used so far may be: the
            # data of one rank may choose it.
            if any(missing) and (has_some or is_first):
                gradient.note_part()

    def _latest(self, points: Sequence[int], ranking: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        both = torch.tensor([*points, *ranking], dtype=torch.int64, device=self._communicator.device)
        self._communicator.all_reduce_max_(both, "points of reduction")
        agreed: list[int] = both.tolist()
        return agreed[: len(points)], agreed[len(points) :]

    # -- reductions

    def _reduce_apart(self, chunk: int) -> bool:
        """Reduce to the end what is exchanged in tiles, or was left by no_sync(). False if the chunk is neither."""
        gradient, places, communicator = self._gradients[chunk], self._places, self._communicator
        if self._books.uses_up:
            self._note_missing(gradient)
        if self._completion.has_asked:
            self._completion.note_reduced(chunk)
        is_behind = gradient.unsynced_state is not UnsyncedState.NONE
        if not is_behind and gradient.chunk.exchange_bytes <= self._scratch.num_bytes:
            return False
        self.finish()
        self._books.reduced.add(chunk)
        if is_behind:
            # The sum under no_sync() is whole and unreduced: this gradient is added to it, and both are reduced as one.
            if gradient.is_open:
                keep_unsynced(gradient, self._backward, places)
            # A sum of several backwards goes to replicas at once: nothing else may come before the step.
            layout = self._layout_of(gradient) if gradient.in_groups else gradient.chunk.grad_layout
            reduce_unsynced(gradient, layout, self._backward, places, self._scratch, communicator)
        else:
            places.open(gradient.index, self._backward)
            places.complete(gradient)
            self._reduce_in_tiles(gradient, self._backward)
        return True

    def _reduce_in_tiles(self, gradient: ChunkGradient, backward: int) -> None:
        """Reduce the open payload to the end. Collective.

        Each tile is a collective: the later ones must not wait for a point that is this rank's alone.
        """
        chunk, whole = gradient.chunk, gradient.payload
        assert whole is not None
        with self._places.moving(gradient, self._communicator.position.here, blocks=1):
            self._places.before_reduction(chunk.index)
            self._places.begin_reduction(gradient)
            layout = self._layout_of(gradient)
            # Where gradients are written to the home, the mean of a tile replaces elements that were sent before.
            is_first = self._places.begin(gradient.index, backward)
            reduce_in_tiles(
                chunk,
                gradient.reduced(),
                fill_from(whole.flat, chunk),
                layout,
                travel=chunk.travel_dtype,
                rest=chunk.gradient_dtype,
                replaces=is_first,
                places=self._places,
                scratch=self._scratch,
                communicator=self._communicator,
            )
            self._places.close(gradient.index)

    def _start(self, chunk: int) -> bool:
        gradient, places, scratch = self._gradients[chunk], self._places, self._scratch
        places.complete(gradient)
        # This orders what is written next behind the copies of the last merge out of this memory.
        scratch.reset()
        is_alone = self._books.is_alone
        moving = places.moving(gradient, self._communicator.position.here, blocks=1 if is_alone else 2)
        if is_alone:
            places.flight = None, self._narrowed(gradient), moving
            return False
        with moving:
            places.flight = *self._launch(gradient), moving
        # At stage 0 finishing is a collective (an all-gather): it must not wait for a point that is this rank's alone.
        return self._stage > 0

    def _narrowed(self, gradient: ChunkGradient) -> Region:
        """The payload, in the dtype in which the gradient rests, which may be narrower."""
        chunk, payload = gradient.chunk, gradient.payload
        assert payload is not None
        if not chunk.narrows:
            return payload
        rounded = self._scratch.region(payload.numel, chunk.gradient_dtype)
        rounded.flat.copy_(payload.flat)
        return rounded

    def _launch(self, gradient: ChunkGradient) -> tuple[Callable[[], None], Region]:
        """Start the exchange. Returns what waits for the mean, and the region that it comes to. Collective."""
        chunk, whole, scratch = gradient.chunk, gradient.payload, self._scratch
        assert whole is not None
        payload = whole.flat
        rests_as_is = chunk.gradient_dtype is chunk.dtype
        # At stage 0 the mean is gathered whole in the dtype in which it rests, which is not that of the payload here.
        if self._stage == 0 and not rests_as_is:
            whole = scratch.region(chunk.numel, chunk.gradient_dtype)
        in_place = gradient.state is GradState.AT_HOME or self._stage == 0
        # This rank's slice of the payload is where the mean rests: the exchange writes it there. Slices of several
        # units are not contiguous.
        if in_place and len(chunk.layout.units) == 1:
            begin = chunk.layout.slices(chunk.rank)[0].payload_start
            out = whole[begin : begin + chunk.layout.shard_numel]
        else:
            out = scratch.region(chunk.grad_layout.shard_numel, chunk.gradient_dtype)
        # `reduce_dtype=`: the gradient travels as a cast copy.
        if chunk.travel_dtype is not chunk.dtype:
            payload = scratch.allocate(chunk.numel, chunk.travel_dtype).copy_(payload)
        layout = self._layout_of(gradient) if gradient.has_replicas else chunk.grad_layout
        finish = self._communicator.start_reduce_scatter(payload, layout, out.flat, chunk.index, scratch.allocate)
        self._places.begin_reduction(gradient)
        if self._stage > 0:
            return finish, out

        def finish_and_gather() -> None:
            finish()
            self._communicator.all_gather(whole.flat, out.flat, layout, chunk.index)

        return finish_and_gather, whole

    def _layout_of(self, gradient: ChunkGradient) -> ShardLayout:
        """The layout by which the gradient is reduced now. Every rank calls it at the same point."""
        layout = gradient.chunk.grad_layout
        if not self._books.defers(gradient.index, self._backward):
            return layout
        if gradient.in_groups and gradient.is_reduced and not gradient.awaits_replicas:
            # The gradients of another backward are added in fp32, if the chunk widens: so is what was there.
            if gradient.first_backward != self._backward:
                self._places.widen(gradient.index, self._backward)
            self._places.begin_group_sum(gradient.index)
        self._books.note_mean_of_group(gradient.index)
        return layout.of_group

    # -- what becomes of a mean

    def _merge(self, chunk: int, is_first: bool) -> None:
        assert self._places.flight is not None
        finish, reduced, moving = self._places.flight
        with moving:
            if finish is not None:
                finish()
            gradient = self._gradients[chunk]
            # Added, if the step has a gradient that the payload did not start with.
            target, replaces = gradient.reduced(), is_first or gradient.content is Content.SUM
            self._places.put(target, reduced, replaces)
            # What replicas will change is summed up when they have.
            if self._sums is not None and replaces and target.tier is Tier.HOST and not gradient.awaits_replicas:
                self._sums.begin(gradient, self._backward)

    def _use(self, chunk: int) -> None:
        assert self._places.flight is not None and self.updates is not None
        finish, reduced, moving = self._places.flight
        with moving:
            if finish is not None:
                finish()
            gradient, binding = self._gradients[chunk], self._params.binding
            with self._failures.tearing():
                binding.write_back(gradient.chunk)
                binding.snapshots.drop(gradient.chunk)
                self._params.make_stale(gradient.chunk)
                gradient.note_used()
                self.updates.use(gradient, reduced)

    def _leave_node(self) -> None:
        self._underway.follow_node()

    def _takes(self, chunk: int) -> bool:
        return self.updates is not None and self.updates.takes(self._gradients[chunk].chunk)

    def _leave_slot(self, chunk: int) -> None:
        self._params.make_stale(self._gradients[chunk].chunk)


def _at(positions: Sequence[int], items: Sequence[Tensor]) -> list[Tensor]:
    """The items at `positions`; a range stands for all of them."""
    return list(items) if isinstance(positions, range) else [items[position] for position in positions]
