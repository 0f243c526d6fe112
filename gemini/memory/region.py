"""A region: flat memory on one tier, with the tickets that tell when the copies from and to it are done.

Copies between host and device run while the host goes on. The next reader or writer of a region finds in it the tickets
to wait for, and waits for nothing else. `transfer.py` makes the copies and does the waiting.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from gemini.placement.demand import Tier


class Ticket(Protocol):
    """Proof that a copy is done."""

    number: int  # a later copy has a larger number

    def wait(self) -> None:
        """Block the host until the copy is done."""

    def order(self) -> None:
        """Make kernels and copies that are launched on the current stream from now on start after the copy."""

    def implies(self, earlier: Ticket) -> bool:
        """Whether `earlier` is done whenever this ticket is."""


class Tickets:
    """The tickets of the last write of some memory and of the reads since then."""

    __slots__ = ("reads", "write")

    def __init__(self) -> None:
        self.write: Ticket | None = None
        self.reads: list[Ticket] = []

    def pending(self) -> list[Ticket]:
        """The tickets that must be done before the memory is written."""
        return self.reads if self.write is None else [self.write, *self.reads]

    def note_read(self, ticket: Ticket) -> None:
        """A copy out of the memory was started, after its last write."""
        # Tickets that the new one implies are dropped: a region that is read in every step would collect them for ever.
        self.reads = [*(each for each in self.reads if not ticket.implies(each)), ticket]

    def note_write(self, ticket: Ticket) -> None:
        """A copy into the memory was started, after everything that was pending."""
        # Whoever waits for this write has waited for the earlier tickets too, because the copy began behind them.
        self.write, self.reads = ticket, []

    def clear(self) -> None:
        """Drop all tickets: the host has waited for them."""
        self.write, self.reads = None, []


@dataclass(eq=False, slots=True)
class Region:
    """Flat memory on a tier. Slices and casts of a region share its tickets.

    A slice that every step needs is made once and kept with its region: see `cut` and `Slot.views`.
    """

    tier: Tier
    flat: Tensor  # 1-D, contiguous
    tickets: Tickets = field(default_factory=Tickets)
    parts: tuple[Region, ...] = ()  # made by `cut`

    @property
    def dtype(self) -> torch.dtype:
        return self.flat.dtype

    @property
    def numel(self) -> int:
        return self.flat.numel()

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    def __getitem__(self, part: slice) -> Region:
        return Region(self.tier, self.flat[part], self.tickets)

    def cut(self, parts: Iterable[slice]) -> tuple[Region, ...]:
        """Slices of the region, made at the first call. Every call must ask for the same `parts`."""
        if not self.parts:
            self.parts = tuple(self[part] for part in parts)
        return self.parts

    def view(self, dtype: torch.dtype) -> Region:
        """The same bytes in another dtype."""
        return Region(self.tier, self.flat.view(dtype), self.tickets)
