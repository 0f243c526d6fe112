"""Metrics of an engine go to the libraries that a DeepSpeed config names, and a script runs on without them."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini.engine.config import load_config
from tests.zoo.mlp import build, inputs

DEEPSPEED: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "zero_optimization": {"stage": 3},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
}


class Library(ModuleType):
    """Takes every call by name, as a library that logs somewhere would."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self  # what `comet_ml.start` returns has the methods of a run

        return call


def trained(**config: Any) -> gemini.Engine:
    engine, *_ = gemini.initialize(build(), config={**DEEPSPEED, **config}, verbose=False)
    for step in range(2):
        engine.backward(engine(inputs(step)).float().square().mean())
        engine.step()
    return engine


@pytest.mark.parametrize(
    ("section", "module", "options", "begun", "logged", "ended"),
    [
        (
            "wandb",
            "wandb",
            {"project": "p", "team": "t", "group": "g"},
            ("init", {"project": "p", "entity": "t", "group": "g"}),
            "log",
            "finish",
        ),
        (
            "comet",
            "comet_ml",
            {"project": "p", "workspace": "w", "samples_log_interval": 100},
            ("start", {"project_name": "p", "workspace": "w"}),
            "log_metrics",
            "end",
        ),
        ("trackio", "trackio", {"project": "p"}, ("init", {"project": "p"}), "log", "finish"),
        (
            "mlflow",
            "mlflow",
            {"experiment_name": "e", "run_name": "r"},
            ("start_run", {"run_name": "r"}),
            "log_metrics",
            "end_run",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_monitor_of_deepspeed_gets_each_step(
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    module: str,
    options: dict[str, Any],
    begun: tuple[str, dict[str, Any]],
    logged: str,
    ended: str,
) -> None:
    library = Library(module)
    monkeypatch.setitem(sys.modules, module, library)
    engine = trained(**{section: {"enabled": True, **options}})
    assert begun in [(name, kwargs) for name, _, kwargs in library.calls]
    steps = [(args[0], kwargs) for name, args, kwargs in library.calls if name == logged]
    assert [kwargs["step"] for _, kwargs in steps] == [1, 2]
    assert {"loss", "lr", "grad_norm"} <= set(steps[0][0])
    engine.close()
    assert library.calls[-1][0] == ended
    library.calls.clear()
    trained(**{section: {"enabled": False, **options}}).close()
    assert not library.calls


@pytest.mark.parametrize(("section", "module"), [("wandb", "wandb"), ("comet", "comet_ml"), ("mlflow", "mlflow")])
def test_a_script_runs_on_where_its_monitor_is_not_installed(
    monkeypatch: pytest.MonkeyPatch, section: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.warns(UserWarning, match=rf"monitors.{section}: nothing is logged there, because {module} is not"):
        engine = trained(**{section: {"enabled": True}})
    assert engine.global_steps == 2


def test_a_script_runs_on_where_its_monitor_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("wandb")

    def init(**_: Any) -> None:
        raise RuntimeError("no login")

    library.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", library)
    with pytest.warns(UserWarning, match="monitors.wandb: nothing is logged there: RuntimeError: no login"):
        assert trained(wandb={"enabled": True}).global_steps == 2


# -- `torch_autocast`.


class SaysItsDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch)


def test_torch_autocast_of_a_deepspeed_config_casts_the_forward_and_leaves_fp32_weights() -> None:
    section = {"enabled": True, "dtype": "bfloat16"}
    engine, *_ = gemini.initialize(SaysItsDtype(), config={**DEEPSPEED, "torch_autocast": section}, verbose=False)
    torch.manual_seed(0)
    batch = torch.randn(3, 4)
    found = engine(batch)
    assert found.dtype is torch.bfloat16
    weights = engine.model.state_dict()
    assert weights["layer.weight"].dtype is torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, nn.functional.linear(batch, weights["layer.weight"], weights["layer.bias"]))
    engine.backward(found.float().square().mean())
    engine.step()
    assert engine.global_steps == 1


def test_torch_autocast_is_off_and_of_bfloat16_unless_it_says_otherwise() -> None:
    for section, dtype in (({"enabled": False}, None), ({"enabled": True}, torch.bfloat16)):
        assert load_config({**DEEPSPEED, "torch_autocast": section}).autocast is dtype


# -- Budgets beside another library's keys.


@pytest.mark.parametrize("size", ["26MiB", "27262976B", 26 * 2**20])
@pytest.mark.parametrize("where", ["top", "section"])
def test_a_deepspeed_config_holds_the_budget(where: str, size: str | int) -> None:
    ours = {"device_memory": size}
    config = load_config({**DEEPSPEED, **(ours if where == "top" else {"gemini": ours})})
    assert config.device_memory == 26 * 2**20 and config.stage == 3
