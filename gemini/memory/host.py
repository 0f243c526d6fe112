"""The host tier: plain memory, or memory pinned for an accelerator.

What a plan puts on the host is reserved before it is taken: one mapping of exactly that size when a model is wrapped,
and one when its optimizer comes. Each is registered once, since registering costs milliseconds and waits for the
device. Temporaries (spilled gradients, sums under `no_sync()`, weights from before an edit) come from staging memory.
It grows in the first steps, is kept for later ones, and is never registered: that would happen in the middle of a
backward.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.memory.arena import Arena
from gemini.memory.pinned import Pinning, Registrar
from gemini.memory.tier import MemoryTier
from gemini.placement.demand import Kind

EXTENT_BYTES = 2**20
"""Default for the least that is mapped for a buffer that was not reserved."""
# These kinds have homes that a plan reserves. Every other kind is a temporary and comes from staging memory.
_STATES = frozenset(Kind)


class HostTier(MemoryTier):
    """Host memory of this rank."""

    def __init__(
        self, capacity_bytes: int | None = None, runtime: Registrar | None = None, extent_bytes: int = EXTENT_BYTES
    ) -> None:
        """runtime: of the GPU that memory is pinned for; None: plain memory.

        extent_bytes: the least that is mapped for states that were not reserved.
        """
        super().__init__("host", torch.device("cpu"), capacity_bytes, "host_memory=")
        self.homes = Arena(None if runtime is None else Pinning(runtime), extent_bytes)
        self.staging = Arena(extent_bytes=EXTENT_BYTES, keeps_pages=True)

    @property
    def mapped_bytes(self) -> int:
        """Mapped bytes of homes, registered or not: the ledger's bytes of all states, if nothing was freed."""
        return self.homes.mapped_bytes

    def reserve(self, num_bytes: int, kind: str) -> None:
        """Map room for states of `num_bytes` that are about to be taken. Raises BudgetError."""
        # Free extents go first: the budget counts what the arenas hold, not only what is in use.
        self.trim()
        growth = self.homes.growth_of(num_bytes)
        self._check_capacity(growth, kind, self.homes.held_bytes + self.staging.held_bytes)
        with self._allocating(growth, kind):
            self.homes.reserve(num_bytes)

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        """Take the buffer from the arena of its kind. Its range becomes free when the last tensor in it dies."""
        return (self.homes if kind in _STATES else self.staging).allocate(num_bytes)

    def trim(self) -> None:
        """Unmap extents that are not in use."""
        self.homes.trim()
        self.staging.trim()
