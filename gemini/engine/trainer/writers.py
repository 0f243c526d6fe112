"""Hooks that write metrics: to files of rank 0, through TensorBoard's library or as lines of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from gemini.engine.metric_files import JsonLinesFile, MetricFile, TensorBoardFile
from gemini.engine.trainer.hook import Hook

if TYPE_CHECKING:
    from gemini.engine.trainer.trainer import Trainer


class _Writes(Hook):
    """Writes after steps, epochs and evaluations, on rank 0."""

    kind: type[JsonLinesFile | TensorBoardFile]

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file: MetricFile | None = None
        self._last: dict[str, float] = {}  # metrics as they were written last

    def before_train(self, trainer: Trainer) -> None:
        # Only rank 0 has a file, so the other ranks write nothing and read no metric, for which they would wait.
        if trainer.engine.model.rank == 0:
            self._file = self.kind(self._path)

    def after_step(self, trainer: Trainer) -> None:
        self._write(trainer, "step")

    def after_epoch(self, trainer: Trainer) -> None:
        self._write(trainer, "epoch")

    def after_test(self, trainer: Trainer) -> None:
        self._write(trainer, "test")

    def after_train(self, trainer: Trainer) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, trainer: Trainer, event: str) -> None:
        if self._file is not None:
            # This reads every metric, so rank 0 waits for the device here. All are measured by then, because writers
            # have larger priorities.
            self._file.write(event, trainer.engine.global_steps, trainer.epoch, trainer.metrics)
            self._last = dict(trainer.metrics)


class JsonLines(_Writes):
    """One line per optimizer step, epoch and evaluation: {"event": "step", "step": 3, "epoch": 0, "loss": ...}.

    path: a file, which is added to; its folder is made. A step's line is there when the step is over.
    """

    priority = 60
    kind = JsonLinesFile


class TensorBoard(_Writes):
    """Scalars of every metric, by optimizer step. Needs the package tensorboard.

    path: a folder for event files. Raises ImportError, with what to install, when the training begins.
    """

    priority = 61
    kind = TensorBoardFile

    def after_epoch(self, trainer: Trainer) -> None:
        """Do nothing: what an epoch adds is written with its evaluation, with the next step, or at the end."""

    def after_train(self, trainer: Trainer) -> None:
        # What the last epoch added, such as its mean loss; the rest was written with its last step. Metrics that have
        # not changed would be written for the same step twice, and TensorBoard would show both values.
        new = {name: value for name, value in trainer.metrics.items() if self._last.get(name) != value}
        if self._file is not None and new:
            self._file.write("epoch", trainer.engine.global_steps, trainer.epoch, new)
        super().after_train(trainer)
