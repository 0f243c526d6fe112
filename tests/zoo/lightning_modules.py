"""LightningModules over the perceptron of `mlp.py`, and Trainers on the ranks there are."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from optim import HybridAdam
from tests.zoo.mlp import build, inputs


class Plain(pl.LightningModule):
    """As a user writes it; remembers batches and losses."""

    def __init__(self, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = build()
        self.mean = torchmetrics.MeanMetric()
        self.batches: list[Tensor] = []
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.net(x)
        return result

    def loss(self, x: Tensor) -> Tensor:
        return (self(x) - x.flip(-1)).square().mean()

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        (x,) = batch
        loss = self.loss(x)
        self.batches.append(x.clone())
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        loss = self.loss(batch[0])
        self.mean.update(loss)
        self.log("metric", self.mean, on_epoch=True)
        self.log("val", loss, sync_dist=True)

    def test_step(self, batch: list[Tensor], number: int) -> None:
        self.log("test", self.loss(batch[0]), sync_dist=True)

    def predict_step(self, batch: list[Tensor], number: int) -> Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = HybridAdam(self.parameters(), lr=self.hparams["rate"], weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def loader(size: int = 24) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.cat([inputs(step) for step in range(3)])[:size]), batch_size=2)


class ThisGroup(LightningEnvironment):
    """The ranks that are there already."""

    @property
    def creates_processes_externally(self) -> bool:
        return True

    def world_size(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def global_rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def local_rank(self) -> int:
        return self.global_rank()

    def teardown(self) -> None:
        pass


def trainer(folder: Path | str, strategy: Any = "auto", **arguments: Any) -> pl.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    environment = ThisGroup()
    if isinstance(strategy, str) or environment.world_size() == 1:
        arguments.setdefault("use_distributed_sampler", False)
    return pl.Trainer(
        accelerator="cpu",
        devices=environment.world_size(),
        strategy=strategy,
        plugins=[] if isinstance(strategy, str) and strategy != "gemini" else [environment],
        default_root_dir=folder,
        **{**quiet, "max_epochs": 1, **arguments},
    )
