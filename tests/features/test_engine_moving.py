"""Who moves a schedule: a loop for Colossal-AI moves the one that it gave, by the line that it has."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

import gemini
from gemini import Engine, Trainer
from gemini.engine.trainer import LearningRate, LRSchedulerHook
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import build, inputs

CONFIG: dict[str, Any] = {"device": "emulated", "rank_timeout": 60.0}
OPTIMIZER = {"type": "SGD", "params": {"lr": 1.0}}
PAIRS = [(inputs(step), inputs(step + 1)) for step in range(4)]


def trained(schedule_of: Any = None, module: nn.Module | None = None, **config: Any) -> tuple[Engine, Any]:
    module = module or build()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    schedule = StepLR(optimizer, 1, gamma=0.5) if schedule_of is None else schedule_of(optimizer)
    engine, _, _, its = gemini.initialize(
        module, optimizer, nn.MSELoss(), lr_scheduler=schedule, config={**CONFIG, **config}, verbose=False
    )
    return engine, its


def backward(engine: Engine, micro: int = 0, factor: float = 1.0) -> float:
    """A micro-batch; returns the rate that a step would have."""
    engine.backward(engine(inputs(micro)).square().mean() * 1e-3 * factor)
    assert engine.optimizer is not None
    return float(engine.optimizer.param_groups[0]["lr"])


@pytest.mark.sampled(2)
@on_ranks(1, 2)
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("when", ["micro-batch", "step", "epoch"])
@pytest.mark.parametrize("window", [1, 2])
def test_a_script_moves_its_schedule(rank: int, world_size: int, window: int, when: str) -> None:
    """After every micro-batch, as scripts for Colossal-AI do whatever the window is, every step, or every epoch."""
    engine, schedule = trained(gradient_accumulation_steps=window)
    rates = []
    for _ in range(2):
        for micro in range(4):
            rates.append(backward(engine, micro))
            engine.step()
            if when == "micro-batch" or (when == "step" and (micro + 1) % window == 0):
                schedule.step()
        if when == "epoch":
            schedule.step()
    per_move = 4 if when == "epoch" else window
    assert rates == [0.5 ** (index // per_move) for index in range(8)]


def test_an_open_window_at_the_end_of_an_epoch_does_not_take_the_move_of_the_epoch() -> None:
    engine, schedule = trained(gradient_accumulation_steps=2)
    for micro in range(3):
        backward(engine, micro)
        engine.step()
    schedule.step()
    assert schedule.last_epoch == 1


def test_a_skipped_step_does_not_move_it() -> None:
    engine, schedule = trained(dtype="fp16", cast_inputs=True, loss_scale={"initial_scale": 8.0})
    backward(engine, factor=float("inf"))
    with pytest.warns(UserWarning, match="skipped on all ranks"):
        engine.step()
    schedule.step()
    assert schedule.last_epoch == 0
    backward(engine)
    engine.step()
    schedule.step()
    assert schedule.last_epoch == 1


def test_a_script_may_move_it_to_where_a_checkpoint_was_and_as_often_as_it_likes() -> None:
    engine, schedule = trained()
    for _ in range(3):
        schedule.step()
    assert backward(engine) == 0.125
    engine.step()
    schedule.step()
    schedule.step()
    assert schedule.get_last_lr() == [0.5**5]
    schedule.load_state_dict({**schedule.state_dict(), "last_epoch": 7})
    assert schedule.last_epoch == 7
    assert copy.copy(schedule).last_epoch == 7
    assert repr(schedule) == repr(schedule.plain)


def test_a_schedule_that_moves_by_a_metric_is_the_scripts() -> None:
    engine, schedule = trained(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, factor=0.5))
    for _ in range(2):
        backward(engine)
        engine.step()
        schedule.step(1.0)
    assert backward(engine) == 0.5
    Trainer(engine).fit(PAIRS, 1)
    with pytest.raises(gemini.UnsupportedError, match=r"call its step\(metric\) in the after_test"):
        LRSchedulerHook(schedule, by_epoch=True)


@pytest.mark.parametrize("hook", [None, "step", "epoch"])
def test_a_trainer_moves_it_by_step_or_by_epoch(hook: str | None) -> None:
    engine, schedule = trained()
    trainer = Trainer(engine)
    hooks = [] if hook is None else [LRSchedulerHook(schedule, by_epoch=hook == "epoch")]
    trainer.fit(PAIRS, 2, hooks=hooks)
    assert schedule.last_epoch == (2 if hook == "epoch" else 8)
    if hook is not None:
        assert trainer.metrics["lr"] == (0.5 if hook == "epoch" else 0.5**7)


def test_a_trainers_skipped_step_does_not_move_it() -> None:
    """Neither as `initialize` returned the schedule nor as it was given."""
    for returned in (True, False):
        engine, schedule = trained(dtype="fp16", cast_inputs=True, loss_scale={"initial_scale": 8.0})
        schedule = schedule if returned else schedule.plain
        # torch before 2.13 has no backward of this loss for two dtypes
        bad = [(PAIRS[0][0], PAIRS[0][1].half() * float("inf")), (PAIRS[1][0], PAIRS[1][1].half())]
        with pytest.warns(UserWarning, match="skipped on all ranks"):
            Trainer(engine).fit(bad, 1, hooks=[LRSchedulerHook(schedule, by_epoch=False)])
        assert schedule.last_epoch == 1


def test_a_schedule_of_the_engines_is_refused_in_the_hook() -> None:
    config = {**CONFIG, "optimizer": OPTIMIZER, "scheduler": {"type": "StepLR", "params": {"step_size": 1}}}
    engine, *_, schedule = gemini.initialize(build(), criterion=nn.MSELoss(), config=config, verbose=False)
    with pytest.raises(gemini.UnsupportedError, match="the engine moves this schedule"):
        Trainer(engine).fit(PAIRS, 1, hooks=[LRSchedulerHook(schedule, by_epoch=False)])
    Trainer(engine).fit(PAIRS, 1, hooks=[LearningRate()])
    assert schedule.last_epoch == len(PAIRS)


def test_what_a_callable_makes_is_the_engines() -> None:
    engine, *_, schedule = gemini.initialize(
        build(),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
        config={**CONFIG, "optimizer": OPTIMIZER},
        verbose=False,
    )
    assert isinstance(schedule, LambdaLR)
    backward(engine)
    engine.step()
    assert backward(engine) == 0.5
