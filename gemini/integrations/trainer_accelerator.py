"""The accelerator of a `transformers.Trainer` whose model is sharded: what it is asked to do is done by ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import accelerate
from torch import Tensor, nn

from gemini.errors import UnsupportedError
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer


class TrainerAccelerator(accelerate.Accelerator):
    """The Trainer makes an `accelerate.Accelerator` by itself, which becomes one of these before anyone uses it."""

    sharded_optimizer: ShardedOptimizer | None = None

    def check(self) -> None:
        """Raises UnsupportedError where `accelerate launch` was told to shard models by another library. Local."""
        kind = self.distributed_type.value
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise UnsupportedError(
                f"Accelerate is set to {kind}, which shards or moves models itself: choose its plain training on "
                "several processes (torchrun, or accelerate launch --multi_gpu)"
            )

    @property
    def its_optimizer(self) -> ShardedOptimizer:
        assert self.sharded_optimizer is not None, "the Trainer makes it before it trains"
        return self.sharded_optimizer

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        """Return a sharded optimizer as it is: Accelerate would load its whole state on every rank."""
        if isinstance(optimizer, ShardedOptimizer):
            return optimizer
        return super().prepare_optimizer(optimizer, device_placement)

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Compute gradients of the loss, times the loss scale in fp16. Collective."""
        # The Trainer divides the loss by its micro-batches itself and tells Accelerate of one, so nothing divides here.
        # Its keyword arguments are for DeepSpeed and LOMO, whose backwards are not ours.
        self.its_optimizer.backward(loss)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Return the exact norm of all gradients, before the next step clips them to `max_norm`, which may be inf."""
        # The Trainer always gives the parameters of the whole model, so clipping a part of them is not a case here.
        return self.its_optimizer.clip_grad_norm_(max_norm, norm_type)

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """The schedule stays where a gradient was not finite."""
        report = self.its_optimizer.last_step
        return report is not None and report.skipped is not None

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do nothing: every micro-batch is reduced, since sums of whole gradients take 4 bytes a parameter and rank."""
        yield

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The plain module, under whose name and class the Trainer knows the model."""
        # `accelerate` unwraps classes that it knows, such as DDP, and `ShardedModel` is none of them.
        unwrapped = model.module if isinstance(model, ShardedModel) else model
        return super().unwrap_model(unwrapped, *args, **kwargs)  # type: ignore[no-any-return]
