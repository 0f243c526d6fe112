"""Regions, and copies between them that tickets order; loans of them; scratch."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from gemini.errors import GeminiError
from gemini.memory.direct import aligned_bytes
from gemini.memory.disk import DiskTicket, DiskTier
from gemini.memory.tier import MemoryTier
from gemini.memory.workers import Over, WorkPiece
from gemini.observe import Copied, Feed, Span
from gemini.placement.demand import Tier
from gemini.placement.needs import round_to_alignment

# -- A region: flat memory on one tier, with the tickets that tell when the copies from and to it are done.
#
# Copies between host and device run while the host goes on. The next reader or writer of a region finds in it the
# tickets to wait for, and waits for nothing else. `Transfer` makes the copies and does the waiting.


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

    __slots__ = ("__weakref__", "pending", "reads", "write")

    def __init__(self) -> None:
        self._become(None, [])

    def _become(self, write: Ticket | None, reads: list[Ticket]) -> None:
        self.write, self.reads = write, reads
        # The tickets that must be done before the memory is written. Every use of a region looks at them.
        self.pending = reads if write is None else [write, *reads]

    def last_number(self) -> int:
        """The number of the last copy that may not be done. -1: there is none."""
        return max((ticket.number for ticket in self.pending), default=-1)

    def note_read(self, ticket: Ticket) -> None:
        """A copy out of the memory was started, after its last write."""
        # Tickets that the new one implies are dropped: a region that is read in every step would collect them for ever.
        self._become(self.write, [*(each for each in self.reads if not ticket.implies(each)), ticket])

    def note_write(self, ticket: Ticket) -> None:
        """A copy into the memory was started, after everything that was pending."""
        # Whoever waits for this write has waited for the earlier tickets too, because the copy began behind them.
        self._become(ticket, [])

    def copy(self) -> Tickets:
        """The same tickets, for another reader of the memory."""
        own = Tickets()
        own._become(self.write, self.reads)
        return own

    def clear(self) -> None:
        """Drop all tickets: the host has waited for them."""
        self._become(None, [])


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


# -- Copies between tiers, and all waiting for them. No other file names a stream or an event.
#
# `Transfer.copy` starts a copy and leaves its ticket with both regions. Nothing waits for a device as a whole:
#
# - The host reads or writes a region after `wait_on_host(region)`.
# - Kernels and collectives read or write a device region that copies fill or empty after `wait_on_stream(region)`.
# - A copy itself starts after the tickets of both of its regions, so copies need nothing from their callers.
#
# Each direction has a stream of its own, so that payloads come and gradients leave beside the kernels, and beside each
# other: a GPU has one copy engine for each. A copy begins behind everything that was launched on the current stream
# before it, because kernels tell nobody when they have read a slot. What hides it is launched after it: that is why
# payloads are fetched an operator ahead. `tests/harness/late_copies.py` has a device on which every copy is as late as
# its ticket allows.


Clock = dict[torch.Stream, int]
"""By stream: the number of its last copy that is known to come before something. Copies of a stream run in order."""


class OnStream:
    """Starts copies on streams of an accelerator, one for each direction. Events are reused."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: Clock = {}  # the host knows that these copies are done
        self.events: list[torch.Event] = []  # of tickets that were dropped
        self._streams: dict[Tier, torch.Stream] = {}  # by the tier to which they copy
        self._clocks: dict[torch.Stream, Clock] = {}  # by stream: the copies behind which it runs from now on
        self._numbers = count()
        self._aside: torch.Stream | None = None
        self.heard = Feed()
        # A thread that updates weights starts copies, too. Whoever waits for a thread does so without the lock.
        self.lock = threading.RLock()

    def start(self, to: Region, source: Region, behind: Sequence[Ticket], copied: Copied | None = None) -> StreamTicket:
        """Copy `source` to `to` once all of `behind`, and what the current stream was given so far, are done.

        copied: gets marks of the copy's times.
        """
        with self.lock:
            stream = self._streams.get(to.tier)
            if stream is None:
                stream = self._streams[to.tier] = self.new_stream()
            self._follow(stream, self.stream())
        with stream:
            for ticket in behind:
                ticket.order()
            with self.lock:
                begin = None if copied is None else self.mark(stream)
                to.flat.copy_(source.flat, non_blocking=True)
                if copied is not None and begin is not None:
                    copied.mark(begin, self.mark(stream))
                event, number, clock = self._event(), next(self._numbers), self.clock(stream)
                event.record(stream)
                clock[stream] = number
                return StreamTicket(self, stream, event, number, dict(clock))

    def aside(self) -> torch.Stream:
        """A stream for another thread to enter, behind everything that the current stream was given so far."""
        with self.lock:
            if self._aside is None:
                self._aside = self.new_stream()
            self._follow(self._aside, self.stream())
            return self._aside

    def _follow(self, stream: torch.Stream, other: torch.Stream) -> None:
        """Order `stream` behind everything that `other` was given so far. With the lock."""
        launched = self._event()
        launched.record(other)
        stream.wait_event(launched)
        # The stream waits for what the event stands for now, so that it may be recorded again at once.
        self.reuse(launched)
        advance(self.clock(stream), self.clock(other))

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """The model is dropped: wait for its last copies, whose memory is about to be freed."""
        # No later copy of another model waits for these, because streams belong to one model. Modules may be gone while
        # the interpreter ends, `sys` too.
        if not is_ending():
            for stream in getattr(self, "_streams", {}).values():
                stream.synchronize()

    def clock(self, stream: torch.Stream) -> Clock:
        """The copies behind which the stream runs from now on. To be advanced where it is told to wait."""
        return self._clocks.setdefault(stream, {})

    def reuse(self, event: torch.Event) -> None:
        """Record a later copy with this event: its ticket was dropped, so nobody can wait for it any more."""
        # A ticket may die in any thread and at any moment. `append` is one operation, so it needs no lock.
        self.events.append(event)

    def _event(self) -> torch.Event:
        # One operation, since a thread may take the last event between a look and a `pop`.
        try:
            return self.events.pop()
        except IndexError:
            return self.new_event()

    def stream(self) -> torch.Stream:
        """The current stream of this thread."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.device)

    def new_event(self) -> torch.Event:
        return torch.Event(self.device)

    def mark(self, stream: torch.Stream) -> torch.Event | None:
        """An event behind what the stream was given so far, which knows its time. None: the device has none."""
        # torch's stand-ins of an accelerator need not have times.
        with suppress(RuntimeError, NotImplementedError):
            event = torch.Event(self.device, enable_timing=True)
            event.record(stream)
            return event
        return None


class StreamTicket:
    """An event recorded after a copy. Once the ticket is dropped nobody can wait for the event, so it is reused."""

    __slots__ = ("_clock", "_event", "_lane", "_stream", "number")

    def __init__(self, lane: OnStream, stream: torch.Stream, event: torch.Event, number: int, clock: Clock) -> None:
        """clock: the copies that are done when this one is, itself included."""
        self._lane, self._stream, self._event, self.number, self._clock = lane, stream, event, number, clock

    def wait(self) -> None:
        done = self._lane.done
        # One wait answers for all copies behind which this one began.
        if done.get(self._stream, -1) < self.number:
            begin_s = perf_counter()
            self._event.synchronize()
            advance(done, self._clock)
            if self._lane.heard:
                self._lane.heard.tell(Span("copy", begin_s, perf_counter()))

    def order(self) -> None:
        # A copy that the host has waited for is over.
        if self._lane.done.get(self._stream, -1) < self.number:
            stream = self._lane.stream()
            with self._lane.lock:
                clock = self._lane.clock(stream)
                # Work on one stream runs in order already, and a stream waits for a copy once.
                if stream != self._stream and clock.get(self._stream, -1) < self.number:
                    stream.wait_event(self._event)
                    advance(clock, self._clock)

    def implies(self, earlier: Ticket) -> bool:
        return isinstance(earlier, StreamTicket) and earlier.number <= self._clock.get(earlier._stream, -1)

    def __del__(self) -> None:
        self._lane.reuse(self._event)


def advance(clock: Clock, other: Clock) -> None:
    """Add to `clock` what `other` comes after."""
    for stream, number in other.items():
        if clock.get(stream, -1) < number:
            clock[stream] = number


def lane_of(device: torch.device) -> OnStream | None:
    """The `OnStream` for copies between host and `device`; None on the CPU, where a copy is done at once."""
    return None if device.type == "cpu" else OnStream(device)


class _Staging:
    """Pinned memory between disk and device, for what a forward or backward fetches. Two buffers take turns."""

    def __init__(self) -> None:
        self._turns: list[Region | None] = [None, None]
        self._next = 0

    def buffer(self, source: Region) -> Region:
        """Memory like `source`, once what was there before has gone to the device."""
        number, self._next = self._next, 1 - self._next
        there = self._turns[number]
        if there is not None:
            drop_copies(there.tickets)  # a disk that failed in an earlier fetch was told of there
        if there is None or there.nbytes < source.nbytes:
            there = self._turns[number] = Region(Tier.HOST, aligned_bytes(source.nbytes, pins=True))
        return there[: source.nbytes].view(source.dtype)


class _Onward:
    """Copies from the disk to the device. Each goes on from pinned memory when somebody needs it."""

    number = -1  # of no stream, until it has gone on

    def __init__(self, read: Ticket, lane: OnStream, staged: Sequence[tuple[Region, Region]]) -> None:
        self._read = read
        self._lane = lane
        self._staged = list(staged)  # (the device's region, its content in pinned memory)
        self._copies: list[Ticket] = []
        self._lock = threading.Lock()
        for _, buffer in staged:
            buffer.tickets.note_write(self)

    def wait(self) -> None:
        """See `Ticket`. Raises GeminiError if the disk has failed."""
        self._go_on()
        for copy in self._copies:
            copy.wait()

    def order(self) -> None:
        """See `Ticket`: the host waits for the disk, and the stream for the copies."""
        self._go_on()
        for copy in self._copies:
            copy.order()

    def implies(self, earlier: Ticket) -> bool:
        """See `Ticket`."""
        return earlier is self

    def _go_on(self) -> None:
        with self._lock:
            if self._staged:
                self._read.wait()
                self._copies = [self._lane.start(to, buffer, ()) for to, buffer in self._staged]
                self._staged = []


class Transfer:
    """The copies of one model."""

    def __init__(self, device: torch.device, disk: DiskTier | None = None) -> None:
        self.bytes_by_link: Counter[str] = Counter()  # copied so far: "host->device", "device->host", "disk->host" ...
        self.disk = disk  # None: nothing rests on one
        self._lane = lane_of(device)
        self.heard = Feed() if self._lane is None else self._lane.heard
        self._staging = _Staging()
        self._counting = threading.Lock()  # two threads may copy

    def aside(self) -> AbstractContextManager[object]:
        """For another thread to enter: its copies come behind what was launched here so far, and nothing else."""
        return nullcontext() if self._lane is None else self._lane.aside()

    def mark_now(self) -> tuple[torch.Event, float] | None:
        """An idle device's event, and when it was, as `perf_counter` says: from there marks of copies get their times.

        None: copies have no marks. Waits for the device.
        """
        if self._lane is None or (mark := self._lane.mark(self._lane.stream())) is None:
            return None
        mark.synchronize()
        return mark, perf_counter()

    def copy(self, to: Region, source: Region) -> Ticket | None:
        """Copy `source` to `to` element by element, with a cast if the dtypes differ. None: the copy is done.

        Both regions must outlive the copy: a temporary on the host is dropped only after `wait_on_host`.
        """
        if to.tier is source.tier:
            # This copy runs on the host or the current stream, in order with what follows there: it needs no ticket.
            (wait_on_stream if to.tier is Tier.DEVICE else wait_on_host)(to, source)
            to.flat.copy_(source.flat)
            return None
        with self._counting:
            self.bytes_by_link[f"{source.tier}->{to.tier}"] += source.flat.nbytes
            copied = self._tell(to, source) if self.heard else None
        if Tier.DISK in (to.tier, source.tier):
            return self._copy_on_disk([(to, source)], [copied])
        if self._lane is None:
            # Copies are done at once here. A thread may still read what is about to be overwritten, see [Note: In the
            # background] in checkpoint/saving.py, and a sum on the host may still be made, see `SumOnWait`.
            wait_on_host(to)
            if source.tickets.write is not None:
                source.tickets.write.wait()
            to.flat.copy_(source.flat)
            if copied is not None:
                copied.end()
            return None
        # Reads may overlap: the copy waits for the source's last write only, but for every pending use of its target.
        write = source.tickets.write
        ticket = self._lane.start(to, source, to.tickets.pending + ([] if write is None else [write]), copied)
        source.tickets.note_read(ticket)
        to.tickets.note_write(ticket)
        return ticket

    def copy_together(self, pairs: Sequence[tuple[Region, Region]]) -> None:
        """Copies (to, source) between host and disk with one ticket: the sources, or the targets, may share tickets."""
        with self._counting:
            for to, source in pairs:
                self.bytes_by_link[f"{source.tier}->{to.tier}"] += source.nbytes
            told = [self._tell(to, source) for to, source in pairs] if self.heard else []
        self._copy_on_disk(pairs, told)

    def _tell(self, to: Region, source: Region) -> Copied:
        """Tell of a copy that begins, and is counted on its link."""
        copied = Copied(f"{source.tier}->{to.tier}", source.nbytes, perf_counter())
        self.heard.tell(copied)
        return copied

    def _copy_on_disk(
        self, pairs: Sequence[tuple[Region, Region]], told: Sequence[Copied | None] = ()
    ) -> Ticket | None:
        """Copies from or to the disk, beside whatever the host and the device do. None: they are done.

        told: of the pairs, if anybody listens.
        """
        requests: list[WorkPiece] = []
        staged: list[tuple[Region, Region]] = []
        for to, source in pairs:
            wait_on_host(to)
            if source.tickets.write is not None:
                source.tickets.write.wait()
        for to, source in pairs:
            # States move from the device to the disk, or take another dtype, once in a while: through the mapped file.
            if source.tier is Tier.DEVICE or to.dtype is not source.dtype or self.disk is None:
                to.flat.copy_(source.flat)
            elif to.tier is Tier.DEVICE and self._lane is not None:
                staged.append((to, self._staging.buffer(source)))
                requests += self.disk.reading(staged[-1][1].flat, source.flat)
            else:
                requests += (self.disk.reading if source.tier is Tier.DISK else self.disk.writing)(to.flat, source.flat)
        for copied in told:
            if copied is not None:
                copied.wait_for(requests)
        if not requests or self.disk is None:
            return None
        ticket: Ticket = DiskTicket(requests, self.heard)
        if self._lane is not None and staged:
            ticket = _Onward(ticket, self._lane, staged)
        try:
            # Noted before they begin: memory that a request uses is never without a ticket.
            for to, source in pairs:
                source.tickets.note_read(DiskTicket(requests, self.heard, is_of_reader=True))
                to.tickets.note_write(ticket)
            self.disk.begin(requests)
        except BaseException as error:
            self.disk.give_up(requests, error)
            raise
        return ticket


def find_times(copied: Copied, origin: tuple[torch.Event, float] | None) -> None:
    """Find out when a copy has begun and ended on an accelerator, and wait for it. origin: of `Transfer.mark_now`."""
    if copied.marks is not None and origin is not None:
        mark, at_s = origin
        copied.marks[1].synchronize()
        copied.set_times(*(at_s + mark.elapsed_time(each) / 1e3 for each in copied.marks))


def wait_on_host(*regions: Region) -> None:
    """Block the host until all copies from and to the regions are done, so that it may read and write them."""
    pending = [ticket for region in regions for ticket in region.tickets.pending]
    # Latest first: the earlier tickets of the same stream are then known to be done.
    if pending:
        for ticket in sorted(pending, key=lambda ticket: ticket.number, reverse=True):
            ticket.wait()
        for region in regions:
            region.tickets.clear()


def drop_copies(tickets: Tickets) -> None:
    """Wait until all copies from and to some memory are over, done or failed: what is there is not needed any more."""
    for ticket in tickets.pending:
        with suppress(GeminiError):
            ticket.wait()
    tickets.clear()


def wait_on_stream(*regions: Region) -> None:
    """Order the current stream after all copies from and to these device regions. The host does not wait."""
    # The tickets stay: the host, or another stream, may still have to wait for them.
    for region in regions:
        for ticket in region.tickets.pending:
            ticket.order()


def wait_on_tier(*regions: Region) -> None:
    """Call `wait_on_stream` for regions on the device, and `wait_on_host` for all others."""
    busy = [region for region in regions if region.tickets.pending]
    # Rare, and this is called for every chunk: skip the two calls.
    if busy:
        wait_on_host(*(region for region in busy if region.tier is not Tier.DEVICE))
        wait_on_stream(*(region for region in busy if region.tier is Tier.DEVICE))


def written(region: Region) -> Tensor:
    """The region's memory once the last copy into it is done, to read from any thread. Other readers go on."""
    if region.tickets.write is not None:
        region.tickets.write.wait()
    return region.flat


def ready(region: Region) -> Tensor:
    """The region's memory after the wait that its tier needs."""
    (wait_on_stream if region.tier is Tier.DEVICE else wait_on_host)(region)
    return region.flat


# -- Loans: the content of regions for a reader in another thread, as it is now, while training goes on.
#
# A checkpoint that is written in the background reads states where they rest. A loan is a ticket of its regions:
# whoever writes to one next waits for it, as for a copy. Then the content is copied, if there is room for the copy, and
# the writer goes on; without room it waits until the reader is done with this one loan.


class CopyRoom:
    """Bytes that copies of one save may take at once."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.most_taken = 0
        self._taken = 0
        self.lock = threading.Lock()  # guards everything of this object and of its loans
        self._change = Over()  # of the next thing for which somebody may wait

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until `is_so`, which is asked with `lock` held."""
        # Not `threading.Condition`: see [Note: Interrupted waits] in workers.py.
        while True:
            with self.lock:
                if is_so():
                    return
                change = self._change
            change.wait()

    def note_change(self) -> None:
        """Whoever waits looks again. Called with `lock` held."""
        change, self._change = self._change, Over()
        change.end()

    def try_take(self, num_bytes: int) -> bool:
        """Take room. False if there is not enough. Called with `lock` held."""
        # A copy that is larger than all of the room is made alone: otherwise it would never be made.
        if self._taken and self._taken + num_bytes > self.num_bytes:
            return False
        self._taken += num_bytes
        self.most_taken = max(self.most_taken, self._taken)
        return True

    def give_back(self, num_bytes: int) -> None:
        """Give room back. Called with `lock` held."""
        self._taken -= num_bytes
        self.note_change()


class Loan:
    """The content of some regions, lent to one reader in another thread. It is their `Ticket`."""

    number = -1  # it is no copy of a stream's, and done before the next one of these begins

    def __init__(self, regions: Sequence[Region], room: CopyRoom) -> None:
        """Ordered after all writes to the regions. The host waits for them."""
        self._room = room
        self._contents: Sequence[Tensor] = [written(region) for region in regions]
        self._copied_bytes = 0
        self._is_read = False  # the reader has begun
        self._is_over = False
        for region in regions:
            region.tickets.note_read(self)

    # -- of whoever writes to a region next

    def wait(self) -> None:
        """The regions are about to be written: copy their content, or wait until it is read."""
        # A copy is made at once or not at all: the reader may be about to begin.
        with self._room.lock:
            if self._is_over or self._copied_bytes or (not self._is_read and self._try_copy()):
                return
        self._room.wait_until(lambda: self._is_over)

    def order(self) -> None:
        """Do what `wait` does: the reader is a thread, for which no stream can wait."""
        self.wait()

    def implies(self, earlier: Ticket) -> bool:
        """Whether an earlier loan is over. A ticket of a copy never is implied."""
        return isinstance(earlier, Loan) and earlier._is_over

    def copy(self) -> None:
        """Copy the content now: the regions may be written in ways that ask for no ticket. Waits for room."""
        self._room.wait_until(lambda: self._is_over or self._try_copy())

    def _try_copy(self) -> bool:
        num_bytes = sum(content.nbytes for content in self._contents)
        if not self._room.try_take(num_bytes):
            return False
        self._contents = [content.to("cpu", copy=True) for content in self._contents]
        self._copied_bytes = num_bytes
        return True

    # -- of the reader

    def read(self) -> Sequence[Tensor]:
        """The content of the regions, which stays as it is until `end`."""
        with self._room.lock:
            self._is_read = True
            return self._contents

    def end(self) -> None:
        """The reader needs the content no more, read or not. Ending a loan again does nothing."""
        with self._room.lock:
            if not self._is_over:
                self._is_over, self._contents = True, ()
                self._room.give_back(self._copied_bytes)
                self._room.note_change()


def spare_bytes(capacity_bytes: int | None, taken_bytes: int, free_bytes: int) -> int:
    """How much room for copies a tier has without being asked: half of what its budget, or the machine, leaves."""
    left = free_bytes if capacity_bytes is None else min(free_bytes, capacity_bytes - taken_bytes)
    return max(0, left // 2)


class BackgroundWork(Protocol):
    """Something that a thread does with loans while training goes on."""

    def finish(self) -> str | None:
        """Wait until it is over. Returns why it has failed, if no rank has been told yet. Collective."""

    def join(self) -> None:
        """Wait until this rank's part is over, done or failed. Local."""

    def raise_failure(self) -> None:
        """Raise why it has failed, once. Local."""


class Background:
    """What is done in the background of one model: one thing at a time."""

    def __init__(self) -> None:
        self._work: BackgroundWork | None = None

    def begin(self, work: BackgroundWork) -> None:
        """Something begins, after `finish`."""
        self._work = work

    def finish(self) -> str | None:
        """Wait until nothing is done any more. Collective. Returns why it has failed, if nobody was told."""
        work, self._work = self._work, None
        return None if work is None else work.finish()

    def join(self) -> None:
        """Wait until this rank's part is over, done or failed. Local."""
        if self._work is not None:
            self._work.join()

    def raise_failure(self) -> None:
        """Raise what has failed meanwhile, once. Local; a step calls it, so it costs next to nothing."""
        if self._work is not None:
            self._work.raise_failure()


# -- Scratch: one piece of device memory for the temporaries of a collective, taken at the first use and counted.


class Scratch:
    """Hands out flat tensors front to back; `reset` takes them all back."""

    def __init__(self, tier: MemoryTier, num_bytes: int) -> None:
        self._tier = tier
        self.num_bytes = num_bytes
        self._memory: Region | None = None  # (num_bytes,) uint8
        self._used_bytes = 0
        # By first byte, numel and dtype, which are the same in each step: the region, and where the next one begins.
        self._regions: dict[tuple[int, int, torch.dtype], tuple[Region, int]] = {}

    def fill(self) -> Region:
        """Take the memory if it is not taken yet. Raises BudgetError."""
        if self._memory is None:
            self._memory = Region(Tier.DEVICE, self._tier.allocate(self.num_bytes, "scratch"))
        return self._memory

    def idle(self) -> Region | None:
        """All of it, between two collectives. None: it has no memory."""
        return self._memory

    def reset(self) -> None:
        """Reuse the memory from the start: nothing that was handed out is needed any more."""
        self._used_bytes = 0
        if self._memory is not None and self._memory.tickets.pending:
            # A copy of the last use may still read the memory: what is launched next must come after it.
            wait_on_stream(self._memory)

    def resize(self, num_bytes: int) -> None:
        """Give the memory back and take other memory at the next use, even for the same `num_bytes`.

        A collective that failed may still write to the old memory.
        """
        self._regions.clear()
        memory, self._memory = self._memory, None  # first: memory that an interrupt left here would be given twice
        self.num_bytes, self._used_bytes = num_bytes, 0
        if memory is not None:
            self._tier.free(ready(memory), "scratch")

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) of `dtype`; the content is undefined."""
        return self.region(numel, dtype).flat

    def region(self, numel: int, dtype: torch.dtype) -> Region:
        """Do what `allocate` does, but return a region, for data that is copied to another tier."""
        key = self._used_bytes, numel, dtype
        if key not in self._regions:
            self._regions[key] = self._cut(*key)
        region, self._used_bytes = self._regions[key]
        return region

    def _cut(self, start: int, numel: int, dtype: torch.dtype) -> tuple[Region, int]:
        num_bytes = numel * dtype.itemsize
        assert start + num_bytes <= self.num_bytes, "scratch is smaller than the placement's scratch_bytes"
        return self.fill()[start : start + num_bytes].view(dtype), start + round_to_alignment(num_bytes)
