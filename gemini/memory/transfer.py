"""Copies between tiers, and all waiting for them. No other file names a stream or an event.

`Transfer.copy` starts a copy and leaves its ticket with both regions. Nothing waits for a device as a whole:

- The host reads or writes a region after `wait_on_host(region)`.
- Kernels and collectives read or write a device region that copies fill or empty after `wait_on_stream(region)`.
- A copy itself starts after the tickets of both of its regions, so copies need nothing from their callers.

Today a copy runs on the stream that is current at the call, so `wait_on_stream` does nothing unless the user has
changed streams meanwhile. Callers keep the contract of many streams nevertheless: if copies get streams of their own,
no other file changes. `tests/harness/late_copies.py` has a device on which every copy is as late as its ticket allows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import count

import torch
from torch import Tensor

from gemini.memory.region import Region, Ticket
from gemini.placement.demand import Tier


class OnStream:
    """Starts copies on the current stream of an accelerator. Events are reused."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.done: dict[torch.Stream, int] = {}  # by stream: the last copy that the host knows is done
        self.events: list[torch.Event] = []  # of tickets that were dropped
        self._numbers = count()

    def start(self, to: Region, source: Region, behind: Sequence[Ticket]) -> StreamTicket:
        """Copy `source` to `to` once all of `behind` are done."""
        for ticket in behind:
            ticket.order()
        to.flat.copy_(source.flat, non_blocking=True)
        event = self.events.pop() if self.events else self.new_event()
        stream = self.stream()
        event.record(stream)
        return StreamTicket(self, stream, event, next(self._numbers))

    def reuse(self, event: torch.Event) -> None:
        """Record a later copy with this event: its ticket was dropped, so nobody can wait for it any more."""
        # A ticket may die in any thread and at any moment. `append` is one operation, so it needs no lock.
        self.events.append(event)

    def stream(self) -> torch.Stream:
        """The current stream of this thread."""
        return torch.accelerator.current_stream(self.device)

    def new_event(self) -> torch.Event:
        return torch.Event(self.device)


class StreamTicket:
    """An event recorded after a copy. Once the ticket is dropped nobody can wait for the event, so it is reused."""

    __slots__ = ("_event", "_lane", "_stream", "number")

    def __init__(self, lane: OnStream, stream: torch.Stream, event: torch.Event, number: int) -> None:
        self._lane, self._stream, self._event, self.number = lane, stream, event, number

    def wait(self) -> None:
        done = self._lane.done
        # Copies of a stream finish in order, so one wait answers for all earlier tickets.
        if done.get(self._stream, -1) < self.number:
            self._event.synchronize()
            done[self._stream] = self.number

    def order(self) -> None:
        # A copy that the host has waited for is over.
        if self._lane.done.get(self._stream, -1) < self.number:
            stream = self._lane.stream()
            # Work on one stream runs in order already.
            if stream != self._stream:
                stream.wait_event(self._event)

    def implies(self, earlier: Ticket) -> bool:
        return isinstance(earlier, StreamTicket) and earlier._stream == self._stream and earlier.number <= self.number

    def __del__(self) -> None:
        self._lane.reuse(self._event)


def lane_of(device: torch.device) -> OnStream | None:
    """The `OnStream` for copies between host and `device`; None on the CPU, where a copy is done at once."""
    return None if device.type == "cpu" else OnStream(device)


class Transfer:
    """The copies of one model."""

    def __init__(self, device: torch.device) -> None:
        self.bytes_by_link: Counter[str] = Counter()  # copied so far: "host->device", "device->host"
        self._lane = lane_of(device)

    def copy(self, to: Region, source: Region) -> Ticket | None:
        """Copy `source` to `to` element by element, with a cast if the dtypes differ. None: the copy is done.

        Both regions must outlive the copy: a temporary on the host is dropped only after `wait_on_host`.
        """
        if to.tier is source.tier:
            # This copy runs on the host or the current stream, in order with what follows there: it needs no ticket.
            (wait_on_host if to.tier is Tier.HOST else wait_on_stream)(to, source)
            to.flat.copy_(source.flat)
            return None
        self.bytes_by_link[f"{source.tier}->{to.tier}"] += source.nbytes
        if self._lane is None:
            # Copies are done at once here, but a thread may still read what is about to be overwritten: see loans.py.
            wait_on_host(to)
            to.flat.copy_(source.flat)
            return None
        # Reads may overlap: the copy waits for the source's last write only, but for every pending use of its target.
        write = source.tickets.write
        ticket = self._lane.start(to, source, to.tickets.pending() + ([] if write is None else [write]))
        source.tickets.note_read(ticket)
        to.tickets.note_write(ticket)
        return ticket


def wait_on_host(*regions: Region) -> None:
    """Block the host until all copies from and to the regions are done, so that it may read and write them."""
    pending = [ticket for region in regions for ticket in region.tickets.pending()]
    # Latest first: the earlier tickets of the same stream are then known to be done.
    if pending:
        for ticket in sorted(pending, key=lambda ticket: ticket.number, reverse=True):
            ticket.wait()
        for region in regions:
            region.tickets.clear()


def wait_on_stream(*regions: Region) -> None:
    """Order the current stream after all copies from and to these device regions. The host does not wait."""
    # The tickets stay: the host, or another stream, may still have to wait for them.
    for region in regions:
        for ticket in region.tickets.pending():
            ticket.order()


def wait_on_tier(*regions: Region) -> None:
    """Call `wait_on_host` for regions on the host, and `wait_on_stream` for regions on the device."""
    busy = [region for region in regions if region.tickets.pending()]
    # Rare, and this is called for every chunk: skip the two calls.
    if busy:
        wait_on_host(*(region for region in busy if region.tier is Tier.HOST))
        wait_on_stream(*(region for region in busy if region.tier is Tier.DEVICE))


def written(region: Region) -> Tensor:
    """The region's memory once the last copy into it is done, to read from any thread. Other readers go on."""
    if region.tickets.write is not None:
        region.tickets.write.wait()
    return region.flat


def ready(region: Region) -> Tensor:
    """The region's memory after the wait that its tier needs."""
    (wait_on_host if region.tier is Tier.HOST else wait_on_stream)(region)
    return region.flat
