"""Rules that a training run and its simulation share. Both call these; each keeps its own books.

They decide which gradient is spilled, which may wait, how the gradients of a step are added up, and when a parameter
home is lent to a gradient. Numbers only: no tensor, no device, no other rank.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_WAITING = 2
"""Fine chunks whose gradients may wait in `.grad`, beyond the gradient slots."""


def first_to_spill(open_gradients: Iterable[tuple[bool, int]]) -> int:
    """The chunk whose gradient leaves its slot. open_gradients: (has all that it expects, chunk index) of each."""
    # Complete gradients only wait to be reduced, so they go first. Of incomplete ones the first chunk of the model
    # goes: backward reaches it last.
    return max(open_gradients, key=lambda each: (each[0], -each[1]))[1]


def expected_after(num_came: int) -> int:
    """Gradients that complete a chunk from now on, after a step's first backward has brought `num_came` of them."""
    # Unused parameters must not keep a chunk open, and its slot taken, until the end of every later backward. It is at
    # least 1: no count of gradients that have come is ever equal to 0.
    return max(1, num_came)


@dataclass(frozen=True)
class SumRule:
    """How the gradients of one chunk are added up within a step, so that the bits are autograd's.

    adds_at_home: a home that holds a reduced gradient takes others directly. Only one rank in full precision does so:
    with several ranks the home holds a mean, and in 16 bits the sum of micro-batches is made in fp32.

    resumes: a payload that is opened beside a reduced gradient at rest starts as that gradient. Only one rank does so:
    autograd computes (a + b) + c, and a + (b + c) has other bits.

    resumes_pieces: it does so where both are pieces of one backward, which are added in the gradient's own dtype in any
    case, as by autograd. In 16 bits those of several micro-batches are added in fp32.
    """

    adds_at_home: bool
    resumes: bool
    resumes_pieces: bool

    @staticmethod
    def of(world_size: int, itemsize: int, rests_as_is: bool) -> SumRule:
        """itemsize: of the weights. rests_as_is: the reduced gradient has the weights' dtype."""
        is_alone, has_full_precision = world_size == 1, itemsize >= 4
        return SumRule(
            adds_at_home=is_alone and has_full_precision,
            resumes=is_alone and has_full_precision and rests_as_is,
            resumes_pieces=is_alone,
        )


# -- Lending of parameter homes to gradients. See [Note: Lent homes] and [Note: Lent payloads] in runtime/grad_homes.py.


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

    def end_step(self) -> None:
        """What is reduced from now on belongs to the next step. Every chunk's gathers were noted."""
        self._gathers.clear()

    def reset_history(self) -> None:
        """Drop all history, after a failed step, of which ranks may have seen more or less."""
        self._used_after.clear()


def lies_beside_gradient(*, has_own_slot: bool, is_gathered: bool) -> bool:
    """Whether a gradient in the chunk's home, which is no payload by itself, leaves the gathered parameters alone."""
    # A slot of the pool lies beside the home. A kept slot has the home inside.
    return not (has_own_slot and is_gathered)


# -- Chunks that stay. See [Note: Staying chunks] in runtime/params.py.


def is_resident_for_good(*, is_payload_at_home: bool, may_lend_home: bool, is_trained: bool) -> bool:
    """Whether the home is the payload and is never lent to a gradient."""
    return is_payload_at_home and not (may_lend_home and is_trained)


def may_stay(*, is_fine: bool, has_own_slot: bool, may_lend_home: bool) -> bool:
    """Whether a chunk may stay gathered between two updates."""
    # A home that may be lent leaves its slot at a reduction.
    return is_fine and has_own_slot and not may_lend_home
