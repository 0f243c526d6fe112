"""The memory of one rank: its device, real or emulated, its host, and the sums that the host makes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from gemini.errors import BudgetError
from gemini.launch import current_device
from gemini.memory.arena import CudaRuntime, HostTier
from gemini.memory.disk import DiskTier, StateOwner
from gemini.memory.modes import untracked
from gemini.memory.slot import SlotPools
from gemini.memory.tier import MemoryTier
from gemini.memory.transfer import Region, Ticket, Tickets, Transfer, wait_on_host, wait_on_tier
from gemini.memory.workers import Over, Workers, WorkPiece, give_up
from gemini.observe import Feed, Span, TimesRead
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


# -- Sums on the host: gradients of several micro-batches are added there, so that the sum never travels to the device.
#
# Autograd's thread adds gradients, and must not wait for a copy in there: the kernels of the rest of the backward
# would not be launched meanwhile. So an addition is a ticket of its target. It is made when the sum is needed, or when
# its staging buffer is, which is two additions later: the copy is done by then.


class HostSum:
    """An addition that is still to be made, or a value that is still to be set. It is the `Ticket` of its target."""

    number = -1  # it is no copy of a stream's

    def __init__(self, target: Region, addend: Region, replaces: bool) -> None:
        """addend: staged on the host, where its copy may still be on its way. replaces: it is set and not added."""
        self._behind = target.tickets.pending()
        self._target: Region | None = target
        self._addend = addend
        self._replaces = replaces
        self._lock = threading.Lock()  # a checkpoint's thread may ask for the sum, too
        target.tickets.note_write(self)

    def wait(self) -> None:
        with self._lock:
            # Taken out first: an interrupt in here drops the gradients of the step, but must not have one added twice.
            target, self._target = self._target, None
            if target is None:
                return
            for ticket in self._behind:
                ticket.wait()
            self._behind = []
            wait_on_host(self._addend)
            with untracked():
                if self._replaces:
                    target.flat.copy_(self._addend.flat)
                else:
                    target.flat.add_(self._addend.flat)

    def order(self) -> None:
        """Do what `wait` does: no stream can wait for the host."""
        self.wait()

    def implies(self, earlier: Ticket) -> bool:
        """Whether `earlier` is done with it. It cannot be told of a copy."""
        return earlier is self


class HostSums:
    """Adds what is on the device to sums on the host. It has two staging buffers, which are kept from step to step."""

    def __init__(self, transfer: Transfer, pins: bool) -> None:
        """pins: the buffers are pinned, so that a copy to them lets the host go on."""
        self._transfer = transfer
        self._pins = pins
        self._staging: list[Region | None] = [None, None]
        self._pending: list[HostSum | None] = [None, None]
        self._next = 0

    def put(self, target: Region, addend: Region, replaces: bool) -> None:
        """Add `addend`, on the device, to `target`, or set it if `replaces`, at the latest when `target` is used."""
        number, self._next = self._next, 1 - self._next
        before, buffer = self._pending[number], self._staging[number]
        if before is not None:
            before.wait()
        if buffer is None or buffer.nbytes < addend.nbytes:
            memory = torch.empty(addend.nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._pins)
            buffer = self._staging[number] = Region(Tier.HOST, memory)
        staged = buffer[: addend.nbytes].view(addend.dtype)
        self._transfer.copy(staged, addend)
        self._pending[number] = HostSum(target, staged, replaces)


# -- Work that a thread does on regions while training goes on: updates on the host, beside the next forward, and the
# sums for the gradient norm, beside the backward.
#
# Whoever uses one of these regions next finds the work's ticket there, and waits for this one piece of work. The thread
# has regions of its own over the same memory, with the tickets that were pending when the work was handed over: those
# are what the work itself waits for.


class WorkTicket:
    """A piece of work on some regions. It is the `Ticket` of all of them, for everybody but the thread that does it."""

    number = -1  # it is no copy of a stream's

    def __init__(self, thread: WorkThread) -> None:
        self._thread = thread
        self._over = Over()
        self._regions: list[tuple[Tickets, Tickets]] = []  # everybody's, and those of the thread
        self._left: list[Ticket] = []  # of copies that the work has started

    def hand_over(self, region: Region) -> Region:
        """The region as the work may use it. Everybody else waits for the work from now on."""
        for theirs, own in self._regions:
            # A gradient may lie in its parameters' home, which is handed over once.
            if theirs is region.tickets:
                return Region(region.tier, region.flat, own)
        own = region.tickets.copy()
        region.tickets.note_write(self)
        self._regions.append((region.tickets, own))
        return Region(region.tier, region.flat, own)

    def read(self, region: Region) -> None:
        """The work reads the region. Whoever writes to it next waits for the work."""
        region.tickets.note_read(self)

    def end(self, error: BaseException | None = None) -> None:
        """The work is done, or has failed with `error`, unless it was done before. Called by the thread."""
        if self._over.is_over:
            return
        left = Tickets()
        for _, own in self._regions:
            for ticket in own.pending():
                # Earlier work is over. Its own ticket here would keep all work before it alive, step for step.
                for each in ticket._left if isinstance(ticket, WorkTicket) else [ticket]:
                    left.note_read(each)
        self._left, self._regions = left.reads, []
        self._over.end(error)

    def wait(self) -> None:
        """See `Ticket`. Raises what the work has raised."""
        self._thread.wait_for(self._over)
        for ticket in self._left:
            ticket.wait()

    def order(self) -> None:
        """See `Ticket`: the host waits for the thread, and the stream for the copies that it has started."""
        self._thread.wait_for(self._over)
        for ticket in self._left:
            ticket.order()

    def implies(self, earlier: Ticket) -> bool:
        """Whether `earlier` is done with it. It cannot be told of a copy."""
        return earlier is self


class WorkThread:
    """A thread that does one piece of work after another. There is none before the first."""

    def __init__(self) -> None:
        self._workers = Workers(1)
        self._last: WorkPiece | None = None
        self._busy_s = self._waited_s = 0.0
        self.heard = Feed()

    @property
    def is_busy(self) -> bool:
        """Some work is left."""
        return self._last is not None and not self._last.is_over

    def begin(self, work: Callable[[], None]) -> None:
        """Have `work` done, after all that began before. If this raises, it is over, or will never begin."""
        earlier, self._last = self._last, WorkPiece(partial(self._carry_out, work))
        try:
            self._workers.begin([self._last])
        except BaseException as error:
            give_up([self._last], error)
            self._last = earlier
            raise

    def _carry_out(self, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        try:
            work()
        finally:
            end = time.perf_counter()
            self._busy_s += end - start
            if self.heard:
                self.heard.tell(Span("work", start, end))

    def wait_for(self, over: Over) -> None:
        """Wait for a part of the work. Raises what it has raised."""
        if not over.is_over:
            start = time.perf_counter()
            try:
                over.wait()
            finally:
                end = time.perf_counter()
                self._waited_s += end - start
                if self.heard:
                    self.heard.tell(Span("thread", start, end))
        over.result()

    def finish(self) -> None:
        """Wait until no work is left. Raises what the last piece has raised, once."""
        last = self._last
        if last is not None:
            try:
                self.wait_for(last)
            finally:
                # An interrupt leaves it to be waited for again.
                self._last = None if last.is_over else last

    def pop_times(self) -> tuple[float, float]:
        """Seconds that the thread has worked, and that others have waited for it, since the last call."""
        times, self._busy_s, self._waited_s = (self._busy_s, self._waited_s), 0.0, 0.0
        if self.heard:
            self.heard.tell(TimesRead())
        return times

    def join(self) -> None:
        """Wait until no work is left, done or failed."""
        self._workers.join()

    def close(self) -> None:
        """Wait until no work is left, done or failed, and end the thread. The next work has another."""
        self._workers.close()


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
