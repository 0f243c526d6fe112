"""The memory of one rank: its device, real or emulated, its host and its disk."""

from __future__ import annotations

import torch
from torch import Tensor

from gemini.errors import BudgetError
from gemini.launch import current_device
from gemini.memory.arena import CudaRuntime, HostTier
from gemini.memory.disk import DiskTier, StateOwner
from gemini.memory.slot import SlotPools
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Region, Tickets, Transfer, wait_on_tier
from gemini.memory.work import WorkThread
from gemini.placement.budget import Budget
from gemini.placement.demand import Tier
from gemini.settings import Device, Emulation, check_device

# -- The device tier on a real accelerator. It uses `torch.accelerator`, so nothing here is specific to CUDA.
#
# Memory that is given back goes to torch's allocator, which reuses it in the order of the current stream. Copies to and
# from it are made, and waited for, in transfer.py.


class AcceleratorTier(MemoryTier):
    """Memory of one GPU. It is never poisoned: that would cost a pass over device memory for each eviction."""

    def __init__(self, device: torch.device, capacity_bytes: int | None = None) -> None:
        super().__init__("device", device, capacity_bytes, "model_data_memory= or device_memory=")

    def trim(self) -> None:
        """Return torch's unused cached blocks to the driver, for other processes. Waits for the device."""
        torch.accelerator.empty_cache()

    def _allocate(self, num_bytes: int, kind: str) -> Tensor:
        # Not `torch.empty`: no parameter fills the paddings of a home, and norms and updates read homes whole.
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)


# -- The emulated device: the device tier on CPU memory, for machines without an accelerator.
#
# It has a hard byte capacity and poisons memory: what was given back reads as NaN, so that a forgotten fetch is a wrong
# number in every test instead of luck.


_POISON = 0xFF  # 0xFFFF... is a NaN in every float dtype


class EmulatedTier(AcceleratorTier):
    """Device memory that is really host memory."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(torch.device("cpu"), capacity_bytes)

    def trim(self) -> None:
        """Does nothing: there is no device allocator with cached blocks."""

    def free(self, buffer: Tensor, kind: str) -> None:
        super().free(buffer, kind)
        self.poison(buffer)

    def poison(self, buffer: Tensor) -> None:
        buffer.fill_(_POISON)


# -- All memory of one model on this rank: its tiers, its slots, and the copies between tiers.


class RankMemory:
    """Hands out regions, and takes them back once the copies from and to them are done."""

    def __init__(self, device: MemoryTier, host: HostTier, disk: DiskTier | None = None) -> None:
        """disk: None if nothing may rest on one."""
        self.device = device
        self.host = host
        self.transfer = Transfer(device.device, disk)
        self.work = WorkThread()  # beside training
        self.slots = SlotPools(device, "slots")  # of payloads
        self.gradient_slots = SlotPools(device, "gradient slots")

    @property
    def disk(self) -> DiskTier | None:
        """The disk. None if nothing may rest on one."""
        return self.transfer.disk

    def open_disk(self, disk: DiskTier) -> None:
        """Use a disk from now on: no memory is there yet."""
        assert self.disk is None, "states rest on the disk that is there"
        self.transfer.disk = disk

    def drop_disk(self) -> None:
        """Close a disk on which nothing rests."""
        disk, self.transfer.disk = self.disk, None
        if disk is not None:
            disk.close()

    @property
    def tiers(self) -> tuple[MemoryTier, HostTier]:
        """(device, host)."""
        return self.device, self.host

    def allow(self, budget: Budget) -> None:
        """Set the capacities of both tiers. Bytes that are taken already stay, even above the new capacity."""
        self.device.allow(budget.device)
        self.host.allow(budget.host)
        if self.disk is not None:
            self.disk.allow(budget.disk)

    def tier(self, tier: Tier) -> MemoryTier:
        if tier is Tier.DISK:
            assert self.disk is not None, "no plan puts anything on a disk that nobody has named"
            return self.disk
        return self.device if tier is Tier.DEVICE else self.host

    def allocate(
        self,
        tier: Tier,
        numel: int,
        dtype: torch.dtype,
        kind: str,
        owner: StateOwner | None = None,
        tickets: Tickets | None = None,
    ) -> Region:
        """(numel,) zeros. Raises BudgetError.

        owner: whose state they are. tickets: for which users of the memory wait; None: those of the region.
        """
        buffer = self.tier(tier).allocate(numel * dtype.itemsize, kind)
        region = Region(tier, buffer.view(dtype))
        if self.disk is not None and owner is not None and tier is Tier.DISK:
            self.disk.note_owner(buffer, owner, region.tickets if tickets is None else tickets)
        return region

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


# -- The tiers for the device that a user names.


def choose_tiers(device: Device) -> tuple[MemoryTier, HostTier]:
    """(device tier, host tier), both without a budget. "emulated" and "cpu" mean the emulated device."""
    resolved = resolve_device(device, "device")
    if resolved.type == "cpu":
        tier = EmulatedTier()
        if isinstance(device, Emulation):
            # Without this the device's next reading would call the bytes of this model free.
            device.hold(tier.ledger)
        return tier, HostTier()
    return AcceleratorTier(resolved), HostTier(runtime=CudaRuntime(resolved) if resolved.type == "cuda" else None)


def resolve_device(device: Device, argument: str) -> torch.device:
    """The device that a user's `device` means: with its index; the CPU for the emulated one; the current one for None.

    argument: the argument's name, for errors. Raises ValueError for a device that this machine does not have.
    """
    if device is None:
        device = current_device()
    check_device(argument, device)
    if device == "emulated" or isinstance(device, Emulation):
        return torch.device("cpu")
    if isinstance(device, int):
        # As in torch, a number is the index of a device of the machine's one kind of accelerator.
        kind = torch.accelerator.current_accelerator()
        if kind is None:
            raise ValueError(f"{argument}={device} needs an accelerator; this machine has none: use 'emulated'")
        device = torch.device(kind.type, device)
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"{argument}={device!r} is not a device: {error}") from None
    if resolved.type == "cpu":
        return resolved
    # `torch.device` accepts any kind that torch knows, such as "xpu" on a machine with CUDA or with none.
    if resolved.type != current_device().type:
        raise ValueError(f"{argument}={str(device)!r} is not here: use 'emulated'")
    return torch.empty(0, device=resolved).device  # "cuda" with its index
