"""Which chunk is used at which moment, and which chunk should leave: eviction by next use (Belady, 1966).

A pass is the sequence of chunk touches of one forward and its backward, or of a forward alone. The trace of earlier
passes of its kind predicts it. Touches are found in the trace by their event (see trace.py), so that a pass may leave
some out: the trace goes on behind them. What the trace lacks is added to it when the pass ends, and what the last
passes have all left out is dropped. Where a pass has little in common with the trace, the rest of it evicts the least
recently used chunk; where it has much in another order, it is the new trace. Everything here follows from the sequence
of touches alone, which is equal on all ranks, so all ranks evict the same chunk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence

from gemini.placement.trace import Counts, Events, PassKind, Touch, merged

_MISSES = 8
"""Passes in a row that leave out a touch before it is dropped: an expert may be idle for some batches."""

_MOST_STRAYS = 0.25
"""Of the touches in the trace: how many, as a part, a pass may have beside them or in another order.

Of those beside them: to be predicted on. Of those in another order: for the trace to be kept.
"""


class _Record:
    """The trace of the passes of one kind."""

    def __init__(self) -> None:
        self.touches: list[Touch] = []
        self.place: dict[Touch, int] = {}
        self.uses: dict[int, list[int]] = {}  # chunk -> its places
        self._misses: dict[Touch, int] = {}  # passes in a row that left out a touch

    def take(self, touches: Sequence[Touch]) -> None:
        """The trace from now on."""
        self.touches = list(touches)
        self.place = {touch: at for at, touch in enumerate(self.touches)}
        self.uses = {}
        for at, touch in enumerate(self.touches):
            self.uses.setdefault(touch.chunk, []).append(at)

    @property
    def most_strays(self) -> float:
        """See `_MOST_STRAYS`."""
        return _MOST_STRAYS * len(self.touches)

    def learn(self, passed: dict[Touch, None], strays: bool) -> None:
        """A pass ended that had touches which the trace lacks, or lacked some of the trace."""
        touches = merged(self.touches, list(passed)) if strays else self.touches
        left_out = [touch for touch in touches if touch not in passed]
        self._misses = {touch: self._misses.get(touch, 0) + 1 for touch in left_out}
        if any(count >= _MISSES for count in self._misses.values()):
            touches = [touch for touch in touches if self._misses.get(touch, 0) < _MISSES]
        if touches is not self.touches:
            self.take(touches)

    def forget_misses(self) -> None:
        """A pass had all touches of the trace."""
        self._misses.clear()


class _Pass:
    """A pass that runs."""

    def __init__(self, kind: PassKind, record: _Record, outside: Counts | None) -> None:
        self.kind = kind
        self.record = record
        self.outside = outside  # counts of events of the pass around it
        self.passed: dict[Touch, None] = {}
        self.position = 0  # in the trace: behind the last touch that was expected
        self.num_strays = 0  # touches that were not expected where they came
        self.num_disordered = 0  # of these: what the trace has earlier
        self.leaves_out = False  # the trace has touches before `position` that did not come
        self.follows = bool(record.touches)  # it is predicted
        self.is_broken = False  # one of its forwards failed


TOUCHES_AHEAD = 8
"""Expected touches among which ranks look for what to gather ahead, for each payload that may be on its way at once: a
gather of some ms is over by then, and its slot does not stand idle for long."""


class NextUse:
    """Touches of the running pass against the trace of its kind. Positions are places in the trace."""

    def __init__(self, events: Events) -> None:
        """events: of the model whose chunks are touched; a touch belongs to the last one."""
        self.epoch = 0  # while it is the same, only a touch of a chunk changes the chunk's `rank`
        self.outdated: Collection[int] = ()  # chunks that an update changes: no slot keeps them for the pass after it
        self._events = events
        self.forget()

    def forget(self) -> None:
        """Start again, as at first."""
        self.epoch += 1
        self._events.resume(None)
        self._records = {kind: _Record() for kind in PassKind}
        self._running: list[_Pass] = []  # an evaluation may come between a forward and its backward
        self._last_touch: dict[int, int] = {}  # chunk -> `num_touches` of its last touch
        self.num_touches = 0
        self._num_backwards = 0  # passes with one since the last update
        self._expected_backwards = 1  # as many as there were before it

    def touch(self, chunk: int) -> None:
        """Record that `chunk` is used now."""
        self.num_touches += 1
        self._last_touch[chunk] = self.num_touches
        if not self._running:
            return
        now, touch = self._running[-1], Touch(self._events.now, chunk)
        if touch in now.passed:  # the same function asks again
            return
        now.passed[touch] = None
        place = now.record.place.get(touch, -1)
        if place < now.position:
            now.num_strays += 1
            now.num_disordered += place >= 0
            if now.follows and now.num_strays > now.record.most_strays:
                now.follows = False
                self.epoch += 1
            return
        if place > now.position:  # chunks whose use was left out have another next use by now
            now.leaves_out = True
            self.epoch += 1
        now.position = place + 1

    def begin_pass(self, kind: PassKind = PassKind.TRAINING) -> None:
        """A pass starts. One for training ends what an exception has left; an evaluation is inside what runs."""
        if kind is not PassKind.EVALUATION:
            self._running.clear()
            self._events.resume(None)
        self._running.append(_Pass(kind, self._records[kind], self._events.begin()))
        self.epoch += 1

    def end_pass(self, kind: PassKind = PassKind.TRAINING) -> bool:
        """The pass ended, and its trace has learned of it. False if it was not predicted up to its end.

        Nothing happens if no pass of this kind runs inside all others.
        """
        if not self._running or self._running[-1].kind is not kind:
            return False
        now = self._running.pop()
        self._num_backwards += kind is not PassKind.EVALUATION
        self._events.resume(now.outside)
        self.epoch += 1
        if now.is_broken:
            return False
        if now.num_disordered > now.record.most_strays or not now.record.touches:
            now.record.take(list(now.passed))
        elif now.num_strays or now.leaves_out or now.position < len(now.record.touches):
            now.record.learn(now.passed, strays=now.num_strays > 0)
        else:
            now.record.forget_misses()
        return now.follows

    def drop_pass(self) -> None:
        """The running pass for training will have no end. Its trace is as before."""
        self._running.clear()
        self._events.resume(None)
        self.epoch += 1

    def break_pass(self) -> None:
        """A forward of the running pass failed, and no other pass will have the touches that it left.

        The rest of the pass evicts the least recently used chunk, and the trace learns nothing from it.
        """
        for each in self._running:
            each.follows, each.is_broken = False, True
        self.epoch += 1

    def touches(self, kind: PassKind) -> Sequence[Touch]:
        """The trace of passes of a kind."""
        return self._records[kind].touches

    def note_update(self) -> None:
        """The optimizer updates the weights: as many backwards are expected before the next time."""
        self._expected_backwards, self._num_backwards = max(1, self._num_backwards), 0
        self.epoch += 1

    @property
    def kind(self) -> PassKind | None:
        """Of the running pass."""
        return self._running[-1].kind if self._running else None

    @property
    def follows(self) -> bool:
        """The running pass is predicted."""
        return bool(self._running) and self._running[-1].follows

    @property
    def is_in_order(self) -> bool:
        """All touches of the running pass so far are in the trace, in its order. It may have left out some."""
        return self.follows and not self._running[-1].num_strays

    @property
    def position(self) -> int:
        """The place behind the last touch that the trace has."""
        return self._running[-1].position if self._running else 0

    @property
    def places(self) -> Mapping[Touch, int]:
        """Of touches in the trace of the running pass. Another object for another trace."""
        return self._running[-1].record.place if self._running else {}

    @property
    def passed(self) -> Collection[Touch]:
        """The touches of the running pass so far, in order."""
        return self._running[-1].passed.keys() if self._running else ()

    def next_use(self, chunk: int) -> int:
        """Place of the next expected touch of `chunk`; uses of the next pass count on from the end of this one.

        Where an update is expected between the two, chunks that it changes come after all others.
        """
        if not self._running:
            return 0
        now = self._running[-1]
        num_touches, uses = len(now.record.touches), now.record.uses.get(chunk)
        if not uses:
            return 3 * num_touches
        at = bisect_left(uses, now.position)
        if at < len(uses):
            return uses[at]
        is_last = now.kind is not PassKind.EVALUATION and self._num_backwards + 1 >= self._expected_backwards
        return (2 if is_last and chunk in self.outdated else 1) * num_touches + uses[0]

    def coming(self, count: int) -> list[int]:
        """The chunks of the next `count` expected touches; none if the pass is not predicted."""
        if not self.follows:
            return []
        now = self._running[-1]
        return [touch.chunk for touch in now.record.touches[now.position : now.position + count]]

    def rank(self, chunk: int) -> int:
        """The chunk with the smallest is evicted first, of equal ones the first in the model.

        That is the one with the farthest next use while the pass is predicted, else the least recently used one.
        """
        return -self.next_use(chunk) if self.follows else self._last_touch.get(chunk, -1)
