"""The host tier: plain memory, or memory pinned for an accelerator.

What a plan puts on the host is reserved before it is taken: one mapping of exactly that size when a model is wrapped
and one when its optimizer comes, each of them registered once, since registering costs milliseconds and waits for the
device. Temporaries (gradients that had to leave their slot, sums under `no_sync()`, weights from before an edit) come
from staging memory, which grows in the first steps, is kept for the next ones, and is never registered: that would
happen in the middle of a backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.memory.arena import Arena
from gemini.memory.ledger import Ledger
from gemini.memory.pinned import Pinning, Registrar
from gemini.memory.tier import allocating, check_capacity
from gemini.placement.demand import Kind

EXTENT_BYTES = 2**20
"""The least that is mapped for what was not reserved, where nobody says otherwise."""
_STATES = frozenset(Kind)
_KNOB = "host_memory="


class HostTier:
    """Host memory of this rank."""

    name = "host"

    def __init__(
        self, capacity_bytes: int | None = None, runtime: Registrar | None = None, extent_bytes: int = EXTENT_BYTES
    ) -> None:
        """runtime: of the GPU that memory is pinned for; None: plain memory.

        extent_bytes: the least that is mapped for states that were not reserved.
        """
        self.device = torch.device("cpu")
        self.capacity_bytes = capacity_bytes
        self.ledger = Ledger()
        self.homes = Arena(None if runtime is None else Pinning(runtime), extent_bytes)
        self.staging = Arena(extent_bytes=EXTENT_BYTES, keeps_pages=True)

    @property
    def mapped_bytes(self) -> int:
        """Of homes, registered or not; where nothing was freed they are the ledger's bytes of all states."""
        return self.homes.mapped_bytes

    def reserve(self, num_bytes: int, kind: str) -> None:
        """Map room for states of `num_bytes` that are about to be taken. Raises BudgetError."""
        self.trim()
        growth = self.homes.growth_of(num_bytes)
        check_capacity(self, growth, kind, _KNOB, self.homes.held_bytes + self.staging.held_bytes)
        with allocating(self, growth, kind, _KNOB):
            self.homes.reserve(num_bytes)

    def take(self, num_bytes: int, kind: str) -> Tensor:
        with allocating(self, num_bytes, kind, _KNOB):
            buffer = (self.homes if kind in _STATES else self.staging).take(num_bytes)
        self.ledger.take(kind, num_bytes)  # what failed is not counted
        return buffer

    def give(self, buffer: Tensor, kind: str) -> None:
        """The range is free for others when the last tensor in it dies."""
        self.ledger.give(kind, buffer.nbytes)

    def trim(self) -> None:
        """Unmap what is not in use."""
        self.homes.trim()
        self.staging.trim()

    def poison(self, buffer: Tensor) -> None:
        return
