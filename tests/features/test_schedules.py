"""Learning rate schedules that a config names: DeepSpeed's beside what DeepSpeed made of them, torch's beside torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemini.engine.config.config import SchedulerConfig
from gemini.engine.schedules import make_schedule

RECORDED = json.loads(Path(__file__).with_name("deepspeed_schedules.json").read_text())


def adam(num_groups: int = 1) -> torch.optim.Adam:
    return torch.optim.Adam([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(num_groups)], lr=0.3)


def steps_of(config: SchedulerConfig, num_steps: int) -> list[list[float]]:
    """Learning rate and first beta before each optimizer step."""
    optimizer = adam()
    schedule, found = make_schedule(config, optimizer), []
    for _ in range(num_steps):
        group = optimizer.param_groups[0]
        found.append([group["lr"], group["betas"][0]])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("recorded", RECORDED["schedules"], ids=lambda each: each["type"])
def test_a_schedule_of_deepspeeds_has_its_rates(recorded: dict[str, Any]) -> None:
    """Rates are equal but for the rounding of a division that is written another way."""
    config = SchedulerConfig(type=recorded["type"], params=recorded["params"])
    found = steps_of(config, len(recorded["steps"]))
    assert found == [pytest.approx(step, rel=1e-12, abs=1e-15) for step in recorded["steps"]]


def test_every_schedule_of_deepspeeds_is_recorded() -> None:
    assert {each["type"] for each in RECORDED["schedules"]} == {
        "LRRangeTest",
        "OneCycle",
        "WarmupCosineLR",
        "WarmupDecayLR",
        "WarmupLR",
    }


def test_a_schedule_of_torchs_is_torchs() -> None:
    optimizer = adam()
    plain = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    found = steps_of(SchedulerConfig(type="StepLR", params={"step_size": 2, "gamma": 0.5}), 5)
    for rate, _ in found:
        assert optimizer.param_groups[0]["lr"] == rate
        optimizer.step()
        plain.step()


def test_a_schedule_goes_on_from_its_state() -> None:
    config = SchedulerConfig(type="WarmupLR", params={"warmup_num_steps": 5})
    optimizer = adam()
    schedule = make_schedule(config, optimizer)
    for _ in range(3):
        optimizer.step()
        schedule.step()
    other = adam()
    resumed = make_schedule(config, other)
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    for one, its in ((optimizer, schedule), (other, resumed)):
        one.step()
        its.step()
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    assert resumed.last_epoch == 4


@pytest.mark.parametrize("name", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
def test_the_shortest_warmup_has_two_steps_as_deepspeed_has_it(name: str) -> None:
    total = {} if name == "WarmupLR" else {"total_num_steps": 6}
    rates = [steps_of(SchedulerConfig(type=name, params={"warmup_num_steps": n, **total}), 6) for n in (0, 1, 2)]
    assert rates[0] == rates[1] == rates[2]


def test_each_param_group_may_have_a_rate_of_its_own() -> None:
    config = SchedulerConfig(type="WarmupLR", params={"warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [1.0, 2.0]})
    optimizer = adam(2)
    make_schedule(config, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    with pytest.raises(ValueError, match="2 learning rates and the optimizer 1 param groups"):
        make_schedule(config, adam())
