"""What a step writes to the log and to files of metrics."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from gemini.engine.config import Config
from gemini.log import get_dist_logger, warn_at_script
from gemini.optimizer.step import StepReport

# -- Files of metrics, written by one rank: lines of JSON, and TensorBoard's event files.


class MetricFile(Protocol):
    """A file to which metrics are written."""

    def write(self, event: str, step: int, epoch: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLinesFile:
    """A file of one JSON line per event, flushed when `write` returns. Appends to an existing file."""

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        # Lines are added, because a training that is started once more from a checkpoint goes on with its file.
        self._file = path.open("a", encoding="utf-8")

    def write(self, event: str, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        """Raises OSError if the disk is full."""
        # JSON has no word for NaN and infinity: null stands for them.
        numbers = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        print(json.dumps({"event": event, "step": step, "epoch": epoch, **numbers}), file=self._file, flush=True)

    def close(self) -> None:
        self._file.close()


class TensorBoardFile:
    """A folder of TensorBoard scalars, by step. Raises ImportError without the package tensorboard."""

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ImportError("TensorBoard's files need the package tensorboard: pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder))

    def write(self, event: str, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


# -- Monitors that are libraries of their own, by the one call form that each has. A script also runs where the library
# is not installed: metrics are no reason to stop.


LIBRARIES = ("wandb", "comet", "trackio", "mlflow")


class LibraryRun:
    """A run of wandb, trackio, comet or mlflow. Raises what the library raises."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        library = importlib.import_module({"comet": "comet_ml"}.get(name, name))
        given = dict(options)
        if name == "comet":
            run = library.start(**given)
            self._log, self._end = run.log_metrics, run.end
        elif name == "mlflow":
            uri, experiment = given.pop("tracking_uri", None), given.pop("experiment_name", None)
            if uri is not None:
                library.set_tracking_uri(uri)
            if experiment is not None:
                library.set_experiment(experiment)
            library.start_run(**given)
            self._log, self._end = library.log_metrics, library.end_run
        else:  # trackio has the names of wandb
            library.init(**given)
            self._log, self._end = library.log, library.finish

    def write(self, event: str, step: int, epoch: int, metrics: Mapping[str, float]) -> None:
        self._log(dict(metrics), step=step)

    def close(self) -> None:
        self._end()


def run_of(name: str, options: Mapping[str, Any]) -> LibraryRun | None:
    """A run of that library. None, with a warning: it is not installed, or does not start."""
    try:
        return LibraryRun(name, options)
    except ImportError as error:
        warn_at_script(f"monitors.{name}: nothing is logged there, because {error.name or error} is not installed")
    except Exception as error:  # whatever a library raises without a network, a login or a valid argument
        warn_at_script(f"monitors.{name}: nothing is logged there: {type(error).__name__}: {error}")
    return None


# -- Logs each optimizer step as the config asks: lines of progress, and files of metrics. Only rank 0 logs.


class StepLog:
    """Logs learning rate, gradient norm, loss scale, and the mean loss of the window's micro-batches on this rank."""

    def __init__(self, config: Config, rank: int) -> None:
        self._every = config.steps_per_print
        self._files: list[MetricFile] = []
        self._losses: list[Tensor] = []
        monitors = config.monitors
        libraries = {name: getattr(monitors, name) for name in LIBRARIES if getattr(monitors, name) is not None}
        self.is_on = rank == 0 and bool(self._every or monitors.tensorboard or monitors.json_lines or libraries)
        # Files are made by one rank only: on a shared disk the ranks' files would be the same one.
        if not self.is_on:
            return
        if monitors.tensorboard is not None:
            self._files.append(TensorBoardFile(Path(monitors.tensorboard.output_path, monitors.tensorboard.job_name)))
        if monitors.json_lines is not None:
            json_settings = monitors.json_lines
            self._files.append(JsonLinesFile(Path(json_settings.output_path, f"{json_settings.job_name}.jsonl")))
        self._files += filter(None, (run_of(name, options) for name, options in libraries.items()))

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
