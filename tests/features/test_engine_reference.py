"""An engine beside REF: losses, gradient norms and learning rates of every step, and the weights at the end."""

from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import deepspeed
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.harness.reference import Recipe, train_plain
from tests.harness.runs import Run, assert_equal_runs, wanted_on
from tests.zoo.models import MODELS

CASE = MODELS["tied"]
RECIPE: dict[str, Any] = {"steps": 5, "accumulation": 3, "clip": 0.05, "lr": 1e-2, "weight_decay": 0.1}
CONFIG: dict[str, Any] = {
    "device": "emulated",
    "rank_timeout": 60.0,
    "optimizer": {"type": "HybridAdam", "params": {"lr": 1e-2, "weight_decay": 0.1}},
    "gradient_accumulation_steps": 3,
    "clip_grad_norm": 0.05,
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "CosineAnnealingLR": {"T_max": 4},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 8, "cycle_momentum": False},
    "WarmupLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3},
}
WARMED = [0.0, 0.0, 0.006309297535714575, 0.01, 0.01]  # as DeepSpeed's documentation has it: log(step) / log(3)


def rates_of(name: str) -> list[float]:
    """The rates of the plain schedule over a plain optimizer."""
    if name == "WarmupLR":
        return WARMED
    optimizer = HybridAdam([nn.Parameter(torch.zeros(1))], lr=1e-2)
    schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **SCHEDULES[name])
    found = []
    for _ in range(RECIPE["steps"]):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.sampled(4)
@on_ranks(1, 2)
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("form", ["colossal", "deepspeed"])
def test_accumulation_clipping_and_rates_are_those_of_plain_pytorch_at_every_step(
    rank: int, world_size: int, form: str, name: str
) -> None:
    rates = rates_of(name)
    recipe = Recipe(world_size=world_size, lr_at=lambda step: rates[step] / 1e-2, **RECIPE)
    config = {**CONFIG, "scheduler": {"type": name, "params": SCHEDULES[name]}}
    initialize = gemini.initialize if form == "colossal" else deepspeed.initialize
    engine, *_ = initialize(model=CASE.build(None), config={**config, "chunk_size": CASE.chunk_numel})
    losses, norms, found = [], [], []
    for step in range(recipe.steps):
        found.append(engine.optimizer.param_groups[0]["lr"])
        for micro in range(recipe.accumulation):
            losses.append(recipe.rank_losses(CASE, engine.model, step, rank, micro))
            engine.backward(losses[-1])
            engine.step()
        norms.append(torch.tensor(engine.grad_norm))
    state = engine.state_dict()
    got = Run(
        losses=torch.stack(losses).detach().view(recipe.steps, 1, recipe.accumulation),
        norms=norms,
        weights={weight: state[weight] for weight, _ in engine.module.named_parameters()},
    )
    assert found == pytest.approx(rates, rel=1e-12, abs=1e-15)
    assert min(norms) > recipe.clip, "every step was clipped"
    wanted = wanted_on(rank, train_plain(CASE, lr_at=recipe.lr_at, world_size=world_size, **RECIPE))
    assert_equal_runs(got, wanted)


@on_ranks(1, 2)
def test_an_engine_reduces_the_windows_sum_once_in_no_sync(rank: int, world_size: int) -> None:
    """And says what losses are multiplied by."""
    engine, its = (
        gemini.initialize(CASE.build(None), config={**CONFIG, "gradient_accumulation_steps": 2}, verbose=False)[0]
        for _ in range(2)
    )
    recipe = Recipe(world_size=world_size)
    sent = []
    for each in (engine, its):
        before = each.communicator.collectives.bytes_sent
        if each is engine:
            with engine.no_sync():
                each.backward(recipe.rank_losses(CASE, each.model, 0, rank, 0))
        else:
            each.backward(recipe.rank_losses(CASE, each.model, 0, rank, 0))
        each.step()
        each.backward(recipe.rank_losses(CASE, each.model, 0, rank, 1))
        each.step()
        sent.append(each.communicator.collectives.bytes_sent - before)
    assert engine.global_steps == its.global_steps == 1
    assert sent[0] < sent[1] or world_size == 1
    one, other = engine.state_dict(), its.state_dict()
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=1e-5, atol=1e-6)
    assert engine.loss_scale == 1.0
    half = gemini.initialize(
        CASE.build(None), config={**CONFIG, "dtype": "fp16", "loss_scale": {"initial_scale": 8.0}}, verbose=False
    )[0]
    assert half.loss_scale == 8.0
