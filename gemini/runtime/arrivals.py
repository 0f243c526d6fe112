"""Takes over the gradients that autograd has made, into the open payload of their chunk. All of it is local.

[Note: Waiting gradients] A hook that copies one gradient costs as much as the backward of a tiny operator. So the
gradients of a chunk of many small parameters wait in `.grad`, where autograd puts them, until the chunk has all that it
expects or the backward ends, and one call then copies them. Gradients of at most two chunks wait at the same time: they
are held beyond the gradient slots. If another gradient of a parameter comes meanwhile (from a region that reentrant
checkpointing recomputes), autograd itself adds the two, to the same bits. Gradients do not wait where one rank adds
them to what an earlier backward of the step has left in the home: (a + b) + c has other bits than a + (b + c).

If a long-open gradient makes no other one lack a slot, 256 gradients are copied at a time: they are still in the
processor's cache then, and the next gradients reuse their memory. A parameter whose gradient was copied in this way has
no other gradient wait in the same backward, again for the same bits.

Where gradients are attached to their home (see gemini/runtime/gradient.py), autograd has added them already by the time
their hooks run. They are noted together in the same way, at any number of chunks, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from types import NoneType
from typing import Any, cast

import torch
from torch import Tensor

from gemini.errors import UnsupportedError
from gemini.placement.gradient_rules import Content
from gemini.runtime.chunk import Chunk
from gemini.runtime.grad_homes import GradMemory
from gemini.runtime.gradient import ChunkGradient, grad_of, set_grads

# Getters as functions: `map` then reads the attribute of many gradients in C.
_has_graph: Callable[[Tensor], bool] = cast(Any, Tensor).requires_grad.__get__
_layout_of: Callable[[Tensor], torch.layout] = cast(Any, Tensor).layout.__get__
_STRIDED = {torch.strided}
_AT_A_TIME = 256


class Waiting:
    """Which gradients of one chunk wait. Hooks of parameters hold it, so it must not refer to tensors or a model."""

    __slots__ = ("_last", "arrived", "copied", "due", "may_attach", "positions")

    def __init__(self, chunk: Chunk) -> None:
        self.arrived: list[int] = []  # ids of parameters, in order of arrival
        self.due = 0  # number of arrivals at which `Arrivals` is called
        self.may_attach = True  # no gradient is sparse, or has a hook of the user's
        self.copied: set[int] = set()  # ids of those copied in this backward while others wait: membership only
        self.positions = {id(parameter): position for position, parameter in enumerate(chunk.raw)}
        self._last: tuple[list[int], list[int]] = [], []  # what arrived, and its positions

    def expect(self, count: int) -> None:
        """Let `count` gradients arrive, at least 1, before `Arrivals` is called."""
        self.due = count

    def end(self) -> None:
        """No gradient of the chunk waits any more in this backward."""
        self.due = 0
        self.copied.clear()

    def note_copied(self, arrived: Sequence[int]) -> None:
        """These parameters' gradients, by id, were copied while others wait: none of theirs waits after that."""
        self.copied.update(arrived)

    def drop_arrived(self) -> None:
        """The waiting gradients were discarded."""
        self.arrived.clear()
        self.end()

    def take_arrived(self) -> tuple[list[int], Sequence[int], bool]:
        """What has arrived, its positions once each, and whether some came twice. Nothing is left."""
        # This copies and empties the list, since hooks of parameters append to the very object.
        arrived = self.arrived[:]
        self.arrived.clear()
        # Mostly the order of the last backward. A comparison takes a fraction of the time of the look-ups.
        if arrived != self._last[0]:
            self._last = arrived, list(dict.fromkeys(map(self.positions.__getitem__, arrived)))
        positions = self._last[1]
        return arrived, positions, len(positions) < len(arrived)


class Arrivals:
    """The arriving gradients of the chunks of one model."""

    def __init__(self, memory: GradMemory) -> None:
        self._memory = memory
        self._waiting: dict[int, Waiting] = {}  # by chunk index
        self.begun: list[int] = []  # chunks with waiting gradients, the longest waiting first

    def waiting_of(self, chunk: Chunk) -> Waiting:
        """The `Waiting` of a chunk, the same for the life of the model: the parameters' hooks hold it."""
        if chunk.index not in self._waiting:
            self._waiting[chunk.index] = Waiting(chunk)
        return self._waiting[chunk.index]

    def begin(self, gradient: ChunkGradient, backward: int) -> bool:
        """Whether the first gradient of a chunk in backward number `backward`, and with it the others, may wait.

        With create_graph=True (grad mode is on) it may not: the gradient is refused by the parameter's name.
        """
        if torch.is_grad_enabled() or not (gradient.attached or gradient.may_wait(backward)):
            return False
        if gradient.attached is not None:
            # Autograd has added to the home before this hook ran. It is not blank any more, even if this backward is
            # dropped later.
            gradient.attached.note_gradients()
        index = gradient.chunk.index
        # The number is at least 1, as a `due` of 0 means that no gradient of the chunk waits.
        self._await(gradient, max(1, gradient.expected - gradient.num_fired))
        self.begun.append(index)
        return True

    def _await(self, gradient: ChunkGradient, count: int) -> None:
        """Expect `count` more gradients of the chunk."""
        at_a_time = _AT_A_TIME if gradient.attached is None and self._memory.is_in_nobodys_way(gradient) else count
        self._waiting[gradient.chunk.index].expect(min(count, at_a_time))

    def collect(self, gradient: ChunkGradient, backward: int, are_all: bool = True) -> bool:
        """Copy the chunk's waiting gradients to its payload; False without any.

        A reduction that is in the way is finished. are_all: no others of the chunk will wait for now. Raises
        UnsupportedError for a gradient that has a graph.
        """
        chunk = gradient.chunk
        if chunk.index not in self.begun:
            return False
        waiting = self._waiting[chunk.index]
        arrived, positions, has_pieces = waiting.take_arrived()
        # Autograd has added the gradients of a parameter that came twice.
        if has_pieces:
            gradient.in_pieces = True
        num_missing = gradient.expected - gradient.num_fired - len(positions)
        # The chunk goes on waiting only while more of its gradients are to come and no other chunk needs its slot.
        if are_all or num_missing <= 0 or not self._memory.is_in_nobodys_way(gradient):
            self.begun.remove(chunk.index)
            waiting.end()
        else:
            self._await(gradient, num_missing)
            # Autograd itself adds to what is attached.
            if gradient.attached is None:
                waiting.note_copied(arrived)
        if gradient.attached is not None:
            self._note_added(gradient, positions, backward)
            return True
        # A range stands for all parameters, which needs no list of them.
        if len(positions) == len(chunk.raw):
            positions = range(len(chunk.raw))
        parameters = _at(positions, chunk.raw)
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
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
                waiting.may_attach = False
                grads = [grad.to_dense() if grad.layout is not torch.strided else grad for grad in grads]
            fired = gradient.fired
            # Gradients that must be added, or refused, are taken one by one.
            if not gradient.all_trained or (gradient.num_fired and any(map(fired.__getitem__, positions))):
                for position, grad in zip(positions, grads, strict=True):
                    self.add(chunk, position, grad, backward)
                return True
            # Zero the whole payload: this chunk has too many paddings to zero them one by one.
            self._memory.open(gradient.index, backward, zero=True)
            torch._foreach_copy_(_at(positions, gradient.views), grads)
        gradient.note_all_fired(positions)
        return True

    def _note_added(self, gradient: ChunkGradient, positions: Sequence[int], backward: int) -> None:
        """Note gradients that autograd has added to the home."""
        if not gradient.all_trained:
            for position in positions:
                _check_trained(gradient.chunk, position)
        self._memory.open(gradient.index, backward)
        if gradient.num_fired:  # they were read inside of this backward
            positions = [each for each in positions if not gradient.fired[each]]
        gradient.note_all_fired(positions)

    def add(self, chunk: Chunk, position: int, grad: Tensor, backward: int) -> None:
        """Take a gradient that opens its chunk, comes in pieces, or is added to a sum.

        A reduction that is in the way is finished. Raises UnsupportedError for a parameter that was unfrozen after its
        forward began.
        """
        _check_trained(chunk, position)
        gradient = self._memory.gradients[chunk.index]
        self._memory.open(gradient.index, backward)
        view = gradient.views[position]
        if gradient.fired[position] or (gradient.content is Content.SUM and gradient.got[position]):
            view.add_(grad)
        else:
            view.copy_(grad)
        gradient.note_fired(position)

    def attach_homes(self) -> None:
        """A step is over: let autograd add the gradients of the next one to their homes, where it may. Local."""
        for index, waiting in self._waiting.items():
            gradient = self._memory.gradients.get(index)
            # Gradients that stay are in a home that is not blank.
            if waiting.may_attach and gradient is not None and not (gradient.is_reduced or gradient.is_open):
                gradient.attach_home()

    def keep_apart(self, chunk: Chunk) -> None:
        """A user's hook is to find one backward's gradient alone in `.grad`: never attach the chunk. Local."""
        self.waiting_of(chunk).may_attach = False
        gradient = self._memory.gradients.get(chunk.index)
        if gradient is not None:
            gradient.detach_home()

    def drop(self) -> None:
        """Discard all waiting gradients: autograd would add those of the next backward to them."""
        self.begun.clear()
        for index, waiting in self._waiting.items():
            gradient = self._memory.gradients.get(index)
            if waiting.arrived and gradient is not None:
                # Views of the home stay in `.grad`, so only gradients that are not attached are taken out of it.
                if gradient.attached is not None:
                    # Autograd has added to the home, also for a backward that was refused: it is not blank.
                    gradient.attached.note_gradients()
                else:
                    positions = (waiting.positions[each] for each in waiting.arrived)
                    set_grads((gradient.chunk.raw[each] for each in positions), repeat(None))
            waiting.drop_arrived()


def _check_trained(chunk: Chunk, position: int) -> None:
    managed = chunk.parameters[position]
    if not managed.requires_grad:
        raise UnsupportedError(
            f"{managed.name!r} was unfrozen while a forward ran, or after it: do it before the forward"
        )


def graph_refused(name: str) -> UnsupportedError:
    """The error for a gradient that carries a graph (create_graph=True)."""
    return UnsupportedError(
        f"backward(create_graph=True) reached parameter {name!r}: gradients of managed "
        "parameters carry no graph. Use torch.autograd.grad for the penalty's inputs"
    )


def _at(positions: Sequence[int], items: Sequence[Tensor]) -> list[Tensor]:
    """The items at `positions`; a range stands for all of them."""
    return list(items) if isinstance(positions, range) else [items[position] for position in positions]
