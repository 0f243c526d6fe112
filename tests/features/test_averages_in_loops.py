"""Averages of weights in the loops of transformers and Lightning: evaluated, saved, and out of the way of training."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file
from torch import Tensor

from gemini import GeminiError, UnsupportedError, state_hash
from gemini.checkpoint.exporting import export_weights
from gemini.integrations.lightning import GeminiStrategy, ShardedWeightAveraging
from gemini.integrations.transformers import EmaCallback
from tests.harness.on_ranks import on_ranks
from tests.harness.shared_folder import shared_folder
from tests.zoo import hf_trainers, lightning_modules
from tests.zoo.hf_trainers import SHARDED
from tests.zoo.lightning_modules import Plain, loader
from tests.zoo.mlp import CHUNK_NUMEL, assert_same

AVERAGING = {**SHARDED, "config": {"ema": {"decay": 0.5, "after": 1}}}
SMALL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}


class StopsAt(transformers.TrainerCallback):
    """Ctrl-C in the evaluation, or a training that ends, after a step."""

    def __init__(self, step: int, interrupts: bool) -> None:
        self.step, self.interrupts = step, interrupts

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= not self.interrupts and state.global_step == self.step

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.interrupts and state.global_step == self.step:
            raise KeyboardInterrupt


def hf(folder: Any, *callbacks: Any, **more: Any) -> Any:
    return hf_trainers.trainer(folder, sharded=AVERAGING, callbacks=list(callbacks), **more)


@on_ranks(1, 2)
def test_a_trainer_evaluates_the_averages_and_saves_them_beside_the_weights(rank: int, world_size: int) -> None:
    """And trains as without. Before the first averaging the weights are evaluated."""
    every_step = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 24}
    every_step |= {"save_strategy": "steps", "save_steps": 2}
    with shared_folder() as folder:
        plain = hf(folder / "plain", **every_step)
        plain.train()
        wanted = state_hash(plain.sharded_model, plain.optimizer)
        each = hf(folder / "ours", EmaCallback(), **every_step)
        each.train()
        assert state_hash(each.sharded_model, each.optimizer) == wanted
        losses = hf_trainers.logged(each, "eval_loss")
        of_weights = hf_trainers.logged(plain, "eval_loss")
        assert losses[0] == of_weights[0]
        with plain.optimizer.ema.weights():
            averages = {name: value.clone() for name, value in plain.model.state_dict().items()}
            assert plain.evaluate()["eval_loss"] == losses[-1] != of_weights[-1]
        saved = type(each.model).from_pretrained(folder / "ours" / "checkpoint-4" / "ema")
        assert_same(dict(saved.state_dict()), averages)
        weights = type(each.model).from_pretrained(folder / "ours" / "checkpoint-4")
        assert_same(dict(weights.state_dict()), dict(each.sharded_model.state_dict()))
        # Of two steps there is one averaging, which copies the weights.
        assert_same(
            *(
                dict(type(each.model).from_pretrained(folder / "ours" / "checkpoint-2" / its).state_dict())
                for its in ("ema", "")
            )
        )
        for its in (plain, each):
            its.sharded_model.close()


@on_ranks(1, 2)
def test_a_training_that_is_interrupted_while_it_evaluates_averages_keeps_its_weights(
    rank: int, world_size: int
) -> None:
    with shared_folder() as folder:
        hashes = []
        for interrupts in (True, False):
            each = hf(folder, EmaCallback(), StopsAt(3, interrupts), eval_strategy="steps", eval_steps=1)
            if interrupts:
                with pytest.raises(KeyboardInterrupt):
                    each.train()
            else:
                each.train()
            hashes.append(state_hash(each.sharded_model, each.optimizer))
            each.sharded_model.close()
        assert hashes[0] == hashes[1]


def test_averages_that_there_are_not_are_missed_as_the_training_begins(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"without averages: give Trainer\(config=\{\"ema\": 0.999\}\)"):
        hf_trainers.trainer(tmp_path, callbacks=[EmaCallback()]).train()
    with pytest.raises(UnsupportedError, match="this one is not sharded: import Trainer from there"):
        hf_trainers.trainer(tmp_path, kind=transformers.Trainer, callbacks=[EmaCallback()]).train()
    fit = lightning_modules.trainer(tmp_path, GeminiStrategy(**SMALL), callbacks=[ShardedWeightAveraging()])
    with pytest.raises(UnsupportedError, match=r"without averages: give GeminiStrategy\(ema=0.999\)"):
        fit.fit(Plain(), loader())
    with pytest.raises(UnsupportedError, match=r"ShardedWeightAveraging is for Trainer\(strategy=GeminiStrategy"):
        lightning_modules.trainer(tmp_path, callbacks=[ShardedWeightAveraging()]).fit(Plain(), loader())


class Watched(Plain):
    """Remembers the weights that it is validated with, and may be interrupted or save meanwhile."""

    def __init__(self, interrupts: bool = False, saves: str = "") -> None:
        super().__init__()
        self.seen: list[dict[str, Tensor]] = []
        self.interrupts, self.saves = interrupts, saves

    def on_validation_epoch_end(self) -> None:
        self.seen.append(weights_of(self))
        if self.interrupts:
            raise KeyboardInterrupt
        if self.saves:
            self.trainer.save_checkpoint(self.saves)


def weights_of(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def fitted(folder: Any, module: Watched, *callbacks: Any, **more: Any) -> Any:
    strategy = GeminiStrategy(**SMALL, ema=0.5, **more)
    fit = lightning_modules.trainer(folder, strategy, max_epochs=2, callbacks=list(callbacks))
    fit.fit(module, loader(), loader(8))
    return fit


@on_ranks(1, 2)
def test_a_lightning_module_is_validated_with_the_averages_and_they_are_saved(rank: int, world_size: int) -> None:
    """And trains as without. The sanity check before the first step sees the weights."""
    with shared_folder() as folder:
        plain, ours = Watched(), Watched()
        fit = fitted(folder / "plain", plain)
        with fit.strategy.ema.weights():
            averages = weights_of(plain)
        fit = fitted(folder / "ours", ours, ShardedWeightAveraging(), ModelCheckpoint(folder / "ours", filename="last"))
        assert_same(weights_of(ours), weights_of(plain))
        assert_same(ours.seen[0], plain.seen[0])
        assert_same(ours.seen[-1], averages)
        saved = torch.load(folder / "ours" / "last.ckpt", weights_only=False)
        assert_same(saved["ema_state_dict"], averages)
        assert_same(saved["state_dict"], weights_of(plain))
        fit.validate(ours, loader(8), verbose=False)
        assert_same(ours.seen[-1], averages)
        fit.validate(ours, loader(8), ckpt_path=str(folder / "ours" / "last.ckpt"), verbose=False)
        assert_same(ours.seen[-1], saved["state_dict"])


@on_ranks(1, 2)
def test_ctrl_c_and_a_checkpoint_inside_a_validation_leave_lightning_the_weights(rank: int, world_size: int) -> None:
    with shared_folder() as folder:
        plain, ours = Watched(), Watched()
        fitted(folder / "plain", plain)
        ours.seen.append({})  # so that the sanity check does not count
        ours.on_validation_start = lambda: setattr(ours, "interrupts", len(ours.losses) > 0)  # type: ignore[method-assign]
        with pytest.raises(SystemExit):
            fitted(folder / "ours", ours, ShardedWeightAveraging())
        first = weights_of(ours)
        assert any(not torch.equal(value, ours.seen[-1][name]) for name, value in first.items())
        assert_same(first, plain.seen[1])  # those after an epoch, without averages
        saving = Watched(saves=str(folder / "inside.ckpt"))
        with pytest.raises(GeminiError, match=r"optimizer.state_dict\(\) inside optimizer.ema.weights\(\)"):
            fitted(folder / "saving", saving, ShardedWeightAveraging())
        assert_same(weights_of(saving), plain.seen[1])


def test_averages_of_a_checkpoint_in_parts_are_exported(tmp_path: Path) -> None:
    module = Watched()
    saved = ModelCheckpoint(tmp_path / "ours", filename="last")
    fitted(tmp_path, module, ShardedWeightAveraging(), saved, state_dict_type="sharded")
    export_weights(tmp_path / "ours" / "last.ckpt", tmp_path / "out", averages=True)
    assert_same(load_file(tmp_path / "out" / "model.safetensors"), module.seen[-1])
