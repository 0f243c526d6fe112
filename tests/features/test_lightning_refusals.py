"""What Lightning and a sharded model cannot do together is told, and which of Lightning's private names are used."""

import ast
import doctest
import inspect
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.fabric
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from gemini import ConfigError, UnsupportedError
from gemini.integrations import lightning as integration
from gemini.integrations.lightning import GeminiStrategy
from optim import HybridAdam
from tests.harness.logged import logged
from tests.zoo.lightning_modules import Plain, loader, trainer
from tests.zoo.mlp import CHUNK_NUMEL, assert_same

ROOT = Path(__file__).resolve().parents[2]
SMALL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL}


def _fit(module: Any, strategy: Any = None, **arguments: Any) -> None:
    arguments = {"enable_checkpointing": False, **arguments}
    trainer("", strategy or GeminiStrategy(**SMALL), **arguments).fit(module, loader())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"optimizer": {"type": "HybridAdam"}}, r"'optimizer' in the config: .*configure_optimizers\(\)"),
        ({"stage": 4}, "stage"),
        ({"stagee": 3}, "stage"),
    ],
    ids=["optimizer", "stage", "typo"],
)
def test_a_config_that_contradicts_the_trainer_is_refused(config: dict[str, Any], message: str) -> None:
    for give in (lambda: GeminiStrategy(config), lambda: GeminiStrategy(**config)):
        with pytest.raises(ConfigError, match=message):
            give()


def test_a_config_and_fields_beside_it_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": {"stage": 1}}')
    assert GeminiStrategy(path).config.stage == 1
    with pytest.raises(ConfigError, match="a config or its fields, found both: stage"):
        GeminiStrategy(path, stage=2)


def test_precisions_are_mapped_or_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"DoublePrecision converts .*'bf16-mixed'"):
        trainer("", GeminiStrategy(**SMALL), precision="64-true")
    with pytest.raises(ConfigError, match=r"precision is 'bf16-mixed', and the config says dtype=torch\.float16"):
        _fit(Plain(), GeminiStrategy(**SMALL, dtype="fp16"), precision="bf16-mixed")
    assert DoublePrecision.precision == "64-true"


def test_batch_sizes_that_make_other_steps_than_the_trainers_are_refused() -> None:
    sizes = {"train_batch_size": 4, "train_micro_batch_size_per_gpu": 2}
    module = Plain()
    with pytest.raises(ConfigError, match=r"Trainer\(accumulate_grad_batches=1\), and by the config 2 micro-batches"):
        _fit(module, GeminiStrategy(**SMALL, **sizes))
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    with logged() as text:
        _fit(module, GeminiStrategy(**SMALL, **sizes), accumulate_grad_batches=2)
    assert "without effect: train_micro_batch_size_per_gpu: the data loader decides" in text.getvalue()


class Critic(Plain):
    """Two optimizers, which it steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return HybridAdam(parameters[:6]), HybridAdam(parameters[6:])


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (Critic, {}, r"configure_optimizers\(\) returns 2 optimizers with .*leave automatic_optimization True"),
        (Plain, {"sync_batchnorm": True}, "convert_sync_batchnorm"),
        (lambda: torch.compile(Plain(), backend="eager"), {}, "a compiled LightningModule .* compile modules in it"),
    ],
    ids=["optimizers", "sync-batchnorm", "compiled"],
)
def test_what_cannot_be_fitted_is_refused_before_anything_changes(
    make: Any, arguments: dict[str, Any], message: str
) -> None:
    module = make()
    with pytest.raises(UnsupportedError, match=message):
        _fit(module, **arguments)
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}


def test_a_module_without_optimizer_is_fitted_as_by_lightning(tmp_path: Path) -> None:
    """Its losses are seen, and nothing moves."""
    module = Plain()
    module.configure_optimizers = lambda: None  # type: ignore[method-assign]
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.warns(UserWarning, match="will run with no optimizer"):
        _fit(module)
    assert len(module.losses) == 12
    assert_same(dict(module.state_dict()), before)


class Stopped(Exception):
    """Seen enough."""


class Heavy(Plain):
    """`to()` would fetch every weight."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the module is moved")

    def on_fit_start(self) -> None:
        assert self.device == torch.device("cpu:0")
        raise Stopped


def test_weights_do_not_move_to_a_device_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    module = Heavy()
    monkeypatch.setattr(GeminiStrategy, "root_device", torch.device("cpu:0"))  # another than where the module is
    fit = trainer("", GeminiStrategy(**SMALL), enable_checkpointing=False)
    with pytest.raises(Stopped):
        fit.fit(module, loader())


def test_a_step_that_fails_to_start_leaves_the_module_its_forward() -> None:
    """A hook of the model raises before the step is reached."""

    def refuse(*args: Any) -> None:
        raise ValueError("in a hook")

    module = Plain()
    handle = module.register_forward_pre_hook(refuse)
    with pytest.raises(ValueError, match="in a hook"):
        _fit(module)
    handle.remove()
    assert "forward" not in vars(module)
    assert module(torch.ones(1, 16)).shape == (1, 16)


def test_the_names_of_lightnings_that_are_used_are_there() -> None:
    """Private ones are pinned, as they may go at any time; the others are methods of strategies that ours overrides."""
    private = {"_compiler_ctx", "_device", "_layer_sync", "_call_lightning_module_hook"}
    strategy = GeminiStrategy(**SMALL)
    assert hasattr(strategy, "_layer_sync")
    assert {"_compiler_ctx", "_device"} <= vars(Plain()).keys()
    tree = ast.parse((ROOT / "gemini/integrations/lightning.py").read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr[:1] == "_"}
    ours = {"_precision", "_source", "_sharded", "_optimizers", "_wrap", "_shard", "_in_forward", "_refuse_foreign_fit"}
    ours |= {"_models", "_fitted", "_saves_parts", "_writes_parts"}
    ours |= {"_enter", "_leave", "_inside", "_evaluates", "_saves"}
    assert {name for name in read if not name.endswith("__")} - ours == private | {"_opt_called"}

    for name, its in vars(GeminiStrategy).items():
        if name.startswith("_") or not inspect.isfunction(its):
            continue
        theirs = inspect.signature(getattr(DDPStrategy, name))
        assert theirs.parameters.keys() >= inspect.signature(its).parameters.keys() - {"args", "kwargs"}, name
    assert isinstance(LightningOptimizer(HybridAdam(Plain().parameters())).optimizer, HybridAdam)
    assert {MixedPrecision("bf16-mixed", "cpu").precision, HalfPrecision("16-true").precision} == {
        "bf16-mixed",
        "16-true",
    }
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"lightning=={version('lightning')}" in pins


def test_the_example_in_the_docstring_runs() -> None:
    (example,) = doctest.DocTestFinder(recurse=False).find(GeminiStrategy, globs={**vars(integration), "pl": pl})
    assert doctest.DocTestRunner().run(example).failed == 0


def test_fabric_is_told_what_to_use() -> None:
    with pytest.raises(ValueError, match=r"Fabric leaves strategy= out and takes gemini.ShardedModel"):
        lightning.fabric.Fabric(accelerator="cpu", devices=1, strategy=GeminiStrategy(stage=3))
