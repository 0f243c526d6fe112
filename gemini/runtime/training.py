"""What a change of plan moves or waits for: memory that only training needs, gradients that stay, micro-batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini.errors import BudgetError, GeminiError
from gemini.memory.memory import RankMemory
from gemini.memory.modes import unseen, untracked
from gemini.memory.transfer import Region, ready, wait_on_host
from gemini.placement.demand import Demand, Kind, Placement, Tier
from gemini.placement.gradient import UnsyncedState
from gemini.runtime.binding import master_from_weights
from gemini.runtime.chunk import Chunk
from gemini.runtime.grad_places import GradPlaces
from gemini.runtime.gradient import ChunkGradient
from optim import HALF_DTYPES

# -- The memory that only training needs beside the weights: homes of gradients, and masters that weights can make.
#
# A model that only infers has neither. They are taken together, when an optimizer comes or, without one, when the first
# backward reaches the model. A master that holds more than the 16-bit weights, because these were given in another
# dtype, cannot be made later: it is there from the start.


_KINDS = (Kind.MASTER, Kind.GRAD)
_UNPREPARED = (
    "a backward of a model that has only inferred so far, through a graph that was built inside "
    "GatheredParameters(...): make the optimizer before, or call the model once with gradients outside of it"
)


class TrainingState:
    """The training memory of all chunks of one model. All of it is local; every rank does it at the same point."""

    def __init__(self, chunks: Sequence[Chunk], memory: RankMemory, places: GradPlaces) -> None:
        self.is_there = False
        self.refused: BudgetError | None = None  # why the plan for inference, which is in force, has to stay
        self._infers = False
        self._chunks = chunks
        self._memory = memory
        self._places = places
        self._demand: Demand | None = None
        self._placement: Placement | None = None
        self._taken: list[tuple[Chunk, Kind]] = []  # by the last call of `_allocate`

    @property
    def may_begin(self) -> bool:
        """Whether the plan in force is for inference, and no plan for training has been refused beside it."""
        return self._infers and self.refused is None

    def follow(self, demand: Demand, placement: Placement, infers: bool) -> None:
        """Another plan is in force: memory that is still missing will be taken where it says.

        infers: the plan is for inference, and has no place for gradients and new masters.
        """
        self._demand, self._placement = demand, placement
        # A refusal was one of the plan before: this one may have room for training.
        self._infers, self.refused = infers, None

    def refuse(self, error: BudgetError) -> None:
        """No plan for training fits, so the plan for inference stays. A backward raises `error`."""
        self.refused = error

    def allocate(self, beside: int = 0) -> None:
        """Take all missing memory. Raises BudgetError, and holds nothing then.

        beside: further bytes that are needed on the host, mapped in one piece with these.
        """
        if self._infers:
            # This is another object each time: an error that is kept would keep its traceback.
            raise GeminiError(_UNPREPARED) if self.refused is None else self.refused.reworded(str(self.refused))
        if not self.is_there:
            words = "gradients, masters and optimizer state" if beside else "gradients and masters"
            self._allocate(self._missing(self._chunks, _KINDS), words, beside)
            self.is_there = True

    def give_back(self) -> None:
        """Free what `allocate` has just allocated, before anything of it is used."""
        self._free()
        self.is_there = False

    def take_masters(self, chunks: Iterable[Chunk]) -> None:
        """Take the masters of chunks whose weights are about to be given more than 16 bits. Raises BudgetError.

        A plan for inference has no place for new masters: they are on the host until the next plan.
        """
        self._allocate(self._missing(chunks, (Kind.MASTER,)), "masters")

    def _missing(self, chunks: Iterable[Chunk], kinds: Sequence[Kind]) -> list[tuple[Chunk, Kind, Tier, int]]:
        """(chunk, kind, tier, bytes): first all masters, then all gradients, in the order in which they are taken."""
        assert self._demand is not None and self._placement is not None
        found = []
        for kind in kinds:
            for chunk in chunks:
                tier = self._placement.homes[chunk.index].get(kind)
                num_bytes = self._demand.chunks[chunk.index].home_bytes.get(kind, 0)
                if tier is None and self._infers and kind is Kind.MASTER and chunk.dtype in HALF_DTYPES:
                    # Values of more than 16 bits that are loaded into a model which infers need a master. Its plan has
                    # no tier for one.
                    tier, num_bytes = Tier.HOST, chunk.master_dtype.itemsize * chunk.optim_numel
                # A gradient without bytes rests in the parameter home, see grad_places.py, unless its chunk is empty.
                is_elsewhere = kind is Kind.GRAD and not num_bytes and (chunk.may_lend_home or chunk.numel > 0)
                if tier is not None and kind not in chunk.homes and not is_elsewhere:
                    found.append((chunk, kind, tier, num_bytes))
        return found

    def _allocate(self, missing: Sequence[tuple[Chunk, Kind, Tier, int]], words: str, beside: int = 0) -> None:
        """Take the missing memory, all or none of it. words: what it is for, in errors."""
        self._taken = []
        if not missing:
            return
        with unseen(), untracked():
            on_host = sum(num_bytes for _, _, tier, num_bytes in missing if tier is Tier.HOST)
            # One mapping of exactly this size, registered once: see memory/arena.py.
            self._memory.host.reserve(on_host + beside, words)
            try:
                for chunk, kind, tier, num_bytes in missing:
                    # Noted first: an interrupt behind the allocation would leave a master of zeros, which nobody fills.
                    self._taken.append((chunk, kind))
                    chunk.allocate_home(kind, tier, self._memory, num_bytes)
                    if kind is Kind.MASTER:
                        master_from_weights(chunk)
                    else:
                        # The gradient was made when the chunk had no GRAD home.
                        self._places.gradients[chunk.index].adopt_home()
            except BaseException:
                # What was taken is given back, so that another try, with a plan that wants less of the device, finds
                # the room.
                self._free()
                raise

    def _free(self) -> None:
        """Free what the last `_allocate` has allocated."""
        taken, self._taken = self._taken, []
        for chunk, kind in taken:
            chunk.free_home(kind, self._memory)
            if kind is Kind.GRAD:
                self._places.gradients[chunk.index].adopt_home()


# -- Gradients that outlive a change of plan: of parameters that another optimizer updates, in steps of its own.
#
# All memory of gradients is given back before states move, and taken again at the end. What earlier backwards have left
# waits in host memory meanwhile. It is known until it is back in its chunk, also where a lack of memory ends the move
# and all states move back.


class LeftGradients:
    """The gradients of one model that wait while states move. All of it is local, and the same on all ranks."""

    def __init__(self, places: GradPlaces) -> None:
        self._places = places
        self._reduced: dict[int, Region] = {}  # by chunk index, on the host
        self._unsynced: dict[int, Region | None] = {}  # of chunks that are behind; None: held by other ranks only

    @property
    def are_any(self) -> bool:
        """Some gradient was set aside, and not brought back."""
        return bool(self._reduced or self._unsynced)

    def set_aside(self) -> None:
        """Copy all gradients to the host, before their memory is given back."""
        for index, gradient in self._places.gradients.items():
            if gradient.is_reduced:
                # The copy comes first: `restore` writes the parameters over a gradient that lies in their home.
                self._reduced[index] = _copy(gradient.reduced())
                self._places.restore(gradient.index)  # it may lie in a parameter home, which is about to move
            if gradient.is_behind:
                held = gradient.unsynced if gradient.unsynced_state is UnsyncedState.HELD else None
                self._unsynced[index] = None if held is None else _copy(held)

    def bring_back(self) -> None:
        """Put the gradients of chunks that are still trained into their new memory. Raises BudgetError."""
        gradients = self._places.gradients
        # Gradients are deleted one by one. Those that are left when memory runs out are brought back after the states
        # have moved back.
        for index, content in list(self._reduced.items()):
            # A chunk that is frozen by now has no place for a gradient.
            if index in gradients:
                self._places.bring_back(gradients[index], content)
            del self._reduced[index]
        for index, held in list(self._unsynced.items()):
            if index in gradients:
                self._bring_back_unsynced(gradients[index], held)
            del self._unsynced[index]

    def _bring_back_unsynced(self, gradient: ChunkGradient, held: Region | None) -> None:
        if held is None:
            gradient.become_unsynced(UnsyncedState.ELSEWHERE)
            return
        memory = self._places.memory
        unsynced = memory.allocate(Tier.HOST, held.numel, held.dtype, "unsynced gradients")
        gradient.unsynced = unsynced
        memory.transfer.copy(unsynced, held)
        wait_on_host(held, unsynced)
        gradient.become_unsynced(UnsyncedState.HELD)


def _copy(content: Region) -> Region:
    # The copy blocks, so the source may be given back at once, and the region has no tickets.
    return Region(Tier.HOST, ready(content).to("cpu", copy=True))


# -- Observes how many micro-batches a step has.


_STEADY_STEPS = 2
"""Steps with an unchanged micro-batch count before replanning; doubles after each replan.

The last step of an epoch may have fewer micro-batches, and a training whose count alternates would only move states.
"""


class MicroBatches:
    """The micro-batches of one model's steps. Ranks agree on each number that is noted."""

    def __init__(self, number: int) -> None:
        """number: the count that the plan in force is for."""
        self._followed = self._last = number
        self._num_alike = 0
        self._needed = _STEADY_STEPS

    def note_step(self, number: int) -> None:
        """A step has added up `number` backwards. Local."""
        self._num_alike = self._num_alike + 1 if number == self._last else 1
        self._last = number

    @property
    def have_changed(self) -> bool:
        """Whether steps keep to another count than the plan's."""
        # A step without a backward (count 0) is no reason for a plan.
        return self._last != self._followed and self._num_alike >= self._needed and self._last > 0

    def follow(self) -> int:
        """The count that the plan is to follow now. Local."""
        self._followed, self._needed = self._last, 2 * self._needed
        return self._followed
