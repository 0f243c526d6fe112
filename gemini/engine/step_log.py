"""Logs each optimizer step as the config asks: lines of progress, and files of metrics. Only rank 0 logs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from gemini.dist_logger import get_dist_logger
from gemini.engine.config import Config
from gemini.engine.metric_files import JsonLinesFile, MetricFile, TensorBoardFile
from gemini.optimizer.step_report import StepReport


class StepLog:
    """Logs learning rate, gradient norm, loss scale, and the mean loss of the window's micro-batches on this rank."""

    def __init__(self, config: Config, rank: int) -> None:
        self._every = config.steps_per_print
        self._files: list[MetricFile] = []
        self._losses: list[Tensor] = []
        monitors = config.monitors
        self.is_on = rank == 0 and bool(self._every or monitors.tensorboard or monitors.json_lines)
        # Files are made by one rank only: on a shared disk the ranks' files would be the same one.
        if not self.is_on:
            return
        if monitors.tensorboard is not None:
            self._files.append(TensorBoardFile(Path(monitors.tensorboard.output_path, monitors.tensorboard.job_name)))
        if monitors.json_lines is not None:
            json_settings = monitors.json_lines
            self._files.append(JsonLinesFile(Path(json_settings.output_path, f"{json_settings.job_name}.jsonl")))

    def add(self, loss: Tensor) -> None:
        """Record a micro-batch's undivided loss. It is read after the step, so that the host does not wait here."""
        if self.is_on:
            # `detach` lets the graph go: its activations would be held until the step.
            self._losses.append(loss.detach())

    def discard(self) -> None:
        """Drop the losses of the window, whose micro-batches are in no step."""
        self._losses.clear()

    def after_step(self, step: int, lr: float, report: StepReport) -> None:
        """Log optimizer step number `step`, from 1, which had this learning rate. Raises OSError on a full disk."""
        # The host waits for the device here, on rank 0, once per step rather than once per micro-batch.
        losses, self._losses = [float(loss) for loss in self._losses], []
        # The report has the scale of the step's own gradients. The optimizer's is the next step's by now.
        metrics = {
            "loss": sum(losses) / len(losses),
            "lr": lr,
            "loss_scale": report.loss_scale,
            "grad_norm": report.grad_norm,
        }
        self.write("step", step, metrics)
        if self._every and step % self._every == 0:
            words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
            get_dist_logger().info(f"step {step}: {words}")

    @property
    def has_files(self) -> bool:
        """Whether this rank writes files of metrics."""
        return bool(self._files)

    def write(self, event: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics to all files, if there are any. Raises OSError on a full disk."""
        for file in self._files:
            # An engine counts no epochs: 0 stands in the field that a `Trainer` fills.
            file.write(event, step, 0, metrics)

    def close(self) -> None:
        """Close the files."""
        for file in self._files:
            file.close()
        self._files.clear()
