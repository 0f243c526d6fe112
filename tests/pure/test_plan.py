"""Plans of models that are numbers only: budgets hold, the minimum is exact, and nothing but the input decides."""

import os
import pickle
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from benchmarks.llama import SIZES, Llama
from benchmarks.planning import NUMEL, spec_of
from gemini import BudgetError, FreeBytes, Kind, Plan, Settings, Tier, plan_model
from gemini.model.operators import specs_of
from gemini.placement.demand import Dtype, ModelSpec, OperatorSpec, WeightSpec
from gemini.placement.packing import step_cost
from gemini.placement.planning import replan
from gemini.placement.policy import link_bytes, moved_and_updated

DTYPES = [Dtype("float32", 4), Dtype("bfloat16", 2), Dtype("float16", 2), Dtype("float64", 8)]
POLICIES = ["auto", "cpu", "cuda"]


@st.composite
def specs(draw: st.DrawFn) -> ModelSpec:
    """Some operators inside others, some with weights of another, some compiled or chosen by data."""
    weights: list[WeightSpec] = []
    operators: list[OperatorSpec] = []
    path: list[int] = []
    dtypes = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=2))
    for place in range(draw(st.integers(1, 5))):
        own = []
        for _ in range(draw(st.integers(1, 3))):
            shape = draw(st.sampled_from([(), (7,), (256,), (16, 40), (0,), (60, 50)]))
            own.append(len(weights))
            dtype, trainable = draw(st.sampled_from(dtypes)), draw(st.sampled_from([True, True, False]))
            weights.append(WeightSpec(f"operator{place}.weight{len(own)}", shape, dtype, trainable))
        if draw(st.booleans()):
            own.append(draw(st.integers(0, len(weights) - 1)))  # tied, or its own again
        path = path[: draw(st.integers(0, len(path)))]
        flags = {flag: draw(st.booleans()) for flag in ("is_chosen", "edits_weights", "is_compiled")}
        operators.append(OperatorSpec(f"operator{place}", tuple(own), tuple(path), **flags))
        path.append(place)
    return ModelSpec(tuple(weights), tuple(operators))


@st.composite
def choices(draw: st.DrawFn) -> Settings:
    reuse = draw(st.booleans())
    accumulate = [None, torch.bfloat16] if reuse else [None, torch.float32, torch.float16]
    return Settings(
        shard_strategy=draw(st.sampled_from(["chunk", "bucket", "tensor"])),
        stage=draw(st.integers(0, 3)),
        tensor_placement_policy=draw(st.sampled_from(POLICIES)),
        reuse_fp16_shard=reuse,
        reduce_dtype=draw(st.sampled_from([None, torch.float32, torch.bfloat16])),
        accumulate_dtype=draw(st.sampled_from(accumulate)),
        chunk_size=draw(st.sampled_from([None, 256, 1024, 5000])),
    )


RANKS = st.integers(1, 3)


def plan_in(spec: ModelSpec, settings: Settings, ranks: int, budget: int | None) -> Plan:
    return plan_model(spec, replace(settings, model_data_memory=budget), ranks)


def resident_bytes(plan: Plan, *kinds: Kind) -> int:
    return sum(
        chunk.home_bytes[kind]
        for chunk, homes in zip(plan.demand.chunks, plan.placement.homes, strict=True)
        for kind, tier in homes.items()
        if tier is Tier.DEVICE and kind in kinds
    )


@examples(max_examples=60, deadline=None)
@given(specs(), choices(), RANKS, st.integers(0, 150))
def test_a_plan_never_passes_its_budget(spec: ModelSpec, settings: Settings, ranks: int, percent: int) -> None:
    free = plan_in(spec, settings, ranks, None)
    budget = free.device_bytes * percent // 100
    assert free.minimum_bytes is not None
    if budget >= free.minimum_bytes:
        plan = plan_in(spec, settings, ranks, budget)
        assert plan.device_bytes <= budget == plan.budget_bytes
        return
    with pytest.raises(BudgetError) as refused:
        plan_in(spec, settings, ranks, budget)
    assert (refused.value.tier, refused.value.budget_bytes) == ("device", budget)
    assert refused.value.needed_bytes == free.minimum_bytes


@examples(max_examples=60, deadline=None)
@given(specs(), choices(), RANKS)
def test_the_minimum_is_exact(spec: ModelSpec, settings: Settings, ranks: int) -> None:
    least = plan_in(spec, settings, ranks, None).minimum_bytes
    assert least is not None
    at_least = plan_in(spec, settings, ranks, least)
    assert at_least.device_bytes <= least == at_least.minimum_bytes
    if least:
        with pytest.raises(BudgetError) as refused:
            plan_in(spec, settings, ranks, least - 1)
        assert refused.value.needed_bytes == least


@examples(max_examples=60, deadline=None)
@given(specs(), choices(), RANKS, st.integers(0, 100), st.integers(0, 100))
def test_more_budget_never_leaves_less_on_the_device(
    spec: ModelSpec, settings: Settings, ranks: int, percent: int, more: int
) -> None:
    """With the same chunks: another chunk size has other paddings.

    Not of "auto", whose best order of purchases may be another one with more to spend: a whole chunk moves in then, and
    the parameters of two stay out. tests/pure/test_optimal_placement.py compares the bytes that travel.
    """
    assume(settings.tensor_placement_policy != "auto")
    free = plan_in(spec, settings, ranks, None)
    least = free.minimum_bytes
    assert least is not None
    span = max(0, free.device_bytes - least)
    budgets = least + span * percent // 100, least + span * (percent + more) // 100
    less, much = (plan_in(spec, settings, ranks, budget) for budget in budgets)
    assume(less.packing == much.packing)
    assert resident_bytes(less, Kind.PARAM) <= resident_bytes(much, Kind.PARAM)
    assert resident_bytes(less, *Kind) <= resident_bytes(much, *Kind)


@examples(max_examples=30, deadline=None)
@given(specs(), choices(), RANKS, st.data())
def test_a_change_of_what_is_trained_keeps_the_chunks_and_the_budget(
    spec: ModelSpec, settings: Settings, ranks: int, data: st.DataObject
) -> None:
    before = plan_in(spec, settings, ranks, None)
    trained = data.draw(st.lists(st.booleans(), min_size=len(spec.weights), max_size=len(spec.weights)))
    least = replan(before, trained, {}).minimum_bytes
    assert least is not None
    tight = replace(before, budget=replace(before.budget, device=least))
    after = replan(tight, trained, {})
    assert after.packing is before.packing and after.device_bytes <= least
    if least:
        with pytest.raises(BudgetError) as refused:
            replan(replace(before, budget=replace(before.budget, device=least - 1)), trained, {})
        assert refused.value.needed_bytes == least
    assert replan(before, before.trained, {}).placement == before.placement


LINE = ModelSpec(
    tuple(
        WeightSpec(f"layer{i}.{name}", (n,), DTYPES[0], True) for i in range(6) for name, n in (("w", 900), ("b", 30))
    ),
    tuple(OperatorSpec(f"layer{i}", (2 * i, 2 * i + 1), ()) for i in range(6)),
)


def test_live_readings_are_budgets_where_the_user_gave_none() -> None:
    free = FreeBytes(device=100_000, host=200_000)
    assert plan_model(LINE, Settings(), 1, free).budget_bytes == 70_000
    plan = plan_model(LINE, Settings(device_memory=80_000, host_memory="1MB"), 1, free)
    assert (plan.budget.device, plan.budget.host) == (56_000, 10**6)
    with pytest.raises(BudgetError) as refused:
        plan_model(LINE, Settings(tensor_placement_policy="cpu"), 1, FreeBytes(host=1000))
    assert refused.value.tier == "host" and refused.value.needed_bytes > refused.value.budget_bytes == 1000


def test_a_plan_is_a_value_that_depends_on_its_input_only() -> None:
    """In another process, where sets and dicts of strings have another order."""
    plan = plan_model(LINE, Settings(model_data_memory=20_000), 2)
    code = (
        "import pickle, sys; from gemini import plan_model; p = pickle.load(sys.stdin.buffer);"
        "sys.stdout.buffer.write(pickle.dumps(plan_model(p.spec, p.settings, p.world_size)))"
    )
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps(plan),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONHASHSEED": seed},
        check=True,
    )
    assert pickle.loads(done.stdout) == plan and plan.hash


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_explains_itself_with_its_own_numbers(policy: str, ranks: int) -> None:
    settings = Settings(tensor_placement_policy=policy, host_memory="1MB")
    least = plan_model(LINE, settings, ranks).minimum_bytes
    assert least is not None
    for budget in (None, least):
        plan = plan_in(LINE, settings, ranks, budget)
        words, found = plan.explain(), plan.packing.searched
        assert found is not None
        wanted = [
            f"12 weights are planned for {ranks} rank{'s' * (ranks > 1)} at stage 3",
            f"{len(plan.packing.chunks)} chunks of up to {plan.packing.chunk_bytes} bytes",
            f"{found.padding_bytes} bytes",
            f"{found.num_collectives} collectives",
            f"the device holds {plan.device_bytes} bytes",
            f"the host holds {plan.host_bytes} bytes",
            "no budget was set" if budget is None else f"the budget is {budget} bytes",
            f"minimum of model data on the device is {least} bytes",
        ]
        for tier in (Tier.DEVICE, Tier.HOST):
            line = next(line for line in words.splitlines() if line.startswith(f"At rest on the {tier}"))
            homes = list(zip(plan.demand.chunks, plan.placement.homes, strict=True))
            for kind, name in ((Kind.PARAM, "weights"), (Kind.GRAD, "gradients"), (Kind.OPTIM, "optimizer state")):
                num_bytes = sum(chunk.home_bytes[kind] for chunk, home in homes if home[kind] is tier)
                assert (f"{name} {num_bytes} bytes" in line) == bool(num_bytes), (line, kind)
        moved = sum(plan.predicted.bytes_by_link.values())
        assert ("In all, a step copies " in words) == bool(moved)
        wanted += [f"{num_bytes} bytes" for num_bytes in plan.predicted.bytes_by_link.values()]
        wanted += [f"{count} times" for count, _ in plan.predicted.exchanged.values()]
        if ranks == 1 and budget is None and policy != "cpu":
            wanted.append("Nothing moves in a step.")
        if policy == "cpu":
            wanted.append(f"Weights of {len(plan.packing.chunks)} chunks come from the host")
        if ranks == 2:
            wanted.append("are gathered from all ranks")
        missing = [each for each in wanted if each not in words]
        assert not missing, f"{missing} not in:\n{words}"


def test_an_explanation_says_what_would_lower_the_minimum() -> None:
    lowest = plan_model(LINE, Settings(), 1)
    for worse in (Settings(chunk_size=4096), Settings(tensor_placement_policy="cuda")):
        plan = plan_model(LINE, worse, 1)
        assert plan.minimum_bytes is not None and lowest.minimum_bytes is not None
        assert plan.minimum_bytes > lowest.minimum_bytes
        better = "chunk_size=None" if worse.chunk_size else "tensor_placement_policy='auto'"
        assert f"{better} would lower it to {lowest.minimum_bytes} bytes" in plan.explain()
    assert "No other chunk size and no other policy lowers it" in lowest.explain()
    assert f"the largest is 'layer0', with {lowest.demand.slot_bytes[0]} bytes" in lowest.explain()


HALF = Settings(tensor_placement_policy="static", offload_optim_frac=0.5)


@pytest.mark.parametrize(
    "settings",
    [Settings(model_data_memory=budget) for budget in (40_000, 47_500, 52_500)] + [HALF],
    ids=["40k", "47k", "52k", "half"],
)
def test_a_chunk_size_is_found_with_which_the_optimizers_state_fits_on_the_host_too(settings: Settings) -> None:
    """Smaller chunks leave more of the device to states, or are nearer to a fraction: less rests on the host."""
    rest = plan_model(LINE, settings, 1).host_bytes
    sizes = [replace(settings, chunk_size=size) for size in (256, 512, 1280)]
    least = min(plan_model(LINE, each, 1).predicted.host_peak for each in sizes)
    assert least < rest, "or the case shows nothing"
    assert plan_model(LINE, replace(settings, host_memory=least), 1).host_bytes <= least


@examples(max_examples=60, deadline=None)
@given(specs(), choices(), RANKS, st.integers(0, 100))
def test_no_chunk_with_states_on_the_host_would_fit_into_what_is_left(
    spec: ModelSpec, settings: Settings, ranks: int, percent: int
) -> None:
    settings = replace(settings, tensor_placement_policy="auto")
    free = plan_in(spec, settings, ranks, None)
    least = free.minimum_bytes
    assert least is not None
    budget = least + max(0, free.device_bytes - least) * percent // 100
    plan = plan_in(spec, settings, ranks, budget)
    demand = plan.demand
    left = (
        budget - plan.device_bytes - max(*demand.slot_bytes, *demand.gradient_slot_bytes)
    )  # which the last move frees
    for chunk, homes in zip(demand.chunks, plan.placement.homes, strict=True):
        kept_away = (Kind.MASTER, Kind.OPTIM) if chunk.is_frozen else ()
        on_host = sum(
            num_bytes
            for kind, num_bytes in chunk.home_bytes.items()
            if homes[kind] is Tier.HOST and kind not in kept_away
        )
        assert not on_host or on_host > left, (chunk, homes)


def test_a_small_chunk_moves_in_where_a_part_of_a_large_one_would_only_travel() -> None:
    """Room is left for the gradients of the large chunk, which would go to its update, or for all of the small one."""
    wide, half = Dtype("float64", 8), Dtype("bfloat16", 2)
    weights = (
        *(WeightSpec(f"wide{number}", (60, 50), wide, trainable=number == 0) for number in range(2)),
        *(WeightSpec(f"scalar{number}", (), wide, trainable=number == 1) for number in range(2)),
        *(WeightSpec(f"half{number}", (), half, trainable=True) for number in range(3)),
        WeightSpec("frozen", (60, 50), half, trainable=False),
    )
    parts = (((0, 1, 2), ()), ((3,), (0,)), ((4, 5, 6), ()), ((7,), ()))
    operators = tuple(OperatorSpec(f"operator{place}", *part) for place, part in enumerate(parts))
    plan = plan_in(ModelSpec(weights, operators), Settings(chunk_size=1024), 2, 170_772)
    (small,) = (index for index, chunk in enumerate(plan.packing.chunks) if "half0" in chunk.names)
    assert set(plan.placement.homes[small].values()) == {Tier.DEVICE}


def test_a_size_with_which_everything_fits_is_not_taken_at_any_price() -> None:
    """Forty chunks fit a device that ten do not, and are thirty more to launch collectives for."""
    spec, settings = spec_of(40), Settings(host_memory="1TB")
    whole = plan_model(spec, settings, world_size=2).device_bytes
    tight = replace(settings, model_data_memory=whole * 9 // 10)
    chosen = plan_model(spec, tight, world_size=2)
    fitting = plan_model(spec, replace(tight, chunk_size=NUMEL), world_size=2)
    assert not fitting.host_bytes
    costs = [step_cost(plan.demand, plan.placement, world_size=2) for plan in (chosen, fitting)]
    assert costs[0] < costs[1] / 2


def llama(device: str) -> Plan:
    """Of 1.3 B parameters, whose model data fits to a third."""
    with torch.device("meta"):
        module = Llama(SIZES["1.3B"]).bfloat16()
    numel = sum(parameter.numel() for parameter in module.parameters())
    settings = Settings(dtype=torch.bfloat16, device=device, model_data_memory=5 * numel)
    return plan_model(specs_of(module, settings, 1), settings, 1)


def test_with_an_accelerator_the_host_updates_less_and_a_payload_finds_a_slot_ahead() -> None:
    """On the CPU an update takes as long on either tier, and nothing runs beside a copy."""
    updated = {}
    for device in ("emulated", "cuda:0"):
        plan = llama(device)
        pairs = zip(plan.demand.chunks, plan.placement.homes, strict=True)
        updated[device] = sum(chunk.updated_numel for chunk, homes in pairs if homes[Kind.OPTIM] is Tier.HOST)
        # Neither so many chunks that launches take longer than copies, nor so few that nothing runs beside one.
        assert 2**25 < plan.packing.chunk_bytes < 2**28
    assert updated["cuda:0"] < updated["emulated"]
    assert plan.placement.num_slots[0] > plan.demand.min_slots[0]
    tight = replace(plan.placement, num_slots=plan.demand.min_slots)
    waiting, free = (moved_and_updated(plan.demand, it) - link_bytes(plan.demand, it) for it in (tight, plan.placement))
    assert waiting > free
