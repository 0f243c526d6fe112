"""Gradients that wait in `.grad`, where autograd has put them, for others of their chunk. All of it is local.

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

from collections.abc import Sequence
from itertools import repeat

import torch

from gemini.errors import UnsupportedError
from gemini.runtime.chunk import Chunk
from gemini.runtime.grad_places import GradPlaces
from gemini.runtime.gradient import ChunkGradient, set_grads

_AT_A_TIME = 256


class Waiting:
    """Which gradients of one chunk wait. Hooks of parameters hold it, so it must not refer to tensors or a model."""

    __slots__ = ("_last", "arrived", "copied", "due", "may_attach", "positions")

    def __init__(self, chunk: Chunk) -> None:
        self.arrived: list[int] = []  # ids of parameters, in order of arrival
        self.due = 0  # number of arrivals at which they are collected
        self.may_attach = True  # no gradient is sparse, or has a hook of the user's
        self.copied: set[int] = set()  # ids of those copied in this backward while others wait: membership only
        self.positions = {id(parameter): position for position, parameter in enumerate(chunk.raw)}
        self._last: tuple[list[int], list[int]] = [], []  # what arrived, and its positions

    def expect(self, count: int) -> None:
        """Let `count` gradients arrive, at least 1, before they are collected."""
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
    """The gradients of one model's chunks that wait. `Reductions.collect` takes them over."""

    def __init__(self, places: GradPlaces) -> None:
        self._places = places
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
        self.expect(gradient, max(1, gradient.expected - gradient.num_fired))
        self.begun.append(index)
        return True

    def expect(self, gradient: ChunkGradient, count: int) -> None:
        """Expect `count` more gradients of the chunk."""
        at_a_time = _AT_A_TIME if gradient.attached is None and self._places.is_in_nobodys_way(gradient) else count
        self._waiting[gradient.chunk.index].expect(min(count, at_a_time))

    def attach_homes(self) -> None:
        """A step is over: let autograd add the gradients of the next one to their homes, where it may. Local."""
        for index, waiting in self._waiting.items():
            gradient = self._places.gradients.get(index)
            # Gradients that stay are in a home that is not blank.
            if waiting.may_attach and gradient is not None and not (gradient.is_reduced or gradient.is_open):
                gradient.attach_home()

    def keep_apart(self, chunk: Chunk) -> None:
        """A user's hook is to find one backward's gradient alone in `.grad`: never attach the chunk. Local."""
        self.waiting_of(chunk).may_attach = False
        gradient = self._places.gradients.get(chunk.index)
        if gradient is not None:
            gradient.detach_home()

    def drop(self) -> None:
        """Discard all waiting gradients: autograd would add those of the next backward to them."""
        self.begun.clear()
        for index, waiting in self._waiting.items():
            gradient = self._places.gradients.get(index)
            if waiting.arrived and gradient is not None:
                # Views of the home stay in `.grad`, so only gradients that are not attached are taken out of it.
                if gradient.attached is not None:
                    # Autograd has added to the home, also for a backward that was refused: it is not blank.
                    gradient.attached.note_gradients()
                else:
                    positions = (waiting.positions[each] for each in waiting.arrived)
                    set_grads((gradient.chunk.raw[each] for each in positions), repeat(None))
            waiting.drop_arrived()


def graph_refused(name: str) -> UnsupportedError:
    """The error for a gradient that carries a graph (create_graph=True)."""
    return UnsupportedError(
        f"backward(create_graph=True) reached parameter {name!r}: gradients of managed "
        "parameters carry no graph. Use torch.autograd.grad for the penalty's inputs"
    )
