"""A user's LightningModule under the strategy: whether it is sharded already, and what it knows of its device."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from torch import nn
from torchmetrics import Metric

from gemini.access.link import Link
from gemini.access.parameter_link import any_link_of


def tell_device(module: nn.Module, device: torch.device) -> None:
    """Do what `module.to(device)` does beside moving parameters, each of which would be fetched for it. Local."""
    for each in module.modules():
        if isinstance(each, Metric):
            each.to(device)  # its state is neither parameter nor buffer
        elif isinstance(each, pl.LightningModule):
            each._device = device


def is_sharded(module: nn.Module) -> bool:
    """Whether a parameter is in chunks of a `ShardedModel`, and not of a model under construction."""
    return any(isinstance(any_link_of(parameter), Link) for parameter in module.parameters())
