"""Which chunk is used next, by the trace of earlier passes: so which one leaves, and who reduces when."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

from gemini.placement.demand import ModelSpec

# -- The trace of a pass over a model, in numbers: which chunks it touches at which event, in which order.
#
# An event names an operator, the phase that it begins, and its *occurrence*: how often this operator began this phase
# before in the running pass. A backward goes through the forwards in reverse, so it counts down from their number, and
# both events of one call have the same occurrence. Events have no running index: what a pass leaves out or adds shifts
# no other event. Therefore the trace of one pass predicts passes with other lengths, idle experts and frozen parts.


class Phase(IntEnum):
    """What an operator does at a position."""

    FORWARD = 0
    BACKWARD = 1
    TOUCH = 2  # a released parameter was used outside its operator
    STEP = 3
    BUILD = 4
    RECOMPUTE = 5  # a forward inside a backward


# A checkpointed region is recomputed where its backward begins, so recomputations come in reverse too.
_IN_REVERSE = Phase.BACKWARD, Phase.RECOMPUTE


class PassKind(IntEnum):
    """The kinds of passes. Each has a trace of its own, because one kind says nothing about the order of another."""

    TRAINING = 0  # a forward with gradients, or several, and the backward
    EVALUATION = 1  # a forward without gradients
    BACKWARD = 2  # a backward that follows no forward of the model, such as the second one through a graph


class StepEvent(NamedTuple):
    """An operator begins a phase. `operator` is its place in the table of positions."""

    operator: int
    phase: Phase
    occurrence: int  # of this event in the running pass, from 0; negative for backwards beyond the pass's forwards


class Touch(NamedTuple):
    """A chunk is used at an event."""

    event: StepEvent
    chunk: int


Counts = dict[tuple[int, Phase], int]
"""The number of events of a pass so far, by operator and phase."""


class Events:
    """Counts the events of the running pass. `now` is the latest event. Outside of passes every occurrence is 0."""

    def __init__(self) -> None:
        self.now = StepEvent(0, Phase.FORWARD, 0)
        self._counts: Counts | None = None

    def reach(self, operator: int, phase: Phase) -> None:
        """The operator begins the phase."""
        # Events outside of passes are in no trace, so nothing has to tell two of them apart.
        if self._counts is None:
            self.now = StepEvent(operator, phase, 0)
            return
        count = self._counts.get((operator, phase), 0)
        self._counts[operator, phase] = count + 1
        if phase in _IN_REVERSE:
            # After forwards 0, 1 and 2 of an operator its backwards are 2, 1 and 0: each has the number of the forward
            # that it belongs to.
            count = self._counts.get((operator, Phase.FORWARD), 0) - 1 - count
        self.now = StepEvent(operator, phase, count)

    def begin(self) -> Counts | None:
        """Begin a pass. Returns the counts of the pass around it, for `resume`."""
        # An evaluation inside a training pass must not raise the numbers of that pass's events.
        outside, self._counts = self._counts, {}
        return outside

    def resume(self, outside: Counts | None) -> None:
        """End the pass and continue with the counts of the one around it. None: there is none."""
        self._counts = outside


@dataclass(frozen=True)
class Trace:
    """The trace of a model's training passes on this rank: `model.chunk_manager.trace`.

    Args:
        operators: names of the operators, in the numbering of events; number 0 is the model itself.
        touches: which chunk is used at which event, in order. Several ranks do not record chunks that stay.
        non_model_bytes: the peak of activations and workspace between each event and the next. Empty if it was not
            recorded, see `ChunkManager.recorder`.
    """

    operators: tuple[str, ...]
    touches: tuple[Touch, ...]
    non_model_bytes: Mapping[StepEvent, int]

    @property
    def peak(self) -> tuple[StepEvent, int] | None:
        """The event with the most non-model bytes, and that number. None if nothing was recorded."""
        return max(self.non_model_bytes.items(), key=lambda pair: pair[1], default=None)

    def describe(self, event: StepEvent) -> str:
        """The event in words. Local; raises nothing."""
        name = self.operators[event.operator] or "the model"
        # A backward beyond the pass's forwards belongs to no call that a number could name.
        number = f" {event.occurrence}" if event.occurrence >= 0 else ""
        return f"{event.phase.name.lower()}{number} of {name}"


def merged(expected: Sequence[Touch], passed: Sequence[Touch]) -> list[Touch]:
    """Merge two sequences: `passed` is a subsequence of the result, and touches that it lacks stay where they were.

    A touch of `passed` that `expected` lacks comes right after the touch before it. A touch at another place in
    `passed` than in `expected` moves to where `passed` has it. Neither sequence has a touch twice.
    """
    # Find the touches that both sequences have in the same order. They anchor the merge.
    place = {touch: at for at, touch in enumerate(expected)}
    at = 0
    in_order = set()  # membership only
    for touch in passed:
        if place.get(touch, -1) >= at:
            at = place[touch] + 1
            in_order.add(touch)
    others = set(passed) - in_order  # membership only
    # Before each anchor insert what `expected` has there, except for touches that move.
    at = 0
    merged_touches: list[Touch] = []
    for touch in passed:
        if touch in in_order:
            # Touches that `passed` has elsewhere are left out here, and come where `passed` has them.
            merged_touches += [each for each in expected[at : place[touch]] if each not in others]
            at = place[touch] + 1
        merged_touches.append(touch)
    return merged_touches + [each for each in expected[at:] if each not in others]


# -- Which chunk is used at which moment, and which chunk should leave: eviction by next use (Belady, 1966).
#
# A pass is the sequence of chunk touches of one forward and its backward, or of a forward alone. The trace of earlier
# passes of the same kind predicts it. Touches are found in the trace by their event, so a pass may leave
# some out: the prediction continues behind them. When the pass ends, touches that were new are added to the trace, and
# touches that the last eight passes all left out are dropped. If a pass has little in common with the trace, the rest
# of it evicts the least recently used chunk; if much of it came in another order, it becomes the new trace. All of this
# follows from the sequence of touches alone, which is equal on all ranks, so all ranks evict the same chunk.


_MISSES = 8
"""A touch is dropped from the trace after so many passes in a row without it. Experts may be idle for some batches."""

_MOST_STRAYS = 0.25
"""Fraction of the trace's touches that a pass may deviate by.

With more unexpected touches the pass is predicted no further; with more touches in another order the trace is replaced.
"""


class _Record:
    """The trace of the passes of one kind."""

    def __init__(self) -> None:
        self.touches: list[Touch] = []
        self.place: dict[Touch, int] = {}
        self.uses: dict[int, list[int]] = {}  # chunk -> its places
        self._misses: dict[Touch, int] = {}  # passes in a row that left out a touch

    def set_trace(self, touches: Sequence[Touch]) -> None:
        """Replace the trace by `touches`."""
        self.touches = list(touches)
        self.place = {touch: at for at, touch in enumerate(self.touches)}
        self.uses = {}
        for at, touch in enumerate(self.touches):
            # The places of each chunk come in ascending order, so that `next_use` can bisect them.
            self.uses.setdefault(touch.chunk, []).append(at)

    @property
    def most_strays(self) -> float:
        """The number of touches that a pass may deviate by, see `_MOST_STRAYS`."""
        return _MOST_STRAYS * len(self.touches)

    def learn(self, passed: dict[Touch, None], strays: bool) -> None:
        """Follow a pass that had touches which the trace lacks (`strays`), or left out some of the trace."""
        touches = merged(self.touches, list(passed)) if strays else self.touches
        left_out = [touch for touch in touches if touch not in passed]
        # Counts exist only for touches that this pass left out, so a touch that came counts from 0 again.
        self._misses = {touch: self._misses.get(touch, 0) + 1 for touch in left_out}
        if any(count >= _MISSES for count in self._misses.values()):
            touches = [touch for touch in touches if self._misses.get(touch, 0) < _MISSES]
        # Keep the very same object if nothing changed: `places` tells a new trace by its identity.
        if touches is not self.touches:
            self.set_trace(touches)

    def forget_misses(self) -> None:
        """Follow a pass that had all touches of the trace."""
        self._misses.clear()


class _Pass:
    """The state of a running pass."""

    def __init__(self, kind: PassKind, record: _Record, outside: Counts | None) -> None:
        self.kind = kind
        self.record = record
        self.outside = outside  # event counts of the pass around this one
        self.passed: dict[Touch, None] = {}
        self.position = 0  # place in the trace behind the last expected touch
        self.num_strays = 0  # touches that were not expected where they came
        self.num_disordered = 0  # strays that the trace has at an earlier place
        self.leaves_out = False  # the trace has touches before `position` that did not come
        self.follows = bool(record.touches)  # the trace predicts this pass
        self.is_broken = False  # a forward of this pass failed


TOUCHES_AHEAD = 8
"""How many expected touches ranks look ahead for the next gather, for each payload that may be on its way at once.

Far enough for a gather of some ms to end in time, near enough that its slot is not idle for long.
"""


class NextUse:
    """Follows the touches of the running pass in the trace of its kind. Positions are places in that trace."""

    def __init__(self, events: Events) -> None:
        """events: the event counter of the model; a touch belongs to its current event."""
        self.epoch = 0  # within one epoch only a touch of a chunk changes that chunk's `rank`
        self.outdated: Collection[int] = ()  # chunks that an update changes, so that no slot keeps them for a next pass
        self._events = events
        self.reset_trace()

    def reset_trace(self) -> None:
        """Drop all traces and counts."""
        self.epoch += 1
        # A pass that still runs is given up with its trace: it may have failed, with ranks at different events of it.
        self._events.resume(None)
        self._records = {kind: _Record() for kind in PassKind}
        self._running: list[_Pass] = []  # an evaluation may come between a forward and its backward
        self._last_touch: dict[int, int] = {}  # chunk -> `num_touches` of its last touch
        self.num_touches = 0
        self._num_backwards = 0  # passes with a backward since the last update
        self._expected_backwards = 1  # the number of such passes before the last update

    def note_trained(self, chunks: Collection[int]) -> None:
        """Another placement is in force, with which an update changes these chunks and no others."""
        self.outdated = chunks

    def touch(self, chunk: int) -> None:
        """Record that `chunk` is used now."""
        self.num_touches += 1
        self._last_touch[chunk] = self.num_touches
        # Outside of a pass a touch only tells when the chunk was last used.
        if not self._running:
            return
        # An evaluation inside a training pass has a trace of its own, so a touch belongs to the innermost pass.
        now, touch = self._running[-1], Touch(self._events.now, chunk)
        # The same function may ask for a chunk several times. The trace has each touch once.
        if touch in now.passed:
            return
        now.passed[touch] = None
        place = now.record.place.get(touch, -1)
        # Not in the trace (-1), or at a place that the pass has gone past: the prediction stays where it is.
        if place < now.position:
            now.num_strays += 1
            # A stray that the trace lacks is added to it later. One that the trace has elsewhere came in another order.
            now.num_disordered += place >= 0
            if now.follows and now.num_strays > now.record.most_strays:
                now.follows = False
                self.epoch += 1
            return
        # The pass has skipped touches, so the skipped chunks have another next use now: all ranks in heaps are stale.
        if place > now.position:
            now.leaves_out = True
            self.epoch += 1
        now.position = place + 1

    def begin_pass(self, kind: PassKind = PassKind.TRAINING) -> None:
        """Begin a pass. An evaluation may run inside another pass; every other kind is outermost."""
        # Passes that still run then were left by an exception.
        if kind is not PassKind.EVALUATION:
            self._running.clear()
            self._events.resume(None)
        self._running.append(_Pass(kind, self._records[kind], self._events.begin()))
        self.epoch += 1

    def end_pass(self, kind: PassKind = PassKind.TRAINING) -> bool:
        """End the pass and update its trace. Returns False if the pass was not predicted up to its end.

        Nothing happens if the innermost running pass is of another kind.
        """
        if not self._running or self._running[-1].kind is not kind:
            return False
        now = self._running.pop()
        # Evaluations make no gradients, so they do not count on the way to the next update.
        self._num_backwards += kind is not PassKind.EVALUATION
        # The events of the pass around this one go on with their own counts.
        self._events.resume(now.outside)
        self.epoch += 1
        # The touches end where the exception came. As a trace they would have the rest of the pass count as left out.
        if now.is_broken:
            return False
        if now.num_disordered > now.record.most_strays or not now.record.touches:
            # Where much came in another order, the old places of touches that this pass left out mean nothing, so they
            # are not merged in. The first pass of its kind is the trace as it is.
            now.record.set_trace(list(now.passed))
        elif now.num_strays or now.leaves_out or now.position < len(now.record.touches):
            now.record.learn(now.passed, strays=now.num_strays > 0)
        else:
            now.record.forget_misses()
        return now.follows

    def drop_pass(self) -> None:
        """Drop the running passes without an effect on their traces."""
        self._running.clear()
        self._events.resume(None)
        self.epoch += 1

    def break_pass(self) -> None:
        """A forward of the running pass failed, so its touches predict no other pass.

        The rest of the pass evicts the least recently used chunk, and the trace stays as it is.
        """
        for each in self._running:
            each.follows, each.is_broken = False, True
        self.epoch += 1

    def touches(self, kind: PassKind) -> Sequence[Touch]:
        """The trace of this kind of pass."""
        return self._records[kind].touches

    def note_update(self) -> None:
        """The optimizer updates the weights. The next update is expected after the same number of backwards."""
        self._expected_backwards, self._num_backwards = self._num_backwards, 0
        self.epoch += 1

    @property
    def kind(self) -> PassKind | None:
        """The kind of the running pass. None: no pass runs."""
        return self._running[-1].kind if self._running else None

    @property
    def follows(self) -> bool:
        """Whether the trace predicts the running pass."""
        return bool(self._running) and self._running[-1].follows

    @property
    def is_in_order(self) -> bool:
        """Whether all touches of the running pass so far are in the trace, in the same order. Some may be left out."""
        return self.follows and not self._running[-1].num_strays

    @property
    def recorded_position(self) -> int | None:
        """The place in the trace of a training pass that has been `is_in_order` so far; None in any other."""
        if not self._running:
            return None
        now = self._running[-1]
        return now.position if now.follows and not now.num_strays and now.kind is PassKind.TRAINING else None

    @property
    def places(self) -> Mapping[Touch, int]:
        """The place of each touch in the trace of the running pass. A new trace is a new object."""
        return self._running[-1].record.place if self._running else {}

    @property
    def num_passed(self) -> int:
        """The number of touches of the running pass so far."""
        return len(self._running[-1].passed) if self._running else 0

    @property
    def passed(self) -> Collection[Touch]:
        """The touches of the running pass so far, in order."""
        return self._running[-1].passed.keys() if self._running else ()

    def next_use(self, chunk: int) -> int:
        """The place of the next expected touch of `chunk`. Places of the next pass continue behind those of this one.

        If an update is expected before the next pass, chunks that it changes come after all others: their payloads will
        be outdated by then, so keeping them in slots saves nothing.
        """
        if not self._running:
            return 0
        now = self._running[-1]
        num_touches, uses = len(now.record.touches), now.record.uses.get(chunk)
        # Never used in a traced pass: beyond every place that the lines below return.
        if not uses:
            return 3 * num_touches
        # The first use at or behind the position is still to come in this pass.
        at = bisect_left(uses, now.position)
        if at < len(uses):
            return uses[at]
        # A pass is counted when it ends, so the running one is number `_num_backwards + 1`.
        is_last = now.kind is not PassKind.EVALUATION and self._num_backwards + 1 >= self._expected_backwards
        # With four micro-batches a chunk that is left in its slot serves the next forward after three of the four
        # backwards. After the fourth one the update makes it stale, while a frozen chunk stays usable.
        return (2 if is_last and chunk in self.outdated else 1) * num_touches + uses[0]

    def is_later(self, victim: int, chunk: int) -> bool:
        """Whether `victim` may leave for a chunk that is fetched ahead: it is used later than that one.

        Otherwise it would be fetched again before the other chunk is used, and nothing would be saved.
        """
        return self.next_use(victim) > self.next_use(chunk)

    def coming(self, count: int) -> list[int]:
        """The chunks of the next `count` expected touches. Empty if the pass is not predicted."""
        if not self.follows:
            return []
        now = self._running[-1]
        return [touch.chunk for touch in now.record.touches[now.position : now.position + count]]

    def rank(self, chunk: int) -> int:
        """The order of eviction: the chunk with the smallest rank leaves first, of equal ones the first in the model.

        While the pass is predicted that is the chunk with the farthest next use, else the least recently used one.
        """
        # A chunk without a touch was only gathered ahead. Its rank of -1 lets it leave before all chunks that were
        # used.
        predicts = self._running and self._running[-1].follows  # `follows`, without a call for each chunk in a slot
        return -self.next_use(chunk) if predicts else self._last_touch.get(chunk, -1)


# -- The schedule of one micro-batch: which operators run, which weights backward reads, and when gradients are made.
#
# A schedule refers to weights and operators by their places in `ModelSpec` and knows neither chunks nor ranks, so one
# schedule serves every plan of a model. `PassSchedule.expected` derives it from the module tree, before anything ran. A
# dry run of the plain module records the true one, with recomputations, tied weights and skipped operators.


class Act(Enum):
    """The kind of a moment.

    BEGIN: the model is called once more before the backward of its earlier calls.
    ENTER, LEAVE: an operator's forward begins and ends, recomputed forwards included.
    READ: an autograd node reads a weight that it has saved.
    GRADIENT: autograd has made a weight's gradient.
    """

    BEGIN = "begin"
    ENTER = "enter"
    LEAVE = "leave"
    READ = "read"
    GRADIENT = "gradient"


@dataclass(frozen=True, slots=True)
class Moment:
    """One moment of a schedule.

    Args:
        act: the kind.
        which: place in `ModelSpec` of an operator for BEGIN, ENTER and LEAVE, of a weight for READ and GRADIENT.
        task: nesting depth of the running backward, from 0; -1 in a forward.
        node: a number that identifies the autograd node of that backward.
        operator: for READ, the operator in whose forward the weight was saved.
    """

    act: Act
    which: int
    task: int = -1
    node: int = -1
    operator: int = -1


@dataclass(frozen=True)
class PassSchedule:
    """One forward and its backward, the same on all ranks and in every micro-batch."""

    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]

    @staticmethod
    def expected(spec: ModelSpec, recomputed: Sequence[str] = ()) -> PassSchedule:
        """The schedule of a model whose operators run in the order of the module tree, and backward in reverse.

        Backward reads what operators have behind the first one that is trained: its input, and that of all before it,
        needs no gradient. An operator with several weights uses them in their order, as fused experts do, so that the
        gradient of the last one comes before the one before is read. A tied weight's gradient comes with the first of
        its operators.

        recomputed: names of modules whose forward runs again before their backward (activation checkpointing).
        """
        first_user: dict[int, int] = {}
        for index, operator in enumerate(spec.operators):
            for weight in operator.weights:
                first_user.setdefault(weight, index)
        trained = (any(spec.weights[weight].trainable for weight in operator.weights) for operator in spec.operators)
        first_trained = next((index for index, is_trained in enumerate(trained) if is_trained), len(spec.operators))
        inside = _operators_inside(spec, recomputed)
        backward: list[Moment] = []
        for index, operator in reversed(list(enumerate(spec.operators))):
            # Backward reaches the last operator of a checkpointed module first, and runs the module's forward again.
            block = inside.get(index, [])
            # A block in front of everything that is trained has no backward, so it is not recomputed.
            if block and index == block[-1] >= first_trained:
                backward += _forward(spec, block, task=0, node=index)
            for weight in reversed(dict.fromkeys(operator.weights)):
                # A weight is read for the gradient of its operator's input, which nobody asks for at the first trained
                # operator.
                if index > first_trained:
                    backward.append(Moment(Act.READ, weight, 0, index, index))
                # A tied weight's gradient is there once autograd has added those of all its uses. Backward reaches the
                # first user last.
                if spec.weights[weight].trainable and first_user[weight] == index:
                    backward.append(Moment(Act.GRADIENT, weight, 0, index))
        return PassSchedule(tuple(_forward(spec, range(len(spec.operators)))), tuple(backward))


def _forward(spec: ModelSpec, indices: Iterable[int], task: int = -1, node: int = -1) -> list[Moment]:
    """The ENTER and LEAVE moments of these operators, parents first. An operator leaves after those inside it."""
    moments: list[Moment] = []
    path: list[int] = []
    for index in indices:
        # An operator that is not around the next one has returned before that one begins.
        while path and path[-1] not in spec.operators[index].ancestors:
            moments.append(Moment(Act.LEAVE, path.pop(), task, node))
        moments.append(Moment(Act.ENTER, index, task, node))
        path.append(index)
    return moments + [Moment(Act.LEAVE, index, task, node) for index in reversed(path)]


def _operators_inside(spec: ModelSpec, names: Sequence[str]) -> dict[int, list[int]]:
    """All operators in the same module, for each operator in one of the named modules."""
    wanted, groups = frozenset(names), dict[str, list[int]]()
    found: dict[int, list[int]] = {}
    for index, operator in enumerate(spec.operators):
        parts = operator.name.split(".")
        # From the outermost module inwards: where named modules are nested, the outermost one recomputes all operators
        # inside.
        above = (".".join(parts[: count + 1]) for count in range(len(parts)))
        block = next((name for name in above if name in wanted), None)
        if block is not None:
            # All operators of a block share one list, which is complete once the loop has ended.
            found[index] = groups.setdefault(block, [])
            found[index].append(index)
    return found
