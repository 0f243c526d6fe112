"""Sums on the host: gradients of several micro-batches are added there, so that the sum never travels to the device.

Autograd's thread adds gradients, and must not wait for a copy in there: the kernels of the rest of the backward would
not be launched meanwhile. So an addition is a ticket of its target. It is made when the sum is needed, or when its
staging buffer is, which is two additions later: the copy is done by then.
"""

from __future__ import annotations

import threading

import torch

from gemini.memory.modes import untracked
from gemini.memory.transfer import Region, Ticket, Transfer, wait_on_host
from gemini.placement.demand import Tier


class SumOnWait:
    """A `Ticket` that computes: who first waits for its target makes an addition, or sets a value."""

    number = -1  # it is no copy of a stream's

    def __init__(self, target: Region, addend: Region, replaces: bool) -> None:
        """addend: staged on the host, where its copy may still be on its way. replaces: it is set and not added."""
        self._behind = target.tickets.pending
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
        self._pending: list[SumOnWait | None] = [None, None]
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
        self._pending[number] = SumOnWait(target, staged, replaces)
