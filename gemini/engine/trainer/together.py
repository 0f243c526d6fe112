"""Ranks that begin each micro-batch together, and stop together.

[Note: Together] A rank whose loader ends early, or which gets a signal, would leave the others in a collective that it
never joins. So all ranks say before every micro-batch whether they have one and whether they were told to stop, by one
small all-reduce.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from gemini.engine.engine import Engine

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Together:
    """What ranks tell each other before a micro-batch."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._communicator = engine.communicator
        self.stopped_by: str | None = None
        """The name of the signal that this rank got while it listened last, if it got one."""
        self._told_to_stop: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, Ctrl-C and SIGTERM ask to stop after the step; a second Ctrl-C stops at once."""
        if threading.current_thread() is not threading.main_thread():  # Python gives signals to that one only
            yield
            return
        before = {each: signal.signal(each, self._ask) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            self.stopped_by, self._told_to_stop = self._told_to_stop, None  # what comes next must not stop for it

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self._told_to_stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._told_to_stop = signal.Signals(number).name

    def agree(self, has_batch: bool) -> tuple[bool, bool]:
        """(all ranks have a batch, one was told to stop). Collective."""
        flags = torch.tensor([not has_batch, self._told_to_stop is not None], dtype=torch.int64, device="cpu")
        if self._communicator.world_size > 1:
            flags = flags.to(self._communicator.device)
            self._communicator.all_reduce_max_(flags, "what the next batch is")
        ended, stops = flags.tolist()
        return not ended, bool(stops)

    def batches(self, loader: Any, fills_windows: bool = False) -> Iterator[Any]:
        """The loader's batches, for as long as every rank has one and none was told to stop. Collective.

        fills_windows: a window of micro-batches that is open when a rank is told to stop gets its other batches first:
            otherwise its gradients would be in no step.
        """
        # None may be a batch, so the end of the loader needs a mark of its own.
        nothing = object()
        source = iter(loader)
        while True:
            batch = next(source, nothing)
            # A batch that this rank has drawn is dropped if another rank has none: the shortest loader ends the epoch.
            all_have, stops = self.agree(batch is not nothing)
            if not all_have or (stops and not (fills_windows and self._engine.is_window_open())):
                return
            yield batch
