"""Loans: the content of regions for a reader in another thread, as it is now, while training goes on.

A checkpoint that is written in the background reads states where they rest. A loan is a ticket of its regions: whoever
writes to one next waits for it, as for a copy. Then the content is copied, if there is room for the copy, and the
writer goes on; without room it waits until the reader is done with this one loan.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gemini.memory.region import Region, Ticket
from gemini.memory.transfer import written


class CopyRoom:
    """Bytes that copies of one save may take at once."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.most_taken = 0
        self._taken = 0
        self.changed = threading.Condition()  # guards everything of this object and of its loans

    def try_take(self, num_bytes: int) -> bool:
        """Take room. False if there is not enough. Called with `changed` held."""
        # A copy that is larger than all of the room is made alone: otherwise it would never be made.
        if self._taken and self._taken + num_bytes > self.num_bytes:
            return False
        self._taken += num_bytes
        self.most_taken = max(self.most_taken, self._taken)
        return True

    def give_back(self, num_bytes: int) -> None:
        """Give room back. Called with `changed` held."""
        self._taken -= num_bytes
        self.changed.notify_all()


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
        with self._room.changed:
            if self._is_over or self._copied_bytes or (not self._is_read and self._try_copy()):
                return
            self._room.changed.wait_for(lambda: self._is_over)

    def order(self) -> None:
        """Do what `wait` does: the reader is a thread, for which no stream can wait."""
        self.wait()

    def implies(self, earlier: Ticket) -> bool:
        """Whether an earlier loan is over. A ticket of a copy never is implied."""
        return isinstance(earlier, Loan) and earlier._is_over

    def copy(self) -> None:
        """Copy the content now: the regions may be written in ways that ask for no ticket. Waits for room."""
        with self._room.changed:
            self._room.changed.wait_for(lambda: self._is_over or self._try_copy())

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
        with self._room.changed:
            self._is_read = True
            return self._contents

    def end(self) -> None:
        """The reader needs the content no more, read or not. Ending a loan again does nothing."""
        with self._room.changed:
            if not self._is_over:
                self._is_over, self._contents = True, ()
                self._room.give_back(self._copied_bytes)
                self._room.changed.notify_all()


def spare_bytes(capacity_bytes: int | None, taken_bytes: int, free_bytes: int) -> int:
    """How much room for copies a tier has without being asked: half of what its budget, or the machine, leaves."""
    left = free_bytes if capacity_bytes is None else min(free_bytes, capacity_bytes - taken_bytes)
    return max(0, left // 2)


class BackgroundWork(Protocol):
    """Something that a thread does with loans while training goes on."""

    @property
    def is_waited_for(self) -> bool:
        """Whether `wait` has said how it ended, on all ranks."""

    def wait(self) -> object:
        """Wait until it is done. Collective. Raises if it has failed."""

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

    def finish(self) -> None:
        """Wait until nothing is done any more. Collective. Raises if it has failed and nobody was told."""
        work, self._work = self._work, None
        if work is not None and not work.is_waited_for:
            work.wait()

    def join(self) -> None:
        """Wait until this rank's part is over, done or failed. Local."""
        if self._work is not None:
            self._work.join()

    def raise_failure(self) -> None:
        """Raise what has failed meanwhile, once. Local; a step calls it, so it costs next to nothing."""
        if self._work is not None:
            self._work.raise_failure()
