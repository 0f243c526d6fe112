"""Gradients that outlive a change of plan: of parameters that another optimizer updates, in steps of its own.

All memory of gradients is given back before states move, and taken again at the end. What earlier backwards have left
waits in host memory meanwhile. It is known until it is back in its chunk, also where a lack of memory ends the move and
all states move back.
"""

from __future__ import annotations

from gemini.chunks.grad_state import UnsyncedState
from gemini.chunks.gradient import ChunkGradient
from gemini.manager.grad_homes import GradHomes
from gemini.manager.grad_memory import GradMemory
from gemini.memory.region import Region
from gemini.memory.transfer import ready, wait_on_host
from gemini.placement.demand import Tier


class LeftGradients:
    """The gradients of one model that wait while states move. All of it is local, and the same on all ranks."""

    def __init__(self, memory: GradMemory, homes: GradHomes) -> None:
        self._memory = memory
        self._homes = homes
        self._reduced: dict[int, Region] = {}  # by chunk index, on the host
        self._unsynced: dict[int, Region | None] = {}  # of chunks that are behind; None: held by other ranks only

    def set_aside(self) -> None:
        """Copy all gradients to the host, before their memory is given back."""
        for index, gradient in self._memory.gradients.items():
            if gradient.is_reduced:
                # The copy comes first: `restore` writes the parameters over a gradient that lies in their home.
                self._reduced[index] = _copy(gradient.reduced())
                self._homes.restore(gradient.chunk)  # it may lie in a parameter home, which is about to move
            if gradient.is_behind:
                held = gradient.unsynced if gradient.unsynced_state is UnsyncedState.HELD else None
                self._unsynced[index] = None if held is None else _copy(held)

    def bring_back(self) -> None:
        """Put the gradients of chunks that are still trained into their new memory. Raises BudgetError."""
        gradients = self._memory.gradients
        # Gradients are deleted one by one. Those that are left when memory runs out are brought back after the states
        # have moved back.
        for index, content in list(self._reduced.items()):
            # A chunk that is frozen by now has no place for a gradient.
            if index in gradients:
                self._homes.bring_back(gradients[index], content)
            del self._reduced[index]
        for index, held in list(self._unsynced.items()):
            if index in gradients:
                self._bring_back_unsynced(gradients[index], held)
            del self._unsynced[index]

    def _bring_back_unsynced(self, gradient: ChunkGradient, held: Region | None) -> None:
        if held is None:
            gradient.become_unsynced(UnsyncedState.ELSEWHERE)
            return
        memory = self._memory.memory
        unsynced = memory.allocate(Tier.HOST, held.numel, held.dtype, "unsynced gradients")
        gradient.add_unsynced(unsynced)
        memory.transfer.copy(unsynced, held)
        wait_on_host(held, unsynced)
        gradient.become_unsynced(UnsyncedState.HELD)


def _copy(content: Region) -> Region:
    # The copy blocks, so the source may be given back at once, and the region has no tickets.
    return Region(Tier.HOST, ready(content).to("cpu", copy=True))
