"""The memory of a chunk's states on this rank: a home for each, and the slot of its own that some chunks have."""

from __future__ import annotations

from dataclasses import dataclass, field

from gemini.chunks.facts import LocalFacts
from gemini.memory.memory import Memory
from gemini.memory.region import Region
from gemini.memory.slot import KeptSlot
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import wait_on_host, wait_on_stream
from gemini.placement.demand import Kind, Tier


@dataclass(eq=False, kw_only=True)
class ChunkHomes(LocalFacts):
    """A chunk's facts and homes. Nothing else writes `homes` and `own_slot`."""

    homes: dict[Kind, Region] = field(default_factory=dict)
    own_slot: KeptSlot | None = None  # a slot that only this chunk uses; the parameter home is a part of it

    def allocate_home(self, kind: Kind, tier: Tier, memory: Memory, num_bytes: int) -> None:
        """Take zeroed memory for the state `kind`. Raises BudgetError."""
        # A GRAD home may have fp32 sums at its end. The plan counts them in the bytes, and `ChunkGradient` views them
        # as fp32.
        dtype = {Kind.MASTER: self.master_dtype, Kind.GRAD: self.gradient_dtype}.get(kind, self.dtype)
        self.homes[kind] = memory.allocate(tier, num_bytes // dtype.itemsize, dtype, kind)

    def free_home(self, kind: Kind, memory: Memory) -> None:
        """Free the memory of the state `kind`, if it has any. Nothing may show or need it any more."""
        home = self.homes.pop(kind, None)
        if home is not None:
            memory.free(home, kind)

    def hand_out_home(self) -> tuple[Region, KeptSlot | None]:
        """Give the parameter home, and the own slot that it is a part of, to the caller, who moves the weights."""
        home, slot = self.homes.pop(Kind.PARAM), self.own_slot
        self.own_slot = None
        return home, slot

    def take_home_back(self, home: Region, slot: KeptSlot | None) -> None:
        """Have again what `hand_out_home` gave: the move found no memory."""
        self.own_slot, self.homes[Kind.PARAM] = slot, home

    def keep_slot(self, tier: MemoryTier) -> None:
        """Take a slot for good and move the parameter home, if there is one, into it. Raises BudgetError."""
        # Only chunks of one unit keep a slot: then this rank's shard is one part of the payload, and can lie inside it.
        (own,) = self.layout.slices(self.rank)
        start, end = own.payload_start, own.payload_start + own.numel
        itemsize = self.dtype.itemsize
        slot = KeptSlot(tier, self.payload_bytes, slice(start * itemsize, end * itemsize), self.dtype)
        # A home that is there lies inside the old slot, which the caller closes once no view shows it.
        before = self.homes.get(Kind.PARAM)
        if before is not None:
            wait_on_stream(before)
            slot.shard.flat.copy_(before.flat)
        self.own_slot, self.homes[Kind.PARAM] = slot, slot.shard

    def renew_own_slot(self, tier: MemoryTier) -> None:
        """Replace the memory of the own slot, without ever holding two slots: the shard waits in host memory."""
        assert self.own_slot is not None
        home = self.homes.pop(Kind.PARAM)
        wait_on_host(home)
        # The copy blocks, so the old slot may be closed right after it.
        shard = home.flat.to("cpu", copy=True)
        del home  # it would keep the memory of the old slot
        self.own_slot.close()
        self.keep_slot(tier)
        self.homes[Kind.PARAM].flat.copy_(shard)

    def close_own_slot(self) -> None:
        """Give back the own slot, and the parameter home, which is a part of it, for good."""
        assert self.own_slot is not None
        self.own_slot.close()
        del self.homes[Kind.PARAM]
        self.own_slot = None

    @property
    def lends_home(self) -> bool:
        """The reduced gradient rests in the parameter home. If the plan knows of micro-batches, it has its own home."""
        return self.may_lend_home and Kind.GRAD not in self.homes

    def lendable(self) -> Region:
        """(optim_numel,) the part of the home that this rank updates. It is contiguous wherever a home is lent."""
        home = self.homes[Kind.PARAM]
        if self.home_layout.world_size == self.optim_layout.world_size:
            return home[: self.optim_numel]
        # The home has the whole payload here, of which this rank updates its slice, as at stages 1 and 2.
        (own,) = self.layout.slices(self.rank)
        return home[own.in_payload]
