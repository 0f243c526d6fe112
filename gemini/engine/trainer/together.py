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
        # Python lets only the main thread set handlers, and runs them there: `signal.signal` would raise here.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        # The first signal must not raise: the other ranks would go on with the step and wait for this one. `_ask` notes
        # it, and all ranks hear of it in the next `agree`.
        before = {each: signal.signal(each, self._ask) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            # The signal has had its effect. An evaluation or a training that comes next must not stop for it.
            self.stopped_by, self._told_to_stop = self._told_to_stop, None

    def _ask(self, number: int, frame: FrameType | None) -> None:
        # Whoever presses Ctrl-C again does not want to wait for the step. The exception leaves `fit`, which tells the
        # others.
        if self._told_to_stop is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._told_to_stop = signal.Signals(number).name

    def agree(self, has_batch: bool) -> tuple[bool, bool]:
        """(all ranks have a batch, one was told to stop). Collective."""
        # The device is named because a script may have set another default device. One rank needs no copy and waits for
        # nothing.
        flags = torch.tensor([not has_batch, self._told_to_stop is not None], dtype=torch.int64, device="cpu")
        if self._communicator.world_size > 1:
            flags = flags.to(self._communicator.device)
            # The maximum is "any rank": both flags are questions of that kind, so one collective answers them.
            self._communicator.all_reduce_max_(flags, "what the next batch is")
        # The host waits for the device here, once per micro-batch, where the ranks communicate over a GPU.
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
            # A rank draws its batch first, because no loader can be asked whether it has another one.
            batch = next(source, nothing)
            # A batch that this rank has drawn is dropped if another rank has none: the shortest loader ends the epoch.
            all_have, stops = self.agree(batch is not nothing)
            if not all_have or (stops and not (fills_windows and self._engine.is_window_open())):
                return
            yield batch
