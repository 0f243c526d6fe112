"""Events: moves of everything that travels between tiers, slots and ranks, and what else a trace shows.

The objects that move data ask for a `OpenMove` and work inside it. What listens is this: `counts`, which
`memory_report()` prints; a range in a profile of `torch.profiler`, so that a trace reads like the design; one line per
move on stderr with GEMINI_LOG=1; and what users add with `listen`. Bytes that a tier holds, and bytes on each link, are
counted elsewhere, where memory is taken and copied (memory/tier.py): an event says why, a ledger says how much.

Whoever changes such a count, or knows something else that a trace shows, has a `Feed` and tells it there: the ledger of
each tier, copies, the threads, collectives, and the position in the step. `gemini.trace` listens to all of them.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any

import torch
from torch.autograd.profiler import record_function

_profiler_enabled = torch._C._autograd._profiler_enabled

# -- What is told besides moves. Whoever listens adds the moment and the thread in which it is told.


class Feed(list[Callable[[Any], None]]):
    """The listeners to one source of events. Its owner asks `if feed:` first: without any that is all."""

    def listen(self, listener: Callable[[Any], None]) -> Callable[[], None]:
        """Have `listener` called with every event, by the thread that tells it; returns what ends that. Local.

        Args:
            listener: must neither use the model nor raise: it is called in the middle of a step.
        """
        self.append(listener)

        def end() -> None:
            # The user may call it twice.
            if listener in self:
                self.remove(listener)

        return end

    def tell(self, event: object) -> None:
        """Call all listeners. Local. Raises what a listener raises."""
        # The loop has a copy: a listener that ends itself changes the list, and the next one would be passed over.
        for listener in tuple(self):
            listener(event)


@dataclass(frozen=True, slots=True)
class Held:
    """A tier's ledger counts this many bytes of a kind more, or fewer below 0."""

    kind: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Allowed:
    """A tier has another budget. None: no bound."""

    capacity_bytes: int | None


@dataclass(frozen=True, slots=True)
class Shortage:
    """A tier, by its budget or the machine's, has no room. Another one may take the bytes."""

    words: str


@dataclass(frozen=True, slots=True)
class Occupied:
    """A slot has the payload, or the gradient, of this chunk now; None: of no chunk."""

    kind: str  # the ledger's kind of the slot's bytes
    slot: int  # a number that no other slot has while this one is there
    num_bytes: int  # of the slot
    chunk: int | None


@dataclass(slots=True)
class Copied:
    """A copy between tiers that begins, counted on its link. Its end is written when it is known."""

    link: str
    num_bytes: int
    begin_s: float  # all seconds are those of `time.perf_counter`
    end_s: float | None = None
    pieces: tuple[object, ...] = ()  # requests of a disk, whose ends are the copy's
    marks: tuple[Any, Any] | None = None  # events of an accelerator before and behind it, which know its times

    def end(self) -> None:
        """The copy is done."""
        self.end_s = perf_counter()

    def wait_for(self, pieces: Sequence[object]) -> None:
        """The copy is done when these requests are; without any it is done."""
        if pieces:
            self.pieces = tuple(pieces)
        else:
            self.end()

    def mark(self, begin: object, end: object) -> None:
        """The copy is between these events of an accelerator."""
        self.marks = begin, end

    def set_times(self, begin_s: float, end_s: float) -> None:
        """These are known, and nothing else is needed to find them."""
        self.begin_s, self.end_s, self.pieces, self.marks = begin_s, end_s, (), None


@dataclass(slots=True)
class Met:
    """A collective that is launched. The time that it was waited for is written when it is over."""

    what: str
    chunk: int
    position: int
    sent_bytes: int  # by this rank so far, in all collectives before this one
    begin_s: float
    waited_from_s: float = 0.0
    end_s: float | None = None

    def begin_wait(self) -> None:
        """Training waits for it from now on."""
        self.waited_from_s = perf_counter()

    def end(self) -> None:
        """It is over."""
        self.end_s = perf_counter()


@dataclass(frozen=True, slots=True)
class Span:
    """Something has taken a thread's time.

    what: "request" of a disk, "work" of the thread beside training, or the "update" of `chunk`; of "thread", "copy" and
    "disk" the time that another thread has waited for it.
    """

    what: str
    begin_s: float
    end_s: float
    chunk: int | None = None
    piece: object = None


@dataclass(frozen=True, slots=True)
class Reached:
    """The step is at this position from now on: see `StepPosition`."""

    position: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A forward, a backward or a step has ended with an error, which the script may catch."""

    words: str
    lacks_memory: bool


@dataclass(frozen=True, slots=True)
class TimesRead:
    """A step has read the times of the thread beside training, and counts from 0 again."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step has ended, with what `optimizer.last_step` says of it."""

    report: Any


# -- Moves, for users too.


Reason = str | Callable[[], str]
"""Words, or what makes them: most moves are seen by nobody, and words cost more than counting does."""


@dataclass(frozen=True)
class Move:
    """One move of a chunk's data on this rank.

    Attributes:
        what: "fetch", or "prefetch" where it was started before it was asked for: a payload comes into a slot.
            "release": a payload leaves its slot, or "evict" where another chunk needs the slot. "reduce": a gradient
            is exchanged with the other ranks and merged into its home. "spill" and "unspill": an open gradient goes
            to the host unreduced, and comes back. "migrate": a state moves to another tier for good.
        chunk: the chunk's index in `model.plan.packing.chunks`.
        source, target: "device" or "host" for the tier of a home, "slot" or "gradient slot".
        num_bytes: of the chunk's payload or state, whole, on this rank; what crosses a link may be less.
        ms: milliseconds that the calling thread spent on starting the move and on waiting for it. A copy that an
            accelerator does later is not in it.
        reason: who asked, in words.
        parts: (begin, end) of its one or two parts in the calling thread, in seconds of `time.perf_counter`: that of a
            fetch has its start, and the wait for it. Together they are `ms`.
    """

    what: str
    chunk: int
    source: str
    target: str
    num_bytes: int
    ms: float
    reason: str
    parts: tuple[tuple[float, float], ...] = ()

    def __str__(self) -> str:
        where = f"{self.source} -> {self.target}"
        return f"{self.what} chunk {self.chunk} {where} {self.num_bytes} B {self.ms:.3f} ms: {self.reason}"


Listener = Callable[[Move], None]


class Observer:
    """The moves of one model on this rank. A `ShardedModel` has it as `observer`.

    Local: no other rank is told. Raises nothing of its own; what a listener raises goes through to whoever moved data.

    Example:
        >>> seen = []
        >>> model = ShardedModel(torch.nn.Linear(8, 8), device="emulated")
        >>> end = model.observer.listen(seen.append)
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # moves by `Move.what` since the model was made
        self.moves = Feed()
        self.steps = Feed()  # of `Stepped`, and of the spans of updates
        if os.environ.get("GEMINI_LOG", "") not in ("", "0"):
            self.listen(_print)

    @property
    def num_fetches(self) -> int:
        """Payloads that came into a slot, asked for or started before."""
        return self.counts["fetch"] + self.counts["prefetch"]

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Have `listener` called with every move, by the thread that made it; returns what ends that. Local.

        Args:
            listener: is given the `Move`. It must neither use the model nor raise: it is called in the middle of a
                step, on this rank alone.
        """
        return self.moves.listen(listener)

    def moving(
        self, what: str, chunk: int, source: str, target: str, num_bytes: int, reason: Reason, blocks: int = 1
    ) -> OpenMove:
        """A move that is about to be made: its work stands in a `with` block, or in several, and is noted after them.

        Called by what moves data. A move that fails, whose `with` block raises, is not noted. Local.

        Args:
            what, chunk, source, target, num_bytes: as of `Move`; num_bytes in bytes.
            reason: who asked, in words or as what makes them.
            blocks: the number of `with` blocks.
        """
        return OpenMove(self, what, chunk, source, target, num_bytes, reason, blocks)

    def note(self, moving: OpenMove) -> None:
        """A move was made: count it, and tell the listeners. Local. Raises what a listener raises.

        Args:
            moving: what `moving` returned.
        """
        self.counts[moving.what] += 1
        if self.moves:
            reason = moving.reason if isinstance(moving.reason, str) else moving.reason()
            ends = moving.source, moving.target
            ms, parts = moving.seconds * 1e3, moving.parts()
            self.moves.tell(Move(moving.what, moving.chunk, *ends, moving.num_bytes, ms, reason, parts))


@dataclass(slots=True)
class OpenMove:
    """A move that is being made. Time between its `with` blocks is not its own."""

    observer: Observer
    what: str
    chunk: int
    source: str
    target: str
    num_bytes: int
    reason: Reason
    blocks: int  # to come
    seconds: float = 0.0
    _starts: tuple[float, ...] = ()  # of its `with` blocks
    _range: record_function | None = None

    def __enter__(self) -> OpenMove:
        if _profiler_enabled():  # a range that nobody records costs as much as a small copy
            self._range = record_function(f"gemini::{self.what} chunk {self.chunk}")
            self._range.__enter__()
        self._starts += (perf_counter(),)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.seconds += perf_counter() - self._starts[-1]
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
            self._range = None
        self.blocks -= 1
        # A fetch has a block where it starts and one where it is waited for: it is one move, noted at the end of the
        # second.
        if self.blocks == 0 and error is None:
            self.observer.note(self)

    def parts(self) -> tuple[tuple[float, float], ...]:
        """See `Move.parts`, of a move that was made."""
        first, last = self._starts[0], self._starts[-1]
        if first == last:
            return ((first, first + self.seconds),)
        # What is not the last part's is the first one's.
        last_s = min(self.seconds, perf_counter() - last)
        return ((first, first + self.seconds - last_s), (last, last + last_s))


def _print(move: Move) -> None:
    print(f"gemini: {move}", file=sys.stderr)
