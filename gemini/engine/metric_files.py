"""Files of metrics, written by one rank: lines of JSON, and TensorBoard's event files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


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
