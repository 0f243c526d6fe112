"""Work that a thread does on regions while training goes on: updates beside the next forward, and sums for the norm.

Whoever uses one of these regions next finds the work's ticket there, and waits for this one piece of work. The thread
has regions of its own over the same memory, with the tickets that were pending when the work was handed over: those
are what the work itself waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from gemini.memory.transfer import Region, Ticket, Tickets
from gemini.memory.workers import Over, Workers, WorkPiece, give_up
from gemini.observe import Feed, Span, TimesRead


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
            for ticket in own.pending:
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
