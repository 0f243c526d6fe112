"""All memory of one model on this rank: its tiers, and how bytes come from one to the other."""

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
    """Gives regions, and takes them back when the copies from and to them are done."""

    def __init__(self, device: MemoryTier, host: HostTier) -> None:
        self.device = device
        self.host = host
        self.transfer = Transfer(device.device)
        self.slots = SlotPools(device, "slots")  # of payloads
        self.gradient_slots = SlotPools(device, "gradient slots")

    @property
    def tiers(self) -> tuple[MemoryTier, HostTier]:
        """Device and host."""
        return self.device, self.host

    def allow(self, budget: Budget) -> None:
        """The tiers refuse what would be more than this from now on. What they hold already stays."""
        self.device.capacity_bytes, self.host.capacity_bytes = budget.device, budget.host

    def tier(self, tier: Tier) -> MemoryTier:
        return self.device if tier is Tier.DEVICE else self.host

    def take(self, tier: Tier, numel: int, dtype: torch.dtype, kind: str) -> Region:
        """(numel,) zeros. Raises BudgetError."""
        return Region(tier, self.tier(tier).take(numel * dtype.itemsize, kind).view(dtype))

    def note_evaded(self, refused: BudgetError) -> None:
        """The host takes what the device has refused."""
        if refused.is_shortage:
            self.device.ledger.num_evaded += 1

    def give(self, region: Region, kind: str) -> None:
        """Give a region of `take` back."""
        wait_on_tier(region)
        self.tier(region.tier).give(region.flat.view(torch.uint8), kind)
