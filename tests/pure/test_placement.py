"""Sizes, policies, next use and the order of reductions: numbers in, numbers out."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gemini.errors import BudgetError
from gemini.placement.demand import ChunkDemand, Demand, Kind, Tier, format_bytes, parse_bytes
from gemini.placement.gradient_rules import ReductionOrder
from gemini.placement.next_use import Events, NextUse, Phase, StepEvent, Touch
from gemini.placement.policies import AutoPolicy, CpuPolicy, CudaPolicy, resolve_policy
from gemini.placement.policy import slots_for


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GB", 2 * 10**9),
        ("2GiB", 2 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("7B", 7),
        ("8G", 8 * 10**9),
        ("8Gi", 2**33),
        (5, 5),
        (None, None),
    ],
)
def test_sizes_are_read_as_written(text: object, num_bytes: int | None) -> None:
    assert parse_bytes(text, "device_memory") == num_bytes  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["2 gigs", "", "GiB", "-1GB", "1 GB!", float("inf"), 8.0, -5])
def test_a_bad_size_names_the_argument(text: object) -> None:
    with pytest.raises(ValueError, match="device_memory"):
        parse_bytes(text, "device_memory")  # type: ignore[arg-type]


def test_small_sizes_are_printed_exactly() -> None:
    assert format_bytes(9999) == "9999 B"
    assert format_bytes(3 * 2**29) == "1.5 GiB"


def demand(sizes: list[int], sharded: bool = False) -> Demand:
    """On one rank, or on one of two."""
    share = 2 if sharded else 1
    chunks = tuple(
        ChunkDemand(
            share * size, {Kind.PARAM: size, Kind.GRAD: size, Kind.OPTIM: 2 * size}, False, sharded, sharded, sharded
        )
        for size in sizes
    )
    largest = share * max(sizes)
    return Demand(chunks, (largest, 0), (min(2, len(sizes)), 0), (largest, 0), (2, 0), 0)


def demand_in_dtypes(chunks: list[tuple[int, int]], world_size: int) -> Demand:
    """On one of several ranks. chunks: elements of each rank's shard, and bytes of an element."""
    its = tuple(
        ChunkDemand(
            world_size * size * itemsize,
            {Kind.PARAM: size * itemsize, Kind.GRAD: size * itemsize, Kind.OPTIM: 8 * size},
            False,
            True,
            True,
            True,
            numel=world_size * size,
        )
        for size, itemsize in chunks
    )
    largest = max(chunk.payload_bytes for chunk in its)
    return Demand(its, (largest, 0), (2, 0), (largest, 0), (1, 0), 0, (max(chunk.numel for chunk in its), 0))


SIZES = st.lists(st.integers(1, 1000), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(SIZES, st.integers(0, 60_000), st.booleans())
def test_auto_never_passes_its_budget_and_uses_what_it_can(sizes: list[int], budget: int, sharded: bool) -> None:
    model = demand(sizes, sharded)
    try:
        placement = AutoPolicy().place(model, budget)
    except BudgetError:
        assert CpuPolicy().place(model, None).device_bytes(model) > 0
        return
    assert placement.device_bytes(model) <= budget
    everything = CudaPolicy().place(model, None)
    if budget >= everything.device_bytes(model):
        assert placement.host_bytes(model) == 0, "what fits is on the device"


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(0, 30_000))
def test_more_budget_never_moves_less_onto_the_device(sizes: list[int], budget: int) -> None:
    model = demand(sizes)
    try:
        less = AutoPolicy().place(model, budget)
    except BudgetError:
        return
    more = AutoPolicy().place(model, budget + 2000)
    params = [sum(p.homes[i][Kind.PARAM] is Tier.DEVICE for i in range(len(sizes))) for p in (less, more)]
    assert params[0] <= params[1]


@settings(max_examples=100, deadline=None)
@given(SIZES, st.integers(0, 60_000))
def test_a_chunks_master_lies_where_its_moments_do(sizes: list[int], budget: int) -> None:
    """An update reads both: one of them alone on the device would travel at every step."""
    halves = demand(sizes)
    chunks = [replace(chunk, home_bytes={**chunk.home_bytes, Kind.MASTER: 7}) for chunk in halves.chunks]
    model = replace(halves, chunks=tuple(chunks))
    try:
        placement = AutoPolicy().place(model, budget)
    except BudgetError:
        return
    assert all(homes[Kind.MASTER] is homes[Kind.OPTIM] for homes in placement.homes)
    assert placement.device_bytes(model) <= budget


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 10]), st.sampled_from([2, 4])), min_size=2, max_size=6),
    st.sampled_from([2, 4, 8]),
    st.floats(0, 1),
    st.floats(0, 1),
)
@example([(10, 2), (2, 2), (1, 2), (10, 2), (10, 2)], 2, 0.8, 0.6)  # kept slots are bought twice
@example([(3, 4), (3, 4), (3, 2), (1, 4), (10, 2)], 8, 0.75, 0.95)  # the budget keeps some out
def test_no_policy_passes_max_live_parameters_where_the_fewest_slots_keep_to_it(
    chunks: list[tuple[int, int]], world_size: int, of_elements: float, of_bytes: float
) -> None:
    """Whatever the budget, and however slots and kept slots were bought, of chunks of several sizes and dtypes."""
    free = demand_in_dtypes(chunks, world_size)
    least = slots_for(free, tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in free.chunks))
    few, most = least.live_numel(free), CudaPolicy().place(free, None)
    bound = few + int(of_elements * max(0, sum(chunk.numel for chunk in free.chunks) - few))
    model = replace(free, max_live_numel=bound)
    low, high = sorted(each.device_bytes(free) for each in (least, most))
    for policy in (CudaPolicy(), AutoPolicy()):
        try:
            placement = policy.place(model, low + int(of_bytes * (high - low)))
        except BudgetError:  # by the budget
            continue
        assert placement.live_numel(model) <= bound, policy.name


def test_what_is_left_is_kept_slots_first_in_order_of_use_then_slots_for_all() -> None:
    model = demand([10] * 8, sharded=True)
    all_kept = CudaPolicy().place(model, None).device_bytes(model)
    assert all_kept == 8 * (20 + 10 + 20) + 2 * 20, "payloads with homes inside, gradients, moments, gradient slots"
    everything_at_home = 8 * 40 + 2 * 20 + 2 * 20
    for spare, kept, slots in ((0, 0, 2), (9, 0, 2), (10, 1, 2), (29, 2, 2), (39, 3, 2), (40, 8, 0)):
        for policy in (AutoPolicy(), CudaPolicy()):
            placement = policy.place(model, everything_at_home + spare)
            assert (placement.kept, placement.num_slots[0]) == (frozenset(range(kept)), slots), (spare, policy.name)
    assert CpuPolicy().place(model, None).kept == frozenset(), "a home on the host is not in a slot"


def test_a_refusal_names_need_budget_and_knob() -> None:
    with pytest.raises(BudgetError, match=r"needs 4000 bytes.*2 slots.*budget is 3999 bytes.*model_data_memory"):
        CpuPolicy().place(demand([1000] * 5), 3999)


def test_policies_are_found_by_name_or_taken_as_objects() -> None:
    assert resolve_policy("cpu").name == "cpu"
    own = CpuPolicy()
    assert resolve_policy(own) is own
    with pytest.raises(ValueError, match="auto"):
        resolve_policy("gpu")
    with pytest.raises(TypeError, match="place"):
        resolve_policy(object())  # type: ignore[arg-type]


def run_pass(uses: NextUse, events: Events, touches: list[int], num_slots: int) -> int:
    """Fetches of one pass through a cache of `num_slots`."""
    uses.begin_pass()
    fetches = 0
    for chunk in touches:
        events.reach(chunk, Phase.FORWARD)
        uses.touch(chunk)
        if chunk not in CACHE:
            fetches += 1
            if len(CACHE) == num_slots:
                CACHE.remove(min(sorted(CACHE), key=uses.rank))
            CACHE.append(chunk)
    uses.end_pass()
    return fetches


CACHE: list[int] = []


def test_the_predicted_victim_is_the_one_used_last() -> None:
    """Forward and backward over six layers with three slots: recency misses twelve times less one, next use less."""
    CACHE.clear()
    uses = NextUse(events := Events())
    touches = [0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1, 0]
    first = run_pass(uses, events, touches, 3)
    later = [run_pass(uses, events, touches, 3) for _ in range(3)]
    assert first == 9
    assert max(later) <= 6 + 6 - 3 - 3, "the end of one pass is the start of the next"


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.lists(st.integers(0, 5), min_size=1, max_size=30))
def test_a_different_pass_is_noticed_and_recorded_anew(one: list[int], other: list[int]) -> None:
    uses = NextUse(events := Events())
    for touches in (one, other):
        uses.begin_pass()
        for chunk in touches:
            events.reach(chunk, Phase.FORWARD)
            uses.touch(chunk)
        uses.end_pass()
    uses.begin_pass()
    for chunk in other:
        events.reach(chunk, Phase.FORWARD)
        uses.touch(chunk)
        assert uses.is_in_order
    assert uses.end_pass()


def test_reductions_follow_the_slowest_rank() -> None:
    order = ReductionOrder([0, 1, 2, 3])
    assert order.order == (3, 2, 1, 0), "before anything is known, backward is taken to meet the last chunk first"
    touches = [Touch(StepEvent(at, Phase.BACKWARD, 0), 0) for at in range(9)]
    order.adopt([7, 9, 4, -1], [1, 2, 0, 4], touches)
    assert order.points == {0: touches[7], 2: touches[4]}, "none without a gradient, nor after all touches"
    assert order.order == (2, 0, 1), "in every backward, so only what every rank completes"
    order.begin({touch: place for place, touch in enumerate(touches)})
    assert [order.due(position) for position in range(10)] == [[], [], [], [], [], [2], [], [], [0], []]
    order.begin({touch: 2 * place for place, touch in enumerate(touches)})
    assert order.due(16) == [2, 0], "touches that a pass left out are behind it"
    order.adopt([-1, -1, 3, -1], [4, 4, 0, 4], touches)
    assert order.points == {0: touches[7], 2: touches[3]}, "an idle chunk keeps its point"
    order.begin({touches[7]: 0})
    assert order.points is None, "a point that the trace has dropped is recorded again"
