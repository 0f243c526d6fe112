"""The gradients of one model: from autograd into payloads, reduced over the ranks, at rest until a step uses them.

The store knows which backward of which step runs. Its parts do the rest, and each is given what it needs when it is
made: `Arrivals` takes over what autograd made, an `Accumulation` makes one reduced gradient a step of it, `Leftovers`
decides what remains after a step, and `GradMemory` holds the memory of all of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat

import torch
from torch import Tensor

from gemini.chunks.chunk import Chunk, ManagedParameter
from gemini.chunks.gradient import ChunkGradient
from gemini.chunks.own_grad import set_grads
from gemini.errors import GeminiError
from gemini.manager.accumulate import AccumulateInPlace, Accumulation
from gemini.manager.arrivals import MAX_WAITING, Arrivals, Waiting
from gemini.manager.grad_homes import GradHomes
from gemini.manager.grad_memory import GradMemory
from gemini.manager.leftovers import Becomes, Leftovers
from gemini.manager.reduce import AccumulateAndReduce
from gemini.manager.training_state import TrainingState
from gemini.memory.modes import unseen, untracked
from gemini.memory.region import Region
from gemini.memory.scratch import Scratch
from gemini.memory.untraced import A_HOOK, never_traced
from gemini.placement.next_use import NextUse
from gemini.ranks.communicator import Communicator


class GradStore:
    """The gradients of all trainable chunks of one model."""

    def __init__(
        self,
        memory: GradMemory,
        homes: GradHomes,
        scratch: Scratch,
        training: TrainingState,
        communicator: Communicator,
        next_use: NextUse,
        stage: int,
    ) -> None:
        """next_use: of the running pass; its touches are points that all ranks share."""
        self.memory = memory
        self.training = training
        self.homes = homes
        self.scratch = scratch
        parts = memory, homes, scratch, communicator
        self.accumulation: Accumulation
        if communicator.world_size == 1:
            self.accumulation = AccumulateInPlace(*parts)
        else:
            self.accumulation = AccumulateAndReduce(*parts, next_use, stage)
        self.arrivals = Arrivals(memory, self.accumulation)
        self.leftovers = Leftovers(memory, homes)
        self.num_backwards = 0  # since the last step
        self.has_zeros = False  # zero_grad(set_to_none=False) left zeros that no step has used
        self.num_forgotten = 0  # how often `num_backwards` became 0: a `.grad` from before is stale
        self.num_failed = 0  # how often a failed step was the reason
        self.in_backward = False
        self._ending: tuple[Becomes, Mapping[int, Sequence[bool]]] | None = None  # what `end_step` is in the middle of
        self.expects_scaled_loss = False
        self.loss_is_scaled = False  # the running backward came through a scaled loss
        self._trains_fp16 = self._has_fp16()

    def of(self, chunk: Chunk) -> ChunkGradient:
        """The gradient of a trainable chunk. Raises KeyError for a frozen one."""
        return self.memory.gradients[chunk.index]

    def find(self, chunk: Chunk) -> ChunkGradient | None:
        """The gradient of a chunk, or None if it is frozen."""
        return self.memory.gradients.get(chunk.index)

    def is_behind(self, chunk: Chunk) -> bool:
        """Whether backwards under no_sync() have left gradients of the chunk that are not reduced."""
        gradient = self.find(chunk)
        return gradient is not None and gradient.is_behind

    def _has_fp16(self) -> bool:
        return any(gradient.chunk.dtype is torch.float16 for gradient in self.memory.gradients.values())

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
        """A backward has reached the model. Local. Raises BudgetError for the first one without an optimizer."""
        # If this finds no memory, no backward has begun.
        self._begin_training()
        self.in_backward = True
        self.num_backwards += 1
        self.accumulation.begin_backward()

    def abandon_backward(self) -> None:
        """The running backward failed, and nothing of it counts. Local."""
        self.in_backward = False

    def on_gradient(self, chunk: Chunk, position: int, grad: Tensor) -> None:
        """Take over a gradient of the chunk, of the parameter at `position`."""
        backward = self.num_backwards
        self.accumulation.arrived(self.arrivals.accept(chunk, position, grad, backward), backward)

    def wait(self, chunk: Chunk, waiting: Waiting) -> bool:
        """Let a noted gradient of a chunk of many small parameters wait in `.grad`. False if it may not wait there."""
        gradient = self.memory.gradients.get(chunk.index)
        # `due` is 0 until a gradient of the chunk waits.
        if not waiting.due and (gradient is None or not self.arrivals.begin(gradient, self.num_backwards)):
            return False
        # Waiting gradients are held beyond the gradient slots: keep their number small.
        if len(self.arrivals.begun) > MAX_WAITING:
            self._collect(self.arrivals.begun[0])  # the chunk that has waited longest
        # `are_all` is False: a chunk whose slot nobody else needs is copied in several parts, the rest of which is to
        # come.
        if len(waiting.arrived) >= waiting.due:
            self._collect(chunk.index, are_all=False)
        return True

    def _collect(self, index: int, are_all: bool = True) -> None:
        """Take over the waiting gradients of chunk `index`. are_all: no others will wait for now."""
        gradient, backward = self.memory.gradients[index], self.num_backwards
        if self.arrivals.collect(gradient, backward, are_all):
            self.accumulation.arrived(gradient, backward)

    def collect_all(self) -> None:
        """Take over all waiting gradients: they are about to be read, reduced or discarded. Local."""
        # The loop has a copy, because `_collect` removes chunks from the list.
        for index in list(self.arrivals.begun):
            self._collect(index)

    def before_touch(self) -> None:
        """Reduce what is due before a fetch: a point that all ranks share if backward gathers. Collective then."""
        if not self.in_backward:
            return
        for index in self.accumulation.due():
            # Gradients that wait in `.grad` are a part of what is reduced.
            self._collect(index)
            self.accumulation.reduce(self.memory.gradients[index], self.num_backwards)

    def end_backward(self) -> None:
        """Reduce what is open on any rank, and agree on the points of the next backward. Collective."""
        # Ranks are about to tell each other which gradients they have. Gradients that wait in `.grad` have set no flags
        # so far.
        self.collect_all()
        self.in_backward = False
        try:
            self.accumulation.end_backward(self.num_backwards)
        except BaseException:
            # Gradients are incomplete: the next use of the model finds a backward that does not run, and drops them.
            self.in_backward = True
            raise

    # -- between backward and step

    def catch_up(self) -> None:
        """Do what was put off, before gradients are read or used. Collective if backwards ran under no_sync()."""
        # Reductions come first: zeros are then written only for chunks without a gradient, by flags on which ranks have
        # agreed.
        self.accumulation.catch_up(self.num_backwards)
        if self.has_zeros:
            self.leftovers.write_zeros(self.num_backwards)
            # The flag is cleared last: if a chunk found no memory, the next try writes the zeros that are missing.
            # Otherwise it would read what an earlier step has left there.
            self.has_zeros = False

    def start_at_zero(self, gradient: ChunkGradient, managed: ManagedParameter) -> None:
        """Give `managed` a gradient that no backward made and that is about to be written. Every rank calls it.

        Raises BudgetError.
        """
        self._begin_training()
        # This counts like a backward: memory must not move while the gradient waits for a step.
        self.num_backwards = max(self.num_backwards, 1)
        self.homes.fill(gradient, self.num_backwards)
        gradient.note_given(managed.position)

    def resume(self, num_backwards: int, left: Iterable[tuple[Chunk, Region, Sequence[int]]]) -> None:
        """Have the gradients of a window of micro-batches that another process began. None are there. Local.

        num_backwards: that the window has seen. left: (optim_numel,) of each chunk's reduced gradient, on the host, in
            the dtype in which it rested, and the positions of the parameters that have one. Raises BudgetError.
        """
        self._begin_training()
        with untracked():
            for chunk, content, positions in left:
                gradient = self.of(chunk)
                # To these gradients the next ones are added, and not to blank memory.
                gradient.detach_home()
                self.homes.bring_back(gradient, content)
                for position in positions:
                    gradient.note_given(position)
        self.num_backwards = num_backwards

    def discard(self, managed: ManagedParameter) -> None:
        """Carry out `parameter.grad = None`: later gradients of this step start from zero."""
        gradient = self.find(managed.chunk)
        if gradient is None:
            return
        # A gradient that is collected after this would set the flags of the discarded one again.
        self.collect_all()
        gradient.note_discarded(managed.position)
        self.leftovers.clear(gradient, [managed])
        # One rank: if it was the last gradient, the step starts over, and the next backward is its first.
        if self.accumulation.knows_all and not self.leftovers.are_any():
            self.end_step(Becomes.USED)

    def discard_all(self) -> None:
        """Set all gradients to None."""
        self.end_step(Becomes.NONE)

    def end_step(self, becomes: Becomes, stay: Mapping[int, Sequence[bool]] | None = None) -> None:
        """A step used the gradients, or they are discarded, set to zero, or lost by a failure. Local.

        stay: which gradients stay, by chunk index, then by position.
        """
        self.note_end(becomes, stay or {})
        # Waiting gradients must set their flags, which decide what becomes zero or stays.
        if becomes is not Becomes.NONE:
            self.collect_all()
        self.arrivals.drop()
        self.end_scaled_loss()
        self.num_forgotten += 1
        self.num_backwards = 0
        # The order matters: `leftovers` decides which chunks still have unreduced sums, and `accumulation` looks at
        # these.
        self.leftovers.end_step(becomes, stay or {})
        self.has_zeros = becomes is Becomes.ZERO
        self.accumulation.end_step(self.has_zeros)
        # Attached homes become blank: autograd would add the next step's gradients to those that were just used.
        with untracked():
            self.arrivals.attach_homes()
        self._ending = None  # last: after an interrupt above `finish_end` does it all again

    def note_end(self, becomes: Becomes, stay: Mapping[int, Sequence[bool]]) -> None:
        """`end_step` will be called with these arguments, also if an interrupt comes before. Local."""
        self._ending = becomes, stay

    def finish_end(self) -> None:
        """Complete an interrupted `end_step`: gradients that it left would be added to the next ones. Local."""
        if self._ending is not None:
            self.end_step(*self._ending)

    # -- memory, and which chunks have gradients

    def keep_apart(self, chunk: Chunk) -> None:
        """A parameter of the chunk gets a hook of the user's, which is to find one backward's gradient. Local."""
        # Waiting gradients are noted while they are attached: `detach_home` sets `.grad` to None, and `collect` would
        # find nothing there.
        self.collect_all()
        self.arrivals.keep_apart(chunk)

    def detach_homes(self) -> None:
        """No `.grad` refers to memory of ours any more. Local."""
        for gradient in self.memory.gradients.values():
            gradient.detach_home()

    def take_memory(self) -> None:
        """Take all slots and scratch, at the first use; none while the model only infers. Raises BudgetError."""
        if self.training.is_there:
            self.memory.pools.fill()
            self.scratch.fill()

    def _begin_training(self) -> None:
        """Take the memory for gradients before the first one comes, if no optimizer has done so."""
        if not self.training.is_there:
            with unseen(), untracked():
                self.training.allocate()
                self.take_memory()

    def rest(self) -> None:
        """Free slots and scratch between steps. They take their memory again at the next use. Local."""
        self.memory.pools.rest()
        # A resize to the same size gives the memory back, too.
        self.scratch.resize(self.scratch.num_bytes)

    def give_back(self, scratch_bytes: int) -> None:
        """Give back all memory of gradients between steps: no chunk has one until some are added. Local.

        scratch_bytes: the scratch that collectives will need from now on.
        """
        self.memory.give_back()
        self.scratch.resize(scratch_bytes)

    def reset_order(self) -> None:
        """Forget which gradients to expect, and when."""
        for gradient in self.memory.gradients.values():
            gradient.expect_all()
        self._trains_fp16 = self._has_fp16()
        self.accumulation.reset_order()

    def reset(self) -> None:
        """Drop all gradients after a failed step, and what ranks had agreed on about when to reduce which."""
        self.num_failed += 1
        # `discard_all` attaches homes. They are detached again before `.grad` is cleared below, as an attachment relies
        # on its views being there.
        self.discard_all()
        self.detach_homes()
        for gradient in self.memory.gradients.values():
            # An interrupted backward may have left gradients in `.grad`: autograd would add the next ones to them.
            set_grads(gradient.chunk.raw, repeat(None))
        self.memory.pools.empty()
        # Other memory: a collective that failed may still write to the old one.
        self.scratch.resize(self.scratch.num_bytes)
        self.homes.reset()
        self.reset_order()
