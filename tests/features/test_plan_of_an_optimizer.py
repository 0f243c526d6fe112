"""A plan counts what the optimizer keeps: bytes and peaks of SGD, of SGD with momentum and of Adam with three states.

Until an optimizer is made a plan counts Adam's two states per element. Then it counts the optimizer's own, and follows
states that come later.
"""

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gemini import BudgetError, DivergenceError, ShardedModel, ShardedOptimizer, Tier, estimate_memory
from gemini.placement.demand import Kind
from gemini.placement.planning import replan
from gemini.placement.policy import link_bytes
from tests.harness.on_ranks import on_ranks
from tests.harness.predicted import Measured, Peaks, differences, measure
from tests.zoo import mlp

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

KEEPS: dict[str, tuple[int, Make]] = {
    "sgd": (0, lambda weights: torch.optim.SGD(weights, lr=0.1)),
    "momentum": (1, lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9)),
    "amsgrad": (3, lambda weights: torch.optim.Adam(weights, lr=0.01, amsgrad=True)),
}
WRAPS: list[dict[str, Any]] = [
    {},
    {"model_data_memory": 20000},
    {"model_data_memory": 30000, "dtype": torch.bfloat16},
    {"model_data_memory": 0.5, "stage": 2},
    {"tensor_placement_policy": "cpu", "stage": 1, "dtype": torch.bfloat16},
    {"model_data_memory": 30000, "gpu_margin_mem_ratio": 0.5, "stage": 0},
]
STATE_BYTES = 4 * mlp.LAYERS * mlp.CHUNK_NUMEL  # of one state of all weights


def wrapped(world_size: int = 1, **wrap: Any) -> ShardedModel:
    """model_data_memory below 1: that part of what lies between the least and everything."""
    wrap = {"chunk_size": mlp.CHUNK_NUMEL, **wrap}
    part = wrap.get("model_data_memory")
    if part is not None and part < 1:
        del wrap["model_data_memory"]
        plan = estimate_memory(mlp.build(), world_size=world_size, **wrap).plan
        wrap["model_data_memory"] = int(plan.minimum_bytes + part * (plan.device_bytes - plan.minimum_bytes))
    return ShardedModel(mlp.build(), device="emulated", rank_timeout=60, **wrap)


def held(model: ShardedModel) -> dict[Tier, int]:
    """Bytes of optimizer state, by tier."""
    tiers = zip((Tier.DEVICE, Tier.HOST), model.chunk_manager.memory.tiers, strict=True)
    return {tier: memory.ledger.bytes_by_kind[Kind.OPTIM] for tier, memory in tiers}


def planned(model: ShardedModel) -> dict[Tier, int]:
    plan = model.plan
    return {tier: plan.placement.bytes_by_kind(plan.demand, tier)[Kind.OPTIM] for tier in (Tier.DEVICE, Tier.HOST)}


def train(model: ShardedModel, optimizer: Any, step: int, rank: int = 0) -> None:
    optimizer.backward(mlp.loss_of(model, 10 * step + rank, model.plan.settings.dtype))
    optimizer.step()


def steps(model: ShardedModel, optimizer: Any, numbers: range, rank: int, world_size: int) -> list[Measured]:
    peaks = Peaks(model)
    return [measure(model, peaks, world_size, partial(train, model, optimizer, step, rank)) for step in numbers]


@pytest.mark.sampled(8)
@on_ranks(1, 2)
@pytest.mark.parametrize("wrap", WRAPS, ids=lambda wrap: "-".join(map(str, wrap.values())) or "no budget")
@pytest.mark.parametrize("name", KEEPS)
def test_bytes_and_peaks_of_a_step_are_as_predicted(
    rank: int, world_size: int, name: str, wrap: dict[str, Any]
) -> None:
    model = wrapped(world_size, **wrap)
    optimizer = ShardedOptimizer(model, KEEPS[name][1](model.parameters()))
    kept = KEEPS[name][0] * STATE_BYTES // (1 if wrap.get("stage") == 0 else world_size)
    assert held(model) == planned(model) and sum(held(model).values()) == kept
    measured = steps(model, optimizer, range(4), rank, world_size)
    assert differences([model.plan.predicted] * 2, measured[2:]) == []
    for parameter in list(model.parameters())[-4:]:
        parameter.requires_grad_(False)
    steps(model, optimizer, range(4, 6), rank, world_size)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    measured = steps(model, optimizer, range(6, 10), rank, world_size)
    assert differences([model.plan.predicted] * 2, measured[2:]) == []
    assert held(model) == planned(model) and sum(held(model).values()) == kept
    model.close()


@pytest.mark.parametrize("name", KEEPS)
def test_nearly_all_of_a_budget_is_used_whatever_the_optimizer_keeps(name: str) -> None:
    """Or everything is on the device. Chunks are small: the search may not choose others once an optimizer comes."""
    chance = random.Random(name)
    module = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(48)))
    wrap: dict[str, Any] = {"chunk_size": 256, "device": "emulated"}
    least = estimate_memory(module, **wrap).plan.minimum_bytes
    assert least is not None
    for _ in range(6):
        budget = chance.randrange(20 * 1024, 4 * (4 + KEEPS[name][0]) * 48 * 256)
        model = ShardedModel(nn.Sequential(*map(_copy, module)), **wrap, model_data_memory=budget)
        optimizer = ShardedOptimizer(model, KEEPS[name][1](model.parameters()))
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        device, host = model.chunk_manager.memory.tiers
        assert device.ledger.total_bytes == model.plan.device_bytes <= budget
        assert host.ledger.total_bytes == model.plan.host_bytes
        assert not model.plan.host_bytes or model.plan.device_bytes >= 0.95 * budget, (budget, model.plan.device_bytes)


def _copy(layer: nn.Module) -> nn.Module:
    copy = nn.Linear(16, 16, bias=False)
    copy.load_state_dict(layer.state_dict())
    return copy


def test_a_device_without_a_bound_keeps_three_states_where_the_host_has_no_room() -> None:
    model = wrapped(host_memory=0)
    optimizer = ShardedOptimizer(model, KEEPS["amsgrad"][1](model.parameters()))
    (measured,) = steps(model, optimizer, range(1), 0, 1)
    assert held(model) == {Tier.DEVICE: 3 * STATE_BYTES, Tier.HOST: 0} and measured.links == {}
    assert f"optimizer state {3 * STATE_BYTES} bytes" in model.plan.explain()


def test_what_is_said_of_a_plan_names_no_state_that_there_is_not() -> None:
    model = wrapped(model_data_memory=20000)
    assert "optimizer state" in model.plan.explain(), "of Adam's, until an optimizer is made"
    ShardedOptimizer(model, KEEPS["sgd"][1](model.parameters()))
    assert "optimizer state" not in model.plan.explain()


def test_an_optimizer_that_keeps_less_than_adam_trains_where_adam_would_not_fit() -> None:
    """The policy "cuda" puts all on the device. The plan that the model is wrapped with is one for inference."""
    sgd_bytes = 2 * STATE_BYTES
    model = wrapped(model_data_memory=sgd_bytes + 1000, tensor_placement_policy="cuda")
    assert model.plan.infers
    optimizer = ShardedOptimizer(model, KEEPS["sgd"][1](model.parameters()))
    measured = steps(model, optimizer, range(3), 0, 1)
    assert model.plan.device_bytes == sgd_bytes
    assert differences([model.plan.predicted], measured[2:]) == []


def test_a_refusal_names_what_this_optimizer_needs() -> None:
    """Not what Adam would need, for which the model was refused when it was wrapped."""
    model = wrapped(model_data_memory=3 * STATE_BYTES, tensor_placement_policy="cuda")
    with pytest.raises(BudgetError) as refused:
        ShardedOptimizer(model, KEEPS["amsgrad"][1](model.parameters()))
    assert refused.value.needed_bytes == 5 * STATE_BYTES


@pytest.mark.parametrize("dtype", [None, torch.float16], ids=["fp32", "fp16"])
def test_an_update_without_state_runs_where_it_moves_fewest_bytes(dtype: torch.dtype | None) -> None:
    """No memory is the price of either tier."""
    plan = estimate_memory(mlp.build(), chunk_size=mlp.CHUNK_NUMEL, dtype=dtype, model_data_memory=30000).plan
    for budget in range(plan.minimum_bytes or 0, 40000, 1000):
        for ratio in (None, 0.5):
            settings = replace(plan.settings, gpu_margin_mem_ratio=ratio)
            device = replace(plan.budget, device=budget)
            after = replan(plan, plan.trained, {}, settings=settings, budget=device, optim_states=[0] * 6)
            moved = link_bytes(after.demand, after.placement)
            for index, homes in enumerate(after.placement.homes):
                for tier in (Tier.DEVICE, Tier.HOST):
                    others = [*after.placement.homes]
                    others[index] = {**homes, Kind.OPTIM: tier}
                    assert link_bytes(after.demand, replace(after.placement, homes=tuple(others))) >= moved


def test_another_plan_counts_as_many_states_as_the_one_before() -> None:
    """As where model data makes room before an optimizer that just comes is the model's."""
    plan = estimate_memory(mlp.build(), chunk_size=mlp.CHUNK_NUMEL).plan
    other = replan(plan, plan.trained, {}, optim_states=[1, 1, 1, 0, 0, 3])
    again = replan(other, other.trained, {}, budget=replace(plan.budget, device=20000))
    assert [chunk.optim_states for chunk in again.demand.chunks] == [1, 1, 1, 0, 0, 3]
    assert again.demand.chunks == other.demand.chunks != plan.demand.chunks


@pytest.mark.parametrize("infers", [False, True], ids=["trains", "inferred before"])
def test_an_adam_of_all_weights_changes_no_plan(infers: bool) -> None:
    model = wrapped(model_data_memory=20000)
    before = model.plan
    if infers:
        with torch.no_grad():
            model(mlp.inputs(0))
        assert model.plan.infers
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    train(model, optimizer, 0)
    assert model.plan.placement == before.placement and (infers or model.plan is before)


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("budget", [None, 14000, 20000])
def test_a_plan_follows_momentum_that_is_raised_from_0(rank: int, world_size: int, budget: int | None) -> None:
    """The step that makes it finds room beside the plan; at the next forward the plan has room for it."""
    model, plain = wrapped(model_data_memory=budget), mlp.build()
    optimizers: list[Any] = [KEEPS["sgd"][1](model.parameters()), KEEPS["sgd"][1](plain.parameters())]
    optimizers[0] = ShardedOptimizer(model, optimizers[0])
    losses: list[list[Tensor]] = [[], []]
    for step in range(7):
        for module, optimizer, its in zip((model, plain), optimizers, losses, strict=True):
            if step == 3:
                optimizer.param_groups[0]["momentum"] = 0.9
            loss = mlp.loss_of(module, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            its.append(loss.detach())
    if world_size == 1:
        assert losses[0] == losses[1]
    assert held(model) == planned(model) and sum(held(model).values()) == STATE_BYTES // world_size
    measured = steps(model, optimizers[0], range(7, 9), rank, world_size)
    assert differences([model.plan.predicted] * 2, measured) == []
    model.close()


def test_momentum_that_no_plan_counted_takes_no_room_of_slots() -> None:
    """Gradients are written without a forward: slots have not taken their memory when the step makes the momentum."""
    model = wrapped(model_data_memory=20000)
    optimizer = ShardedOptimizer(model, KEEPS["sgd"][1](model.parameters()))
    train(model, optimizer, 0)
    model.chunk_manager.give_room()
    optimizer.param_groups[0]["momentum"] = 0.9
    for parameter in model.parameters():
        parameter.grad = torch.ones(parameter.shape)
    optimizer.step()
    assert held(model) == {Tier.DEVICE: 0, Tier.HOST: STATE_BYTES}
    for step in range(1, 4):
        train(model, optimizer, step)
    assert held(model) == planned(model)


@pytest.mark.parametrize("budget", [None, 20000])
def test_a_plan_follows_states_that_are_loaded(budget: int | None) -> None:
    source = wrapped()
    saving = ShardedOptimizer(source, KEEPS["momentum"][1](source.parameters()))
    train(source, saving, 0)
    saved = saving.state_dict()
    model = wrapped(model_data_memory=budget)
    model.load_state_dict(source.state_dict())
    optimizer = ShardedOptimizer(model, KEEPS["sgd"][1](model.parameters()))
    optimizer.load_state_dict(saved)
    assert held(model) == planned(model) and sum(held(model).values()) == STATE_BYTES
    measured = steps(model, optimizer, range(1, 4), 0, 1)
    assert differences([model.plan.predicted] * 2, measured[1:]) == []
    for step in range(1, 4):
        train(source, saving, step)
    mlp.assert_same(mlp.weights_of(model), mlp.weights_of(source))


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.parametrize("budget", [None, 20000])
def test_a_plan_follows_param_groups_that_are_added(rank: int, world_size: int, budget: int | None) -> None:
    """What is in no group yet has no state; another group needs another number of states."""
    model = wrapped(model_data_memory=budget)
    weights = list(model.parameters())
    optimizer = ShardedOptimizer(model, torch.optim.SGD(weights[:4], lr=0.1, momentum=0.9))
    assert held(model) == planned(model) and sum(held(model).values()) == STATE_BYTES // 3 // world_size
    optimizer.add_param_group({"params": weights[4:], "lr": 0.5})
    assert held(model) == planned(model) and sum(held(model).values()) == STATE_BYTES // world_size
    measured = steps(model, optimizer, range(4), rank, world_size)
    assert differences([model.plan.predicted] * 2, measured[2:]) == []
    model.close()


@on_ranks(2)
@pytest.mark.parametrize("infers", [False, True], ids=["trains", "inferred before"])
def test_ranks_with_other_optimizers_are_told_so(rank: int, world_size: int, infers: bool) -> None:
    model = wrapped(model_data_memory=10**6)
    if infers:
        with torch.no_grad():
            model(mlp.inputs(0))
    with pytest.raises(DivergenceError):
        ShardedOptimizer(model, (mlp.adam if rank else KEEPS["sgd"][1])(model.parameters()))
