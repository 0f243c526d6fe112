"""Lightning's Trainer with another strategy: a LightningModule trains sharded, in Lightning's own loops."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from gemini import ShardedModel, ShardedOptimizer
from gemini.integrations.lightning import GeminiStrategy
from optim import HybridAdam
from tests.harness.on_ranks import on_ranks
from tests.harness.shared_folder import shared_folder
from tests.zoo.lightning_modules import Plain, loader, trainer
from tests.zoo.mlp import CHUNK_NUMEL, assert_same
from tests.zoo.whole import matrices_and_rest

SMALL: dict[str, Any] = {"device": "emulated", "chunk_size": CHUNK_NUMEL, "tensor_placement_policy": "cpu"}
DTYPES = {"32-true": None, "bf16-mixed": torch.bfloat16, "16-true": torch.float16}


def _ours(**fields: Any) -> GeminiStrategy:
    return GeminiStrategy(**{**SMALL, **fields})


def _weights(module: pl.LightningModule) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.sampled(2)
@on_ranks(1, 2, soak=(3,))
@pytest.mark.filterwarnings("ignore:step 1 skipped")
@pytest.mark.parametrize("precision", DTYPES)
def test_a_fit_trains_as_the_low_level_api_by_hand(rank: int, world_size: int, precision: Any) -> None:
    """Accumulation, clipping and the schedule too, bit for bit; batches are this rank's."""
    module = Plain()
    fit = trainer("", _ours(), precision=precision, accumulate_grad_batches=2, gradient_clip_val=0.1, **_NO_FILES)
    fit.fit(module, loader())
    assert len(module.batches) == 12 // world_size

    dtype, root = DTYPES[precision], "true" in precision
    casts = None if dtype is None else {"" if root else "net": dtype, "*": torch.float32}
    reference = Plain()
    model = ShardedModel(reference, dtype=casts, **SMALL)
    optimizer = ShardedOptimizer(model, HybridAdam(model.parameters(), lr=1e-2, weight_decay=0.01))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for number, x in enumerate(module.batches):
        loss = (model(x) - x.flip(-1)).square().mean()
        assert torch.equal(module.losses[number], loss.detach())
        optimizer.backward(loss.float() / 2)  # what leaves a model of 16-bit weights is fp32
        if number % 2 == 1:
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            schedule.step()
    assert_same(_weights(module), dict(model.state_dict()))
    model.close()


class Several(Plain):
    """Muon of the matrices beside Adam, each with a schedule, as one of Lightning's forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def configure_optimizers(self) -> Any:
        optimizers = several(self)
        schedules = [torch.optim.lr_scheduler.StepLR(each, 1, gamma) for each, gamma in zip(optimizers, (0.5, 0.25))]
        each_step: list[Any] = [{"scheduler": schedule, "interval": "step"} for schedule in schedules]
        if self.form == "two lists":
            return optimizers, each_step
        return [{"optimizer": its, "lr_scheduler": step} for its, step in zip(optimizers, each_step, strict=True)]


def several(model: torch.nn.Module) -> list[torch.optim.Optimizer]:
    matrices, rest = matrices_and_rest(model)
    return [torch.optim.Muon(matrices, lr=0.02), HybridAdam(rest, lr=1e-2)]


@on_ranks(1, 2)
@pytest.mark.parametrize("form", ["two lists", "dicts"])
def test_several_optimizers_make_one_step_with_one_clip_and_go_on_from_a_checkpoint(
    rank: int, world_size: int, form: str
) -> None:
    """Plain Lightning refuses them. Each schedule drives its own."""
    module = Several(form)
    with shared_folder() as folder:
        trainer(folder, _ours(), gradient_clip_val=0.1, callbacks=[ModelCheckpoint(folder, filename="one")]).fit(
            module, loader(12)
        )
        batches = module.batches
        module = Several(form)
        again = trainer(folder, _ours(), gradient_clip_val=0.1, max_epochs=2, **_NO_FILES)
        again.fit(module, loader(12), ckpt_path=str(Path(folder, "one.ckpt")))
    batches += module.batches
    assert len(batches) == 12 // world_size

    model = ShardedModel(Plain(), **SMALL)
    optimizer = ShardedOptimizer(model, several(model.module))
    for number, x in enumerate(batches):
        optimizer.backward((model(x) - x.flip(-1)).square().mean())
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        for group, (rate, gamma) in zip(optimizer.param_groups, [(0.02, 0.5), (1e-2, 0.25)], strict=True):
            group["lr"] = rate * gamma ** (number + 1)
    assert_same(_weights(module), dict(model.state_dict()))
    model.close()


_NO_FILES = {"enable_checkpointing": False}


def test_one_rank_has_the_bits_of_plain_lightning(tmp_path: Path) -> None:
    """Training, validation, test and predictions, with callbacks that read metrics, schedules and checkpoints."""
    runs = []
    for strategy in (_ours(), "auto"):
        module, stopping = Plain(), EarlyStopping("val", patience=1, min_delta=10.0)
        saved = ModelCheckpoint(tmp_path / str(strategy == "auto"), monitor="metric", save_last=True)
        fit = trainer(tmp_path, strategy, max_epochs=5, accumulate_grad_batches=2, callbacks=[stopping, saved])
        fit.fit(module, loader(), loader(8))
        results = _weights(module) | {name: value.clone() for name, value in fit.callback_metrics.items()}
        results["losses"], results["epochs"] = torch.stack(module.losses), torch.tensor(fit.current_epoch)
        (tested,) = fit.test(module, loader(8), "best", verbose=False)
        results |= {name: torch.tensor(value) for name, value in tested.items()}
        results["predicted"] = torch.cat(fit.predict(module, loader(8)))  # type: ignore[arg-type]
        runs.append(results)
    assert runs[0]["epochs"] == 2
    assert_same(*runs)


def test_a_module_is_fitted_after_its_learning_rate_was_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`lr_find` fits it with an optimizer of its own, and puts the weights back."""
    monkeypatch.chdir(tmp_path)
    runs = []
    for strategy in (_ours(), "auto"):
        module = Plain()
        fit = trainer(tmp_path, strategy, max_epochs=2, use_distributed_sampler=False, **_NO_FILES)
        found = Tuner(fit).lr_find(module, loader(), num_training=30, attr_name="rate", early_stop_threshold=None)
        assert found is not None
        fit.fit(module, loader())
        runs.append(
            _weights(module) | {"losses": torch.stack(module.losses), "rate": torch.tensor(module.hparams["rate"])}
        )
    assert_same(*runs)


class Unfreezing(BaseFinetuning):
    """A layer is trained from the second epoch on, in a param group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.layers[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.layers[0], optimizer)


class Plateau(Plain):
    """Trains what is not frozen, and its rate falls with a metric; every third batch is left out."""

    def training_step(self, batch: list[Tensor], number: int) -> Any:
        return None if number % 3 == 0 else super().training_step(batch, number)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=0.01)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "callback"),
    [
        (Plain, lambda: StochasticWeightAveraging(1e-2, swa_epoch_start=1)),
        (Plain, EMAWeightAveraging),
        (Plain, lambda: GradientAccumulationScheduler({0: 2, 1: 3})),
        (Plateau, Unfreezing),
    ],
    ids=["swa", "ema", "accumulation", "unfreezing-plateau"],
)
def test_lightnings_callbacks_do_what_they_do_in_plain_lightning(make: Any, callback: Any, tmp_path: Path) -> None:
    runs = []
    for strategy in (_ours(), "auto"):
        module = make()
        fit = trainer(tmp_path, strategy, max_epochs=2, callbacks=[callback()], **_NO_FILES)
        fit.fit(module, loader(), loader(8))
        rates = torch.tensor([group["lr"] for group in fit.optimizers[0].param_groups])
        runs.append(_weights(module) | {"rates": rates})
    assert_same(*runs)


def test_the_strategy_has_a_name_for_lightnings_own_settings() -> None:
    named, made = Plain(), Plain()
    fit = trainer("", "gemini", max_epochs=1, **_NO_FILES)
    fit.fit(named, loader())
    assert isinstance(fit.strategy, GeminiStrategy)
    trainer("", GeminiStrategy(), max_epochs=1, **_NO_FILES).fit(made, loader())
    assert_same(_weights(named), _weights(made))
