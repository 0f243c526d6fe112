"""Configs that are wrong on one rank only, at every front end: all ranks raise, and no model is touched."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

import gemini
from gemini import ConfigError, DivergenceError, deepspeed
from tests.harness.on_ranks import on_ranks
from tests.zoo.mlp import build

GOOD: dict[str, Any] = {"device": "emulated", "rank_timeout": 60.0}


def written(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


def directory(folder: Path) -> Path:
    (folder / "config.json").mkdir()
    return folder / "config.json"


def huge(folder: Path) -> Path:
    with (folder / "config.json").open("wb") as file:
        file.truncate(100 * 10**6)
    return folder / "config.json"


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (lambda folder: folder / "config.json", "does not exist"),
    "directory": (directory, "is a directory"),
    "100 MB": (huge, "a config has at most 1 MiB"),
    "raises": (lambda folder: written(folder, "a.py", "stage = 2\n1 / 0\n"), "line 2: the config raised ZeroDivision"),
    "ends": (lambda folder: written(folder, "a.py", "raise SystemExit(1)\n"), "the config raised SystemExit"),
    "code": (lambda folder: written(folder, "a.py", "stage = 3\n"), "GEMINI_NO_EXEC=1 forbids to run"),
    "batch": (lambda folder: {**GOOD, "train_batch_size": 3}, "train_batch_size=3 is not a multiple of 2 ranks"),
    "refused": (lambda folder: {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}, "=8 does not divide 2 ranks"),
    "type": (lambda folder: 3, "a config is a mapping or the path of a file, found int"),
    "differs": (lambda folder: {**GOOD, "stage": 1}, "stage=. against stage=."),
}


def gemini_form(module: nn.Module, config: Any) -> None:
    gemini.initialize(module, config=config, verbose=False)


def deepspeed_form(module: nn.Module, config: Any) -> None:
    deepspeed.initialize(model=module, config=config)


def zero_init(module: nn.Module, config: Any) -> None:
    deepspeed.zero.Init(module=module, config_dict_or_path=config)


@pytest.mark.sampled(8)
@on_ranks(2)
@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("front", [gemini_form, deepspeed_form, zero_init])
@pytest.mark.parametrize("who", [0, 1])
def test_a_bad_config_of_one_rank_is_told_to_all_before_the_model_is_touched(
    rank: int, world_size: int, who: int, front: Callable[[nn.Module, Any], None], name: str
) -> None:
    make, words = BAD[name]
    module = build()
    before = [(parameter, parameter.data_ptr()) for parameter in module.parameters()]
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, GEMINI_NO_EXEC="1" if name == "code" else ""),
    ):
        config = make(Path(folder)) if rank == who else GOOD
        with pytest.raises(DivergenceError if name == "differs" else ConfigError, match=words) as caught:
            front(module, config)
    assert rank == who or name == "differs" or str(caught.value).startswith(f"rank {who}: ")
    assert all(
        one is it and it.data_ptr() == place for it, (one, place) in zip(module.parameters(), before, strict=True)
    )


class Broken:
    """A value that raises another error than a config's."""

    def __repr__(self) -> str:
        raise OSError("the disk is gone")


@on_ranks(2)
def test_what_no_config_should_raise_is_told_to_all(rank: int, world_size: int) -> None:
    config = {**GOOD, "stage": Broken()} if rank == 1 else GOOD
    with pytest.raises(OSError if rank else ConfigError, match="the disk is gone"):
        gemini.initialize(build(), config=config, verbose=False)


@on_ranks(2)
def test_a_rank_without_a_config_is_told_to_all(rank: int, world_size: int) -> None:
    with pytest.raises(ConfigError, match=r"initialize\(\) needs one config"):
        deepspeed.initialize(model=build(), config=GOOD if rank else None)


@on_ranks(2)
def test_each_node_may_have_a_scratch_folder_of_its_own_name(rank: int, world_size: int) -> None:
    """Two names of one folder here; a GPU cluster has one of each job or host."""
    folder = tempfile.gettempdir() + "/." * rank
    engine, *_ = gemini.initialize(build(), config={**GOOD, "disk_path": folder}, verbose=False)
    assert str(engine.model.settings.disk_path) == folder
    engine.close()
