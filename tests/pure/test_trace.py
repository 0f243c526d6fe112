"""Traces: what earlier passes say of the one that runs, whatever that leaves out, adds, or has in between."""

from collections.abc import Callable, Collection, Sequence

from hypothesis import given
from hypothesis import strategies as st

from gemini.placement.next_use import Events, NextUse, PassKind, Phase, StepEvent, Touch, merged

numbers = st.lists(st.integers(0, 12), max_size=15, unique=True)
# operators of a model, each with its chunk, that a forward calls in this order, some of them more than once
calls = st.lists(st.integers(0, 5), min_size=1, max_size=12)


def touches(chunks: Sequence[int]) -> list[Touch]:
    return [Touch(StepEvent(chunk, Phase.FORWARD, 0), chunk) for chunk in chunks]


def is_part(some: Sequence[Touch], whole: Sequence[Touch]) -> bool:
    """`some` is what is left of `whole` when touches are taken out."""
    rest = iter(whole)
    return all(touch in rest for touch in some)


@given(numbers, numbers)
def test_two_passes_in_one_trace(one: list[int], other: list[int]) -> None:
    expected, passed = touches(one), touches(other)
    both = merged(expected, passed)
    assert is_part(passed, both)
    assert is_part([touch for touch in expected if touch not in passed], both)
    assert sorted(both) == sorted({*expected, *passed})
    assert merged(both, passed) == both


def test_what_is_new_comes_behind_what_was_before_it() -> None:
    assert merged(touches([0, 1, 2, 3]), touches([0, 7, 3])) == touches([0, 7, 1, 2, 3])
    assert merged(touches([0, 1, 2]), touches([2, 0])) == touches([1, 2, 0])


class Model:
    """Runs passes of operators whose chunk has their number, as a step does."""

    def __init__(self) -> None:
        self.events = Events()
        self.uses = NextUse(self.events)

    def run(
        self,
        called: Sequence[int],
        kind: PassKind = PassKind.TRAINING,
        frozen: Collection[int] = (),
        check: Callable[[], None] = lambda: None,
    ) -> bool:
        """A pass; its backward meets operators in reverse, but for frozen ones. True if it was predicted."""
        self.uses.begin_pass(kind)
        self.touch(called, Phase.FORWARD, check)
        if kind is PassKind.TRAINING:
            self.touch([each for each in reversed(called) if each not in frozen], Phase.BACKWARD, check)
        return self.uses.end_pass(kind)

    def touch(self, operators: Sequence[int], phase: Phase, check: Callable[[], None] = lambda: None) -> None:
        for operator in operators:
            self.events.reach(operator, phase)
            self.uses.touch(operator)
            check()

    def is_in_order(self) -> None:
        assert self.uses.is_in_order

    def trace(self) -> list[Touch]:
        self.uses.begin_pass()
        return sorted(self.uses.places, key=self.uses.places.__getitem__)


@given(calls, st.sets(st.integers(0, 5)), st.sets(st.integers(0, 5)))
def test_what_a_pass_leaves_out_shifts_no_other_event(called: list[int], idle: set[int], frozen: set[int]) -> None:
    """Experts without a token, blocks that are skipped, frozen parts: the whole pass is predicted, and the next one."""
    model = Model()
    model.run(called)
    before = model.trace()
    assert model.run([each for each in called if each not in idle], frozen=frozen, check=model.is_in_order)
    assert model.trace() == before
    assert model.run(called, check=model.is_in_order)


def test_the_next_use_is_behind_what_was_left_out() -> None:
    model = Model()
    model.run([0, 1, 2, 3])
    model.uses.begin_pass()
    model.touch([0, 3], Phase.FORWARD)  # touches are at places 0 to 3, then in reverse at 4 to 7
    assert [model.uses.next_use(chunk) for chunk in range(4)] == [7, 6, 5, 4]
    assert model.uses.coming(3) == [3, 2, 1]


@given(calls, calls)
def test_another_flow_is_predicted_from_the_second_time_on(one: list[int], other: list[int]) -> None:
    model = Model()
    model.run(one)
    model.run(other)
    assert model.run(other, check=model.is_in_order)


def test_flows_that_take_turns_are_predicted_both() -> None:
    """As where each batch goes to other experts."""
    model = Model()
    flows = [0, 1, 3, 5, 9], [0, 2, 3, 5, 9], [0, 1, 2, 4, 9]
    for flow in flows:
        model.run(flow)
    for _ in range(3):
        for flow in flows:
            assert model.run(flow, check=model.is_in_order)


def test_a_touch_that_no_pass_has_any_more_is_dropped() -> None:
    model = Model()
    model.run([0, 1, 2])
    for _ in range(7):
        model.run([0, 2])
    assert Touch(StepEvent(1, Phase.FORWARD, 0), 1) in model.trace(), "its expert may be idle"
    model.run([0, 2])
    assert [touch.chunk for touch in model.trace()] == [0, 2, 2, 0]


@given(calls, calls, calls)
def test_an_evaluation_has_a_trace_of_its_own(called: list[int], one: list[int], other: list[int]) -> None:
    """First, between steps, and between a forward and its backward, of whatever length."""
    model = Model()
    model.run(one, PassKind.EVALUATION)
    model.run(called)
    before = model.trace()
    model.run(other, PassKind.EVALUATION)
    assert model.run(other, PassKind.EVALUATION, check=model.is_in_order)
    model.touch(one, Phase.TOUCH)  # and what is outside of passes has none
    model.uses.begin_pass()
    model.touch(called, Phase.FORWARD, model.is_in_order)
    model.run(one, PassKind.EVALUATION)
    model.touch(called[::-1], Phase.BACKWARD, model.is_in_order)
    assert model.uses.end_pass()
    assert model.trace() == before


def test_a_second_backward_has_a_trace_of_its_own() -> None:
    model = Model()
    for step in range(3):
        assert model.run([0, 1, 2]) == (step > 0)
        model.uses.begin_pass(PassKind.BACKWARD)
        model.touch([2, 1], Phase.BACKWARD)
        assert not model.uses.is_in_order or step > 0
        assert model.uses.end_pass(PassKind.BACKWARD) == (step > 0)
    assert not model.uses.end_pass(PassKind.BACKWARD), "none runs"


def test_a_pass_with_little_of_the_trace_evicts_by_recency() -> None:
    model = Model()
    model.run([0, 1, 2, 3])
    model.uses.begin_pass()
    model.touch([4, 5, 6, 0], Phase.FORWARD)
    assert not model.uses.follows
    assert model.uses.coming(3) == []
    assert min([0, 4, 5, 6], key=model.uses.rank) == 4
