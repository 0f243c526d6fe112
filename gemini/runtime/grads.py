"""The store of gradients: what is known of them from backward to step, and what a step leaves of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import repeat

import torch

from gemini.errors import GeminiError, UpdatedInBackwardError, torn
from gemini.memory.modes import A_HOOK, never_traced, unseen, untracked
from gemini.memory.transfer import Region, Scratch, ready
from gemini.placement.gradient import UnsyncedState
from gemini.placement.gradient_rules import GradientBooks
from gemini.runtime.arrivals import Arrivals
from gemini.runtime.calls import backward_runs
from gemini.runtime.chunk import Chunk, ManagedParameter
from gemini.runtime.grad_places import GradPlaces
from gemini.runtime.gradient import BLANK, ChunkGradient, set_grads
from gemini.runtime.training import TrainingState

# -- What remains of gradients after a step or zero_grad(): None, zeros, or the gradients that stay.
#
# [Note: Zeros] zero_grad(set_to_none=False) leaves zeros, with which a step moves parameters by their moments. No
# memory is written for them at first: the flags say that there is a gradient, and elements that no backward writes to
# become zero when the chunk is reduced. Only a chunk that no backward has reached is filled with zeros, when they are
# needed.


class Becomes(Enum):
    """What gradients are after a step or zero_grad().

    USED: None for now, but zero_grad(set_to_none=False) makes zeros of them: plain PyTorch would still have them.
    NONE: None, as if there had never been one.
    ZERO: zeros, where there was a gradient since they were last set to None.
    """

    USED = "used"
    NONE = "none"
    ZERO = "zero"

    @staticmethod
    def of(set_to_none: bool) -> Becomes:
        """What `zero_grad(set_to_none=)` makes of gradients."""
        return Becomes.NONE if set_to_none else Becomes.ZERO


class Leftovers:
    """What remains of one model's gradients. All of it is local, and its decisions are equal on all ranks."""

    def __init__(self, places: GradPlaces) -> None:
        self._places = places
        self._searched: list[int] = []  # indices of the chunks that `are_any` searches
        self._place = 0  # where that search has come to

    def leave(self, becomes: Becomes, stay: Mapping[int, Sequence[bool]]) -> None:
        """Leave what a step that used the gradients does, or one of `zero_grad()`.

        stay: which gradients stay, by chunk index, then by position.
        """
        places = self._places
        for index, gradient in places.gradients.items():
            stays = stay.get(index, ())
            # This comes first: the flags that remain follow from those of the step, which are overwritten below.
            after = _flags_after(gradient, becomes)
            # Nothing of the chunk stays: its memory is free, and a lent home gets its parameters back.
            if not stays or not keeps(gradient, stays):
                if gradient.holds_any:
                    places.discard(gradient)
                gradient.note_leftovers(*after)
                if index in places.lendable:
                    places.restore(index)
                continue
            pairs = zip(gradient.chunk.parameters, stays, strict=True)
            self.clear(gradient, [managed for managed, does in pairs if not does])
            if gradient.is_open:
                self._places.close(gradient.index)
            gradient.outlive_step()
            gradient.note_leftovers(
                *(
                    bytes(old if does else new for old, new, does in zip(flags, its_after, stays, strict=True))
                    for flags, its_after in zip((gradient.had, gradient.got, gradient.agreed), after, strict=True)
                )
            )
        self._places.note_step()

    def are_any(self) -> bool:
        """Whether this rank has a gradient of some parameter.

        The search goes on where the last one found a gradient. So a loop that discards the gradients of all parameters,
        one after the other, takes time in proportion to their number.
        """
        # First the rest of the last search, then all chunks once.
        for _ in range(2):
            while self._place < len(self._searched):
                gradient = self._places.gradients.get(self._searched[self._place])
                if gradient is not None and any(gradient.got):
                    return True
                self._place += 1
            self._searched, self._place = list(self._places.gradients), 0
        return False

    def clear(self, gradient: ChunkGradient, some: Sequence[ManagedParameter]) -> None:
        """Set the gradients of some of the chunk's parameters to zero, so that later ones are added to zero."""
        gradient.count_write()
        if gradient.unsynced_state is UnsyncedState.HELD:
            assert gradient.unsynced is not None
            unsynced = ready(gradient.unsynced)
            for managed in some:
                unsynced[managed.offset : managed.offset + managed.numel].zero_()
        if not gradient.is_reduced:
            return
        # Autograd adds to an attached home, and -0.0 is the only zero that changes no bit of a gradient.
        reduced, zero = ready(gradient.reduced()), 0.0 if gradient.attached is None else BLANK
        # Every rank calls this, and sets the parts that it holds.
        for managed in some:
            for part in gradient.parts_of(managed, reduced):
                part.fill_(zero)

    def write_zeros(self, backward: int) -> None:
        """Write the zeros that a step is about to read. See [Note: Zeros]. Every rank calls it at the same point."""
        for gradient in self._places.gradients.values():
            # Unlike `got`, `agreed` is equal on all ranks, so that they fill the same chunks.
            if any(gradient.agreed):
                self._places.fill(gradient, backward)

    def leave_homes(self, stay: Mapping[int, Sequence[bool]]) -> None:
        """Move gradients that stay out of parameter homes, which the step writes to. Raises BudgetError."""
        # The memory for it is taken before the update: a lack of it refuses the step while nothing has changed.
        for index, stays in stay.items():
            gradient = self._places.gradients.get(index)
            if gradient is not None and gradient.chunk.holds_grad and keeps(gradient, stays):
                self._places.move_out(gradient.index)

    def rescale(self, factor: float) -> None:
        """Adapt gradients that have stayed to a loss scale that is `factor` times as large now."""
        for gradient in self._places.gradients.values():
            if gradient.is_reduced:
                # 16 bits may not hold the larger values.
                self._places.widen(gradient.index, gradient.first_backward)
        self.multiply(factor, {})

    def multiply(self, factor: float, but: Mapping[int, Sequence[bool]]) -> None:
        """Multiply all reduced gradients by `factor`, except those in `but`, by chunk index, then by position."""
        with untracked():
            for gradient in self._places.gradients.values():
                if not gradient.is_reduced:
                    continue
                chunk, reduced = gradient.chunk, ready(gradient.reduced())
                excepted = but.get(chunk.index)
                if excepted is None:
                    reduced.mul_(factor)
                else:
                    pairs = zip(chunk.parameters, excepted, strict=True)
                    for part in (
                        part for managed, stays in pairs if not stays for part in gradient.parts_of(managed, reduced)
                    ):
                        part.mul_(factor)
                gradient.count_write()


def keeps(gradient: ChunkGradient, stays: Sequence[bool]) -> bool:
    """Whether the chunk has, or may have, a gradient of one of the parameters in `stays`, by position."""
    # Which parameters have unreduced gradients on other ranks is not known here: assume that these have.
    if gradient.is_behind and any(stays):
        return True
    # `stays` is empty for a chunk of which nothing stays.
    return gradient.is_reduced and any(does and got for does, got in zip(stays, gradient.agreed, strict=False))


def _flags_after(gradient: ChunkGradient, becomes: Becomes) -> tuple[bytes, bytes, bytes]:
    """The flags `had`, `got` and `agreed` after a step or zero_grad()."""
    none = bytes(len(gradient.got))
    if becomes is Becomes.NONE:
        return none, none, none
    # Zeros remain for each parameter that has had a gradient on any rank since they were last set to None. `got` may
    # know of more on this rank: gradients under no_sync() that nobody has reduced.
    had = _either(gradient.had, gradient.agreed)
    return (had, none, none) if becomes is Becomes.USED else (had, _either(had, gradient.got), had)


def _either(some: bytes | bytearray, others: bytes | bytearray) -> bytes:
    """The flags, by position, that are set in one of both."""
    # As integers the flags are joined in C, without a loop over parameters.
    return (int.from_bytes(some, "little") | int.from_bytes(others, "little")).to_bytes(len(some), "little")


# -- The gradients of one model between autograd, which makes them, and a step, which uses them.
#
# The store knows which backward of which step runs. Its parts do the rest, and each is given what it needs when it is
# made: `GradPlaces` has the memory of all of it, `Arrivals` what waits in `.grad`, and `Leftovers` decides what remains
# after a step. `Reductions` takes what autograd makes and makes one reduced gradient a step of it.


NOT_ENDED = "a backward that updates weights, as update_in_backward=True says, did not end"


class GradStore:
    """The gradients of all trainable chunks of one model."""

    def __init__(
        self,
        places: GradPlaces,
        scratch: Scratch,
        training: TrainingState,
        *,
        is_alone: bool,
        has_several: bool = False,
    ) -> None:
        """is_alone: one rank, whose gradients are all there are. has_several: see `GradientBooks`."""
        self.places = places
        self.training = training
        self.scratch = scratch
        self.books = GradientBooks(places.gradients, is_alone=is_alone, has_several=has_several)
        self.arrivals = Arrivals(places)
        self.leftovers = Leftovers(places)
        self.num_backwards = 0  # since the last step
        self.has_zeros = False  # zero_grad(set_to_none=False) left zeros that no step has used
        self.num_forgotten = 0  # how often `num_backwards` became 0: a `.grad` from before is stale
        self.num_failed = 0  # how often a failed step was the reason
        self.in_backward = False
        self.is_ending = False  # an exception, such as an interrupt, has left `end_step` half way
        self.expects_scaled_loss = False
        self.loss_is_scaled = False  # the running backward came through a scaled loss
        self._trains_fp16 = self._has_fp16()

    def of(self, chunk: Chunk) -> ChunkGradient:
        """The gradient of a trainable chunk. Raises KeyError for a frozen one."""
        return self.places.gradients[chunk.index]

    def find(self, chunk: Chunk) -> ChunkGradient | None:
        """The gradient of a chunk, or None if it is frozen."""
        return self.places.gradients.get(chunk.index)

    def is_behind(self, chunk: Chunk) -> bool:
        """Whether backwards under no_sync() have left gradients of the chunk that are not reduced."""
        gradient = self.find(chunk)
        return gradient is not None and gradient.is_behind

    def _has_fp16(self) -> bool:
        return any(gradient.chunk.dtype is torch.float16 for gradient in self.places.gradients.values())

    # -- in a backward

    def refuse_unscaled(self) -> None:
        """Raises GeminiError if a backward reaches the model through a loss that should be scaled and is not."""
        if self.expects_scaled_loss and self._trains_fp16 and not self.loss_is_scaled:
            raise GeminiError(
                "loss.backward() without the loss scale that fp16 needs: call optimizer.backward(loss), or "
                "optimizer.scale(loss).backward(). Of models in a chain each has a loss scale of its own: train them "
                "in bf16"
            )

    def expect_scaled_losses(self) -> None:
        """There is an optimizer, which scales losses while fp16 weights are trained. Local."""
        self.expects_scaled_loss = True

    def begin_scaled_loss(self) -> None:
        """A backward begins that comes through a scaled loss. Local."""
        self.loss_is_scaled = True

    @never_traced(A_HOOK)
    def end_scaled_loss(self) -> None:
        """The backward that came through a scaled loss is over. Local."""
        self.loss_is_scaled = False

    def begin_backward(self) -> None:
        """A backward has reached the model. Local."""
        self.in_backward = True
        self.num_backwards += 1

    @contextmanager
    def ending_backward(self) -> Iterator[None]:
        """Inside, the gradients that the backward has left open are reduced."""
        self.in_backward = False
        try:
            yield
        except BaseException:
            # Gradients are incomplete: the next use of the model finds a backward that does not run, and drops them.
            self.in_backward = True
            raise

    @property
    def are_used(self) -> bool:
        """The backward has updated weights, and no step has followed yet."""
        return self.books.uses_up and any(gradient.is_used for gradient in self.places.gradients.values())

    @property
    def are_any_left(self) -> bool:
        """Some gradient is open, at rest or unreduced."""
        return any(each.is_open or each.is_reduced or each.is_behind for each in self.places.gradients.values())

    def refuse_updated(self, what: str, chunk: Chunk | None = None) -> None:
        """Raises UpdatedInBackwardError where the backward has updated weights and no step has followed.

        what: was asked for, and needs the weights, or gradients, from before. chunk: only its weights count.
        """
        # Without the setting this is asked at every fetch.
        if not self.books.uses_up:
            return
        gradients = self.places.gradients.values() if chunk is None else (self.find(chunk),)
        used = next((gradient for gradient in gradients if gradient is not None and gradient.is_used), None)
        if used is not None:
            raise UpdatedInBackwardError(
                f"{what} between backward() and step() is not possible: update_in_backward=True has updated "
                f"{used.chunk.names()} with the gradients already. Call optimizer.step() first, or wrap the model "
                "without update_in_backward=True"
            )

    def refuse_discard(self) -> None:
        """Raises UpdatedInBackwardError where the backward has updated weights and no step has followed.

        Raises GeminiError where the backward has failed, and has updated some of them.
        """
        if self.in_backward and self.are_used and not backward_runs():
            raise torn(NOT_ENDED)
        self.refuse_updated("discarding gradients")

    def is_used(self, chunk: Chunk) -> bool:
        """The backward has updated weights of the chunk, and no step has followed yet."""
        gradient = self.places.gradients.get(chunk.index)
        return gradient is not None and gradient.is_used

    def refuse_reuse(self, chunk: Chunk) -> None:
        """Raises GeminiError if a backward has updated the chunk's weights, which are needed as they were before."""
        if not self.in_backward:
            self.refuse_updated("a use of weights", chunk)
        elif self.is_used(chunk):
            raise GeminiError(
                f"the backward needs weights again that it has updated ({chunk.names()}), as where a weight is used "
                "detached, too, or in several calls with use_reentrant=True: wrap the model without "
                "update_in_backward=True"
            )

    def abandon_backward(self) -> None:
        """The running backward failed, and nothing of it counts. Local."""
        self.in_backward = False

    # -- between backward and step

    def write_zeros(self) -> None:
        """Write the zeros that zero_grad(set_to_none=False) has put off, before gradients are read or used. Local."""
        if self.has_zeros:
            self.leftovers.write_zeros(self.num_backwards)
            # The flag is cleared last: if a chunk found no memory, the next try writes the zeros that are missing.
            # Otherwise it would read what an earlier step has left there.
            self.has_zeros = False

    def start_at_zero(self, gradient: ChunkGradient, managed: ManagedParameter) -> None:
        """Give `managed` a gradient that no backward made and that is about to be written. Every rank calls it.

        Raises BudgetError.
        """
        self.begin_training()
        # This counts like a backward: memory must not move while the gradient waits for a step.
        self.num_backwards = max(self.num_backwards, 1)
        self.places.fill(gradient, self.num_backwards)
        gradient.note_given(managed.position)

    def resume(self, num_backwards: int, left: Iterable[tuple[Chunk, Region, Sequence[int]]]) -> None:
        """Have the gradients of a window of micro-batches that another process began. None are there. Local.

        num_backwards: that the window has seen. left: (optim_numel,) of each chunk's reduced gradient, on the host, in
            the dtype in which it rested, and the positions of the parameters that have one. Raises BudgetError.
        """
        self.begin_training()
        with untracked():
            for chunk, content, positions in left:
                gradient = self.of(chunk)
                # To these gradients the next ones are added, and not to blank memory.
                gradient.detach_home()
                self.places.bring_back(gradient, content)
                for position in positions:
                    gradient.note_given(position)
        self.num_backwards = num_backwards

    def discard(self, managed: ManagedParameter) -> None:
        """Carry out `parameter.grad = None`: later gradients of this step start from zero. None waits in `.grad`."""
        gradient = self.find(managed.chunk)
        if gradient is None:
            return
        if gradient.is_used:
            self.refuse_discard()
        gradient.note_discarded(managed.position)
        self.leftovers.clear(gradient, [managed])
        # One rank: if it was the last gradient, the step starts over, and the next backward is its first.
        if self.books.is_alone and not self.leftovers.are_any():
            self.end_step(Becomes.USED)

    def discard_all(self) -> None:
        """Set all gradients to None."""
        self.end_step(Becomes.NONE)

    def end_step(self, becomes: Becomes, stay: Mapping[int, Sequence[bool]] | None = None) -> None:
        """A step used the gradients, or they are discarded, set to zero, or lost by a failure. Local.

        stay: which gradients stay, by chunk index, then by position.
        """
        self.is_ending = True
        self.arrivals.drop()
        self.end_scaled_loss()
        self.num_forgotten += 1
        self.num_backwards = 0
        # The order matters: `leftovers` decides which chunks still have unreduced sums, and `books` look at
        # these.
        self.leftovers.leave(becomes, stay or {})
        self.has_zeros = becomes is Becomes.ZERO
        self.books.forget_step(has_zeros=self.has_zeros)
        self.places.flight = None
        # Attached homes become blank: autograd would add the next step's gradients to those that were just used.
        with untracked():
            self.arrivals.attach_homes()
        self.is_ending = False

    # -- memory, and which chunks have gradients

    def detach_homes(self) -> None:
        """No `.grad` refers to memory of ours any more. Local."""
        for gradient in self.places.gradients.values():
            gradient.detach_home()

    def take_memory(self) -> None:
        """Take all slots and scratch, at the first use; none while the model only infers. Raises BudgetError."""
        if self.training.is_there:
            self.places.pools.fill()
            self.scratch.fill()

    def begin_training(self) -> None:
        """Take the memory for gradients before the first one comes, if no optimizer has done so."""
        if not self.training.is_there:
            with unseen(), untracked():
                self.training.allocate()
                self.take_memory()

    def rest(self) -> None:
        """Free slots and scratch between steps. They take their memory again at the next use. Local."""
        self.places.pools.rest()
        self.places.drop_spares()
        # A resize to the same size gives the memory back, too.
        self.scratch.resize(self.scratch.num_bytes)

    def give_back(self, scratch_bytes: int) -> None:
        """Give back all memory of gradients between steps: no chunk has one until some are added. Local.

        scratch_bytes: the scratch that collectives will need from now on.
        """
        self.places.give_back()
        self.scratch.resize(scratch_bytes)

    def reset_order(self) -> None:
        """Forget which gradients to expect, and when."""
        for gradient in self.places.gradients.values():
            gradient.expect_all()
        self._trains_fp16 = self._has_fp16()
        self.books.reset_order()

    def reset(self) -> None:
        """Drop all gradients after a failed step, and what ranks had agreed on about when to reduce which."""
        self.num_failed += 1
        # `discard_all` attaches homes. They are detached again before `.grad` is cleared below, as an attachment relies
        # on its views being there.
        self.discard_all()
        self.detach_homes()
        for gradient in self.places.gradients.values():
            # An interrupted backward may have left gradients in `.grad`: autograd would add the next ones to them.
            set_grads(gradient.chunk.raw, repeat(None))
        self.places.pools.empty()
        # Other memory: a collective that failed may still write to the old one.
        self.scratch.resize(self.scratch.num_bytes)
        self.places.reset_history()
        self.reset_order()
