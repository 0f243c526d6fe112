"""What a config asks to be told of each optimizer step: lines of progress, and files of metrics. Rank 0 tells."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from gemini.dist_logger import get_dist_logger
from gemini.engine.config import Config
from gemini.engine.metric_files import JsonLinesFile, MetricFile, TensorBoardFile


class StepLog:
    """Loss (the mean over the window's micro-batches on this rank), learning rate, gradient norm and loss scale."""

    def __init__(self, config: Config, rank: int) -> None:
        self._every = config.steps_per_print
        self._files: list[MetricFile] = []
        self._losses: list[Tensor] = []
        monitors = config.monitors
        self.is_on = rank == 0 and bool(self._every or monitors.tensorboard or monitors.json_lines)
        if not self.is_on:
            return
        if monitors.tensorboard is not None:
            self._files.append(TensorBoardFile(Path(monitors.tensorboard.output_path, monitors.tensorboard.job_name)))
        if monitors.json_lines is not None:
            its = monitors.json_lines
            self._files.append(JsonLinesFile(Path(its.output_path, f"{its.job_name}.jsonl")))

    def add(self, loss: Tensor) -> None:
        """A micro-batch's loss, before it is divided. It is read after the step, so that nobody waits for it here."""
        if self.is_on:
            self._losses.append(loss.detach())

    def discard(self) -> None:
        """The window's micro-batches so far are in no step."""
        self._losses.clear()

    def after_step(self, step: int, lr: float, grad_norm: float | None, loss_scale: float) -> None:
        """Optimizer step number `step`, from 1, is over."""
        losses, self._losses = [float(loss) for loss in self._losses], []
        metrics = {"loss": sum(losses) / len(losses), "lr": lr, "loss_scale": loss_scale}
        if grad_norm is not None:
            metrics["grad_norm"] = grad_norm
        for file in self._files:
            file.write("step", step, 0, metrics)
        if self._every and step % self._every == 0:
            words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            get_dist_logger().info(f"step {step}: {words}")

    def close(self) -> None:
        """Nothing more will come."""
        for file in self._files:
            file.close()
        self._files.clear()
