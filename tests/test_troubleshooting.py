"""docs/troubleshooting.md: every message that it quotes is one of the product's, and some are raised here."""

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gemini
from gemini import ShardedModel, ShardedOptimizer, deepspeed
from gemini.engine.config import load_config
from tests.zoo.mlp import Mlp, adam, build, inputs, sharded, wrap

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
QUOTED = re.findall(r"^### `(.*)`$", PAGE, re.M)
CONFIGS = ROOT / "tests" / "configs"


@functools.cache
def texts() -> list[str]:
    """Every text in the product's code, with "…" for what is filled in."""
    found = []
    for package in ("gemini", "sharding", "optim"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return found


def pattern_of(quoted: str) -> str:
    """What was filled in may be a part of the text, or stand before it, as the key of a config does."""
    return ".*?".join(re.escape(part.strip()) for part in quoted.split("…"))


@pytest.mark.parametrize("quoted", QUOTED, ids=range(len(QUOTED)))
def test_a_quoted_message_is_in_the_code(quoted: str) -> None:
    begins = quoted.removeprefix("…").strip(" :")
    assert len(re.sub(r"\W", "", begins)) >= 8, f"{quoted!r} would be found in any message"
    # Of thousands of texts only the few that have its longest part are searched.
    longest = max((part.strip() for part in quoted.split("…")), key=len)
    found = any(re.search(pattern_of(quoted), text, re.S) for text in texts() if longest in text)
    assert found, f"no message begins with {quoted!r}"


def _steps_twice() -> None:
    model, optimizer = sharded("smallest")
    loss = model(inputs(0)).sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    loss.backward()


def _unused() -> None:
    model, optimizer = sharded("cuda", ignore_unused_parameters=False)
    model.layers[0](inputs(0)).sum().backward()
    optimizer.step()


def _unscaled() -> None:
    model, _ = sharded("cuda", dtype=torch.float16)
    model(inputs(0, torch.float16)).sum().backward()


def _engine() -> Any:
    return deepspeed.initialize(model=build(), config={"device": "emulated", "optimizer": {"type": "HybridAdam"}})[0]


def _unscalable() -> None:
    _, optimizer = sharded("cuda")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)


def _stepped() -> None:
    module = Mlp()
    optimizer = adam(module.parameters())
    module(inputs(0)).sum().backward()
    optimizer.step()
    ShardedOptimizer(ShardedModel(module, device="emulated"), optimizer)


def _changed() -> None:
    model = wrap("smallest")
    with gemini.GatheredParameters(model.layers[0].weight), torch.no_grad():
        model.layers[0].weight.zero_()


RAISED: list[tuple[Callable[[], object], str]] = [
    (lambda: wrap("cuda", model_data_memory=1000), "BudgetError"),
    (lambda: ShardedModel(build(), device="emulated", tensor_placement_policy="cpu", host_memory=10), "BudgetError"),
    (lambda: load_config("missing.json"), "ConfigError"),
    (lambda: load_config({"gradient_clip_val": 1.0}), "ConfigError"),
    (lambda: load_config({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}), "ConfigError"),
    (lambda: load_config(CONFIGS / "zero3.json"), "ConfigError"),
    (lambda: load_config({"zero_optimization": {"stage": "auto"}}), "ConfigError"),
    (
        lambda: load_config(
            {"train_batch_size": 7, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}, world_size=1
        ),
        "ConfigError",
    ),
    (lambda: gemini.initialize(build(), verbose=False)[0].backward(torch.zeros(())), "UnsupportedError"),
    (lambda: ShardedModel(wrap("cuda").module), "UnsupportedError"),
    (lambda: ShardedModel(nn.Linear(2, 2, device="meta")), "UnsupportedError"),
    (_stepped, "UnsupportedError"),
    (lambda: wrap("cuda").half(), "UnsupportedError"),
    (_steps_twice, "StaleGraphError"),
    (_unused, "GeminiError"),
    (_unscaled, "GeminiError"),
    (_changed, "UnsupportedError"),
    (_unscalable, "UnsupportedError"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(len(RAISED)))
def test_a_message_that_a_user_meets_is_on_the_page_with_its_class(number: int) -> None:
    do, name = RAISED[number]
    with pytest.raises(getattr(gemini, name)) as caught:
        do()
    assert type(caught.value).__name__ == name
    message = str(caught.value)
    said = [quoted for quoted in QUOTED if re.search(pattern_of(quoted).replace("[^\0]", "[^\n]"), message)]
    assert said, f"the page has nothing about: {message}"
    (section,) = re.findall(rf"^### `{re.escape(said[0])}`\n\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S)
    assert section.startswith(f"`{name}`"), section
