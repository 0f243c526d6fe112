"""All memory of one model on this rank: its tiers, its slots, and the copies between tiers."""

from __future__ import annotations

import torch

from gemini.errors import BudgetError
from gemini.memory.host import HostTier
from gemini.memory.region import Region
from gemini.memory.slot import SlotPools
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Transfer, wait_on_tier
from gemini.placement.budget import Budget
from gemini.placement.demand import Tier


class Memory:
    """Hands out regions, and takes them back once the copies from and to them are done."""

    def __init__(self, device: MemoryTier, host: HostTier) -> None:
        self.device = device
        self.host = host
        self.transfer = Transfer(device.device)
        self.slots = SlotPools(device, "slots")  # of payloads
        self.gradient_slots = SlotPools(device, "gradient slots")

    @property
    def tiers(self) -> tuple[MemoryTier, HostTier]:
        """(device, host)."""
        return self.device, self.host

    def allow(self, budget: Budget) -> None:
        """Set the capacities of both tiers. Bytes that are taken already stay, even above the new capacity."""
        self.device.allow(budget.device)
        self.host.allow(budget.host)

    def tier(self, tier: Tier) -> MemoryTier:
        return self.device if tier is Tier.DEVICE else self.host

    def allocate(self, tier: Tier, numel: int, dtype: torch.dtype, kind: str) -> Region:
        """(numel,) zeros. Raises BudgetError."""
        return Region(tier, self.tier(tier).allocate(numel * dtype.itemsize, kind).view(dtype))

    def note_evaded(self, refused: BudgetError) -> None:
        """Count a shortage of the device after which the host takes the bytes. `refused`: the device's error."""
        # torch's allocator has counted a shortage of the machine's as out of memory. A refusal by the budget never
        # reached it.
        if refused.is_shortage:
            self.device.ledger.count_evaded()

    def free(self, region: Region, kind: str) -> None:
        """Free a region of `allocate`."""
        # A copy that is still running would write into memory that belongs to another tensor by then.
        wait_on_tier(region)
        self.tier(region.tier).free(region.flat.view(torch.uint8), kind)
