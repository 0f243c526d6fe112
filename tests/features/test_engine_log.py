"""What an engine logs of a step, and what it warns of: true of that step, at the user's line, and never in its way."""

import json
import tempfile
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import gemini
from gemini import Engine, RemoteRankError, deepspeed
from gemini.log import warn_at_script
from tests.harness.on_ranks import gathered, on_ranks
from tests.zoo.mlp import build, inputs

CONFIG: dict[str, Any] = {
    "device": "emulated",
    "rank_timeout": 60.0,
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}},
}


def engine_of(start: Callable[..., Any] = gemini.initialize, **config: Any) -> Engine:
    options = {"verbose": False} if start is gemini.initialize else {}
    engine: Engine = start(build(), config={**CONFIG, **config}, **options)[0]
    return engine


def logged(folder: str | Path) -> dict[str, Any]:
    return {"monitors": {"json_lines": {"output_path": str(folder), "job_name": "log"}}}


def backward(engine: Engine, micro: int = 0, factor: float = 1.0) -> None:
    engine.backward(engine(inputs(micro)).float().square().mean() * 1e-3 * factor)


@on_ranks(1, 2)
def test_a_step_whose_log_finds_the_disk_full_is_over_on_all_ranks(rank: int, world_size: int) -> None:
    with tempfile.TemporaryDirectory() as own:
        folder = gathered(own)[0]
        (Path(own) / "log.jsonl").symlink_to("/dev/full")
        engine = engine_of(**logged(folder))

        def step() -> None:
            backward(engine, rank)
            with pytest.raises(OSError, match="No space left") if rank == 0 else nullcontext():
                engine.step()

        step()
        if rank:
            with pytest.raises(RemoteRankError, match="No space left"):
                engine(inputs(rank))
        assert (engine.global_steps, engine.lr_scheduler.last_epoch) == (1, 1)
        engine.recover()
        step()
        assert engine.lr_scheduler.get_last_lr() == [0.25]


def test_the_loss_scale_that_is_logged_is_that_of_the_steps_gradients(tmp_path: Path) -> None:
    scale = {"initial_scale": 8.0, "growth_interval": 1, "hysteresis": 1}
    engine, scales = engine_of(dtype="fp16", cast_inputs=True, loss_scale=scale, **logged(tmp_path)), []
    for factor in (1.0, 1.0, float("inf"), 1.0):
        scales.append(engine.loss_scale)
        backward(engine, factor=factor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "step 3 skipped on all ranks")
            engine.step()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["loss_scale"] for line in lines] == scales == [8.0, 16.0, 32.0, 16.0]


def test_a_step_whose_schedule_raises_is_logged_with_its_own_losses(tmp_path: Path) -> None:
    engine, losses = engine_of(**logged(tmp_path)), []
    for factor in (1.0, 3.0):
        loss = engine(inputs(0)).float().square().mean() * 1e-3 * factor
        losses.append(loss.item())
        engine.backward(loss)
        with (
            patch.object(engine.lr_scheduler, "get_lr", side_effect=RuntimeError("no rate")),
            pytest.raises(RuntimeError, match="no rate"),
        ):
            engine.step()
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == losses


@pytest.mark.parametrize("start", [gemini.initialize, deepspeed.initialize])
def test_warnings_of_a_step_name_the_line_of_the_script(start: Callable[..., Any]) -> None:
    engine = engine_of(start, dtype="fp16", loss_scale={"initial_scale": 8.0}, cast_inputs=True)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for factor in (1.0, 1.0, float("inf")):
            backward(engine, factor=factor)
            engine.step()
            engine.lr_scheduler.step()
    assert [each.filename for each in told] == 2 * [__file__]
    assert ["leave out lr_scheduler.step()" in str(each.message) for each in told] == [True, False]


def test_a_folder_beside_the_package_is_the_users() -> None:
    names: dict[str, Any] = {"warn": warn_at_script}
    path = f"{Path(gemini.__file__).parent}_scripts/train.py"
    exec(compile("def step(): warn('look here')", path, "exec"), names)
    with pytest.warns(UserWarning, match="look here") as told:
        names["step"]()
    assert told[0].filename == path
