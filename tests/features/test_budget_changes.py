"""`change_budgets()` between steps: states move to where they rest under other budgets; training keeps its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gemini import BudgetError, DivergenceError, EmulatedDevice, GeminiError, ShardedModel, ShardedOptimizer
from tests.harness.machine import host_with
from tests.harness.on_ranks import in_soak, on_ranks
from tests.zoo.mlp import adam, build, loss_of, placed, train_step, train_while, weights_of

OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "reuse": {"dtype": torch.float16, "reuse_fp16_shard": True},
    "stage-0": {"stage": 0},
    "stage-1": {"stage": 1, "dtype": torch.bfloat16},
    "stage-2": {"stage": 2},
}
STEPS = 6
Between = Callable[[int, ShardedModel], None]


def trainer(options: str, **arguments: Any) -> tuple[ShardedModel, ShardedOptimizer]:
    model = ShardedModel(build(), **placed(**OPTIONS[options], **arguments))
    return model, ShardedOptimizer(model, adam(model.parameters()), initial_scale=8.0)


def train(options: str, rank: int, between: Between | None = None) -> tuple[list[float], int]:
    return train_while(*trainer(options), rank, between, STEPS, OPTIONS[options].get("dtype"))


def on_device(model: ShardedModel) -> int:
    return model.chunk_manager.memory.device.ledger.total_bytes


@on_ranks(1, 2)
@pytest.mark.parametrize("options", ["fp32", "bf16", *in_soak("reuse", "stage-0", "stage-1", "stage-2")])
def test_states_follow_other_budgets_and_training_has_the_same_bits(rank: int, world_size: int, options: str) -> None:
    """Everything fits, then nearly nothing, then a part, then everything again."""
    full = []

    def change(step: int, model: ShardedModel) -> None:
        if step == 0:
            full.append(on_device(model))
        least = model.plan.minimum_bytes
        assert least is not None
        budget = [least, (least + full[0]) // 2, full[0], least, None, None][step]
        model.change_budgets(model_data_memory=budget)
        assert model.plan.budget_bytes == model.chunk_manager.memory.device.capacity_bytes == budget
        assert model.settings.model_data_memory == budget
        if budget is not None:
            assert on_device(model) <= budget, model.memory_report()
        is_on_host = any("host" in homes.values() for homes in model.plan.placement.homes)
        assert is_on_host == (budget is not None and budget < full[0])

    assert train(options, rank, change) == train(options, rank)


@pytest.mark.parametrize("activation_bytes", [1_000, 28_000])
def test_more_of_the_host_leaves_the_device_as_it_is(activation_bytes: int) -> None:
    """What steps have shown of their activations holds for the budget of the device, which is not named."""
    device = EmulatedDevice(60_000, activation_bytes=activation_bytes)
    model = ShardedModel(build(), device=device, chunk_size=512)
    optimizer = ShardedOptimizer(model, adam(model.parameters()))
    for step in range(3):
        train_step(model, optimizer, step)
    before = model.plan
    model.change_budgets(host_memory=10**9)
    assert model.plan.budget.host == 10**9
    assert (model.plan.budget.device, model.plan.placement) == (before.budget.device, before.placement)
    model.change_budgets(device_memory=55_000)
    assert model.plan.budget.host == 10**9
    assert model.plan.budget.device == 55_000 - int(1.1 * activation_bytes + 0.03 * 55_000)


@settings(max_examples=8, deadline=None)
@given(budgets=st.lists(st.floats(0.0, 1.2), min_size=STEPS, max_size=STEPS))
def test_no_sequence_of_budgets_changes_a_bit(budgets: list[float]) -> None:
    def change(step: int, model: ShardedModel) -> None:
        least = model.plan.minimum_bytes
        assert least is not None
        model.change_budgets(model_data_memory=least + int(budgets[step] * 16 * 6 * 512))

    assert train("bf16", 0, change) == train("bf16", 0)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("options", ["bf16", "reuse"])
def test_sums_of_micro_batches_make_room_where_no_state_has_to_move(rank: int, world_size: int, options: str) -> None:
    """They are no part of the plan, which fits as it is."""
    dtype = OPTIONS[options]["dtype"]

    def change(step: int, model: ShardedModel) -> None:
        if step == 3:  # two micro-batches, in the step before, too
            plan = model.plan
            assert on_device(model) > plan.device_bytes
            model.change_budgets(model_data_memory=plan.device_bytes)
            assert model.plan.placement == plan.placement
        budget = model.plan.budget_bytes
        assert budget is None or on_device(model) <= budget, model.memory_report()

    changed = train_while(*trainer(options, model_data_memory=10**6), rank, change, STEPS, dtype)
    assert changed == train(options, rank)


@on_ranks(1, 2)
def test_the_host_may_get_less_where_the_device_gets_more(rank: int, world_size: int) -> None:
    """In one call, although what moves is on both for a moment."""
    model, _optimizer = trainer("fp32", tensor_placement_policy="auto", model_data_memory="smallest")
    train_step(model, _optimizer, rank)
    host = model.plan.host_bytes
    assert host > 0
    model.change_budgets(host_memory=host)
    model.change_budgets(host_memory=0, model_data_memory=10**6)
    assert model.plan.host_bytes == 0
    train_step(model, _optimizer, rank)
    with pytest.raises(BudgetError, match=r"^budgets: .*model_data_memory=.*\. This does not fit: host: "):
        model.change_budgets(model_data_memory=model.plan.minimum_bytes)
    assert model.plan.host_bytes == 0, "nothing has changed"
    train_step(model, _optimizer, rank)
    model.close()


@on_ranks(1, 2)
def test_a_budget_that_is_too_small_is_refused_with_the_least_and_nothing_changes(rank: int, world_size: int) -> None:
    model, optimizer = trainer("fp32")
    train_step(model, optimizer, rank)
    before, plan, held = weights_of(model), model.plan, on_device(model)
    least = plan.minimum_bytes
    assert least is not None
    with pytest.raises(BudgetError, match=rf"needs {least} bytes .*the budget is {least - 1} bytes") as refused:
        model.change_budgets(model_data_memory=least - 1)
    assert (refused.value.tier, refused.value.needed_bytes) == ("device", least)
    assert (model.plan, on_device(model)) == (plan, held)
    assert all(torch.equal(value, before[name]) for name, value in weights_of(model).items())
    model.change_budgets(model_data_memory=least)
    train_step(model, optimizer, rank)
    model.close()


def test_budgets_change_between_steps_only() -> None:
    model, _optimizer = trainer("fp32")
    loss_of(model).backward()
    with pytest.raises(GeminiError, match=r"^change_budgets\(\) between backward\(\) and step\(\): do it after step"):
        model.change_budgets(model_data_memory=10**6)
    model.zero_grad()
    seen = []

    def inside(module: Any, given: Any, output: Any) -> None:
        with pytest.raises(GeminiError, match=r"^change_budgets\(\) inside a forward or backward"):
            model.change_budgets(model_data_memory=10**6)
        seen.append(1)

    handle = model.module.layers[0].register_forward_hook(inside)
    loss_of(model)
    handle.remove()
    assert seen
    model.change_budgets(model_data_memory=10**6)
    assert model.plan.budget_bytes == 10**6


def test_a_bad_budget_is_an_error_that_names_it() -> None:
    model, _optimizer = trainer("fp32")
    with pytest.raises(TypeError, match=r"^change_budgets\(\) has no argument 'memory'; the nearest valid name is"):
        model.change_budgets(memory=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="host_memory"):
        model.change_budgets(host_memory="8 gigs")
    with pytest.raises(ValueError, match=r"^model_data_memory=2000 is more than device_memory=1000$"):
        model.change_budgets(model_data_memory=2000, device_memory=1000)


@on_ranks(2)
def test_ranks_that_name_other_budgets_are_told(rank: int, world_size: int) -> None:
    model, optimizer = trainer("fp32")
    with pytest.raises(DivergenceError, match="change of budgets"):
        model.change_budgets(model_data_memory=10**6 + rank)
    assert model.plan.budget_bytes is None
    train_step(model, optimizer, rank)
    model.close()


def test_what_was_offloaded_comes_back_under_the_budget_of_now() -> None:
    model, optimizer = trainer("fp32")
    train_step(model, optimizer)
    model.offload_states()
    least = model.plan.minimum_bytes
    assert least is not None
    model.change_budgets(model_data_memory=least)
    train_step(model, optimizer)
    assert 0 < on_device(model) <= least


@on_ranks(1, 2)
def test_host_memory_that_was_freed_since_wrapping_is_there_for_another_budget(rank: int, world_size: int) -> None:
    """A model wrapped beside a loaded checkpoint, whose weights have to leave the device later."""
    with host_with(1000 * world_size):
        model = ShardedModel(build(), **placed())
    before = model.plan.budget.host
    with host_with(10**9):
        model.change_budgets(model_data_memory=model.plan.packed_minimum_bytes)
    assert before is not None and before < model.plan.host_bytes <= (model.plan.budget.host or 0)
