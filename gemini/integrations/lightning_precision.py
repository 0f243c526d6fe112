"""`GeminiPrecision`: what `Trainer(precision=...)` means for a sharded model, and loss scaling and clipping by ours."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch import Tensor, nn
from torch.optim import Optimizer

from gemini.engine.config import Config
from gemini.errors import ConfigError, UnsupportedError
from gemini.integrations.precision import mixed_weights
from gemini.model.operators import cast_tensors
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.settings import CASTABLE_DTYPES, Weights

_DTYPES = {
    "32-true": None,
    "bf16-mixed": torch.bfloat16,
    "bf16-true": torch.bfloat16,
    "16-mixed": torch.float16,
    "16-true": torch.float16,
}


class GeminiPrecision(Precision):
    """Precision of a model whose weights are sharded, and which keep fp32 masters where they have 16 bits.

    "bf16-mixed" and "16-mixed" cast at the border of each module of the LightningModule that has weights, so that its
    steps compute losses in fp32, as with Lightning's autocast. "bf16-true" and "16-true" cast the batch, and the step
    computes in 16 bits. In fp16 losses are scaled.

    Raises UnsupportedError for a precision plugin of another kind.
    """

    def __init__(self, plugin: Precision | None) -> None:
        # Every plugin is a subclass of `Precision`, so `isinstance` would accept any, such as `DoublePrecision`.
        if plugin is not None and type(plugin) not in (Precision, MixedPrecision, HalfPrecision):
            raise UnsupportedError(
                f"{type(plugin).__name__} converts a model itself: with GeminiStrategy choose precision= "
                f"{', '.join(map(repr, _DTYPES))}"
            )
        self.precision = "32-true" if plugin is None else plugin.precision
        self._optimizers: list[Optimizer] = []

    @property
    def auto(self) -> dict[str, Any]:
        """Values for keys of DeepSpeed's that say "auto"."""
        dtype = _DTYPES[self.precision]
        return {"bf16.enabled": dtype is torch.bfloat16, "fp16.enabled": dtype is torch.float16}

    def weights(self, config: Config, module: nn.Module) -> Weights:
        """`dtype=` of `ShardedModel`. Local. Raises ConfigError if the config names another dtype."""
        dtype = _DTYPES[self.precision]
        if dtype is None or self.precision.endswith("true"):
            return mixed_weights(config, dtype, f"precision is {self.precision!r}")
        if config.dtype not in (None, dtype):
            raise ConfigError(
                f"precision is {self.precision!r}, and the config says dtype={config.dtype}: leave one of them out"
            )
        # What is in none of these modules, such as a parameter of the LightningModule itself, stays in fp32.
        by_name: dict[type[nn.Module] | str, torch.dtype | None] = dict.fromkeys(_borders(module), dtype)
        return by_name | {"*": torch.float32}

    def cast(self, data: Any) -> Any:
        """Cast a batch to 16 bits if the step computes in them outside the model's forward. Local. Raises nothing."""
        dtype = _DTYPES[self.precision] if self.precision.endswith("true") else None
        return data if dtype is None else cast_tensors(data, CASTABLE_DTYPES, dtype)

    def connect(
        self, model: nn.Module, optimizers: list[Optimizer], lr_schedulers: list[Any]
    ) -> tuple[nn.Module, list[Optimizer], list[Any]]:
        """Lightning shows the optimizers. Local. Raises nothing."""
        self._optimizers = optimizers
        return model, optimizers, lr_schedulers

    def pre_backward(self, tensor: Tensor, module: pl.LightningModule) -> Tensor:  # type: ignore[override]
        """Scale the loss in fp16. Local. Raises what the module's hooks raise."""
        # At most one of them is sharded, so the loss is scaled once. Like Lightning's `MixedPrecision`, scale before
        # `super()` runs the hooks: `on_before_backward` sees the loss that backward gets.
        for optimizer in self._optimizers:
            if isinstance(optimizer, ShardedOptimizer):
                tensor = optimizer.scale(tensor)
        return super().pre_backward(tensor, module)

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clip by the exact norm over all ranks. Collective. Raises what `ShardedOptimizer.clip_grad_norm_` raises."""
        plain_optimizer = plain_of(optimizer)
        if isinstance(plain_optimizer, ShardedOptimizer):
            plain_optimizer.clip_grad_norm_(clip_val)
        else:
            super().clip_grad_by_norm(optimizer, clip_val)


def plain_of(optimizer: Any) -> Any:
    """The optimizer that Lightning's wrapper is around, whose class pretends to be that of the optimizer."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def _borders(module: nn.Module, above: str = "") -> list[str]:
    """Names of the modules with weights that the steps of `module` call: lists and dicts are looked into."""
    found = []
    for name, child in module.named_children():
        # These have no forward of their own, so casts around them would never run.
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            found += _borders(child, f"{above}{name}.")
        elif next(child.parameters(), None) is not None:
            found.append(f"{above}{name}")
    return found
