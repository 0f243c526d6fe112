"""What remains of gradients after a step or zero_grad(): None, zeros, or the gradients that stay.

[Note: Zeros] zero_grad(set_to_none=False) leaves zeros, with which a step moves parameters by their moments. No memory
is written for them at first: the flags say that there is a gradient, and elements that no backward writes to become
zero when the chunk is reduced. Only a chunk that no backward has reached is filled with zeros, when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum

from gemini.chunks.attached import BLANK
from gemini.chunks.chunk import ManagedParameter
from gemini.chunks.grad_state import UnsyncedState
from gemini.chunks.gradient import ChunkGradient
from gemini.manager.grad_homes import GradHomes
from gemini.manager.grad_memory import GradMemory
from gemini.memory.modes import untracked
from gemini.memory.transfer import ready


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

    def __init__(self, memory: GradMemory, homes: GradHomes) -> None:
        self._memory = memory
        self._homes = homes
        self._searched: list[int] = []  # indices of the chunks that `are_any` searches
        self._place = 0  # where that search has come to

    def end_step(self, becomes: Becomes, stay: Mapping[int, Sequence[bool]]) -> None:
        """A step used the gradients, or they are discarded or set to zero.

        stay: which gradients stay, by chunk index, then by position.
        """
        for gradient in self._memory.gradients.values():
            stays = stay.get(gradient.chunk.index, ())
            # This comes first: the flags that remain follow from those of the step, which are overwritten below.
            after = _flags_after(gradient, becomes)
            # Nothing of the chunk stays: its memory is free, and a lent home gets its parameters back.
            if not keeps(gradient, stays):
                self._memory.discard(gradient)
                gradient.note_leftovers(*after)
                self._homes.restore(gradient.chunk)
                continue
            pairs = zip(gradient.chunk.parameters, stays, strict=True)
            self.clear(gradient, [managed for managed, does in pairs if not does])
            if gradient.is_open:
                self._memory.close(gradient)
            gradient.outlive_step()
            gradient.note_leftovers(
                *(
                    bytes(old if does else new for old, new, does in zip(flags, its_after, stays, strict=True))
                    for flags, its_after in zip((gradient.had, gradient.got, gradient.agreed), after, strict=True)
                )
            )
        self._homes.end_step()

    def are_any(self) -> bool:
        """Whether this rank has a gradient of some parameter.

        The search goes on where the last one found a gradient. So a loop that discards the gradients of all parameters,
        one after the other, takes time in proportion to their number.
        """
        # First the rest of the last search, then all chunks once.
        for _ in range(2):
            while self._place < len(self._searched):
                gradient = self._memory.gradients.get(self._searched[self._place])
                if gradient is not None and any(gradient.got):
                    return True
                self._place += 1
            self._searched, self._place = list(self._memory.gradients), 0
        return False

    def clear(self, gradient: ChunkGradient, some: Sequence[ManagedParameter]) -> None:
        """Set the gradients of some of the chunk's parameters to zero, so that later ones are added to zero."""
        gradient.count_write()
        if gradient.unsynced_state is UnsyncedState.HELD:
            assert gradient.unsynced is not None
            for managed in some:
                gradient.unsynced.flat[managed.offset : managed.offset + managed.numel].zero_()
        if not gradient.is_reduced:
            return
        # Autograd adds to an attached home, and -0.0 is the only zero that changes no bit of a gradient.
        reduced, zero = ready(gradient.reduced()), 0.0 if gradient.attached is None else BLANK
        # Every rank calls this, and sets the parts that it holds.
        for managed in some:
            for part in managed.own_parts(reduced):
                part.fill_(zero)

    def write_zeros(self, backward: int) -> None:
        """Write the zeros that a step is about to read. See [Note: Zeros]. Every rank calls it at the same point."""
        for gradient in self._memory.gradients.values():
            # Unlike `got`, `agreed` is equal on all ranks, so that they fill the same chunks.
            if any(gradient.agreed):
                self._homes.fill(gradient, backward)

    def before_update(self, stay: Mapping[int, Sequence[bool]]) -> None:
        """Move gradients that stay out of parameter homes, which the step writes to. Raises BudgetError."""
        # The memory for it is taken before the update: a lack of it refuses the step while nothing has changed.
        for index, stays in stay.items():
            gradient = self._memory.gradients.get(index)
            if gradient is not None and gradient.chunk.holds_grad and keeps(gradient, stays):
                self._homes.move_out(gradient.chunk)

    def rescale(self, factor: float) -> None:
        """Adapt gradients that have stayed to a loss scale that is `factor` times as large now."""
        for gradient in self._memory.gradients.values():
            if gradient.is_reduced:
                # 16 bits may not hold the larger values.
                self._homes.widen(gradient, gradient.first_backward)
        self.multiply(factor, {})

    def multiply(self, factor: float, but: Mapping[int, Sequence[bool]]) -> None:
        """Multiply all reduced gradients by `factor`, except those in `but`, by chunk index, then by position."""
        with untracked():
            for gradient in self._memory.gradients.values():
                if not gradient.is_reduced:
                    continue
                chunk, reduced = gradient.chunk, ready(gradient.reduced())
                excepted = but.get(chunk.index)
                if excepted is None:
                    reduced.mul_(factor)
                else:
                    pairs = zip(chunk.parameters, excepted, strict=True)
                    for part in (part for managed, stays in pairs if not stays for part in managed.own_parts(reduced)):
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
