"""The memory that only training needs beside the weights: homes of gradients, and masters that weights can make.

A model that only infers has neither. They are taken together, when an optimizer comes or, without one, when the first
backward reaches the model. A master that holds more than the 16-bit weights, because these were given in another dtype,
cannot be made later: it is there from the start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gemini.chunks.chunk import Chunk
from gemini.errors import BudgetError, GeminiError
from gemini.manager.grad_memory import GradMemory
from gemini.manager.masters import master_from_weights
from gemini.memory.memory import Memory
from gemini.memory.modes import unseen, untracked
from gemini.placement.demand import Demand, Kind, Placement, Tier
from optim import HALF_DTYPES

_KINDS = (Kind.MASTER, Kind.GRAD)
_UNPREPARED = (
    "a backward of a model that has only inferred so far, through a graph that was built inside "
    "GatheredParameters(...): make the optimizer before, or call the model once with gradients outside of it"
)


class TrainingState:
    """The training memory of all chunks of one model. All of it is local; every rank does it at the same point."""

    def __init__(self, chunks: Sequence[Chunk], memory: Memory, gradients: GradMemory) -> None:
        self.is_there = False
        self.refused: BudgetError | None = None  # why the plan for inference, which is in force, has to stay
        self._infers = False
        self._chunks = chunks
        self._memory = memory
        self._gradients = gradients
        self._demand: Demand | None = None
        self._placement: Placement | None = None
        self._taken: list[tuple[Chunk, Kind]] = []  # by the last call of `_allocate`

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
                # A gradient without bytes rests in the parameter home, see grad_homes.py, unless its chunk is empty.
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
            # One mapping of exactly this size, registered once: see host.py.
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
                        self._gradients.gradients[chunk.index].adopt_home()
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
                self._gradients.gradients[chunk.index].adopt_home()
