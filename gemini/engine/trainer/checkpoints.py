"""`CheckpointHook`: a `Trainer` that saves as it goes, and goes on where it was; `Position`: where that is.

An epoch that was under way goes on in the middle of its data. A loader with a `state_dict()`, such as torchdata's
`StatefulDataLoader`, goes on by itself. Of others the batches that were trained are drawn again and left out, with the
random numbers that the epoch began with, which decide its order.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from gemini.checkpoint.directory import Directory, Keep
from gemini.checkpoint.values import random_state, set_random_state
from gemini.engine.engine import Engine
from gemini.engine.trainer.hooks import Hook
from gemini.log import get_dist_logger

if TYPE_CHECKING:
    from gemini.engine.trainer.trainer import Trainer


# -- Ranks that begin each micro-batch together, and stop together.
#
# [Note: Together] A rank whose loader ends early, or which gets a signal, would leave the others in a collective that
# it never joins. So all ranks say before every micro-batch whether they have one and whether they were told to stop, by
# one small all-reduce.


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


_COUNTS = ("epoch", "num_batches", "first_epoch", "first_step")


class Position:
    """Where a training is: equal on all ranks, but for random numbers and a loader's own state."""

    def __init__(self, device: torch.device) -> None:
        self.epoch = 0
        self.num_batches = 0  # of this epoch and rank, that were trained
        self.first_epoch = 0  # of this `fit`
        self.first_step = 0  # number of optimizer steps before this `fit`
        self._device = device
        self._loader: Any = None
        self._epoch_start: dict[str, Any] | None = None  # random numbers
        self._is_resumed = False

    def begin(self, first_epoch: int, first_step: int, loader: Any) -> None:
        """A `fit` begins."""
        self.first_epoch = self.epoch = first_epoch
        self.first_step, self._loader = first_step, loader

    @property
    def counts(self) -> dict[str, int]:
        """What all ranks share of it."""
        return {name: getattr(self, name) for name in _COUNTS}

    def resume(self, counts: dict[str, int], saved_on: int, ranks: int) -> None:
        """Go on from the counts of a checkpoint, which so many ranks have saved."""
        for name in _COUNTS:
            setattr(self, name, int(counts[name]))
        # Each rank has another part of the data, if there are others: the same number of samples is left out.
        self.num_batches = self.num_batches * saved_on // ranks
        self._is_resumed = True

    def state_dict(self) -> dict[str, Any]:
        """What this rank alone has of it."""
        loader = self._loader.state_dict() if hasattr(self._loader, "state_dict") else None
        return {"epoch_start": self._epoch_start, "loader": loader}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What this rank alone had of it."""
        self._epoch_start = state["epoch_start"]
        if state["loader"] is not None and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state["loader"])

    def batches(self, epoch: int, loader: Any) -> Iterator[Any]:
        """The epoch's batches that are not trained yet. Local."""
        if not self._is_resumed:
            self.epoch, self.num_batches = epoch, 0
            self._epoch_start = random_state(self._device)
            return iter(loader)
        self._is_resumed = False
        if hasattr(loader, "load_state_dict"):
            return iter(loader)
        now = random_state(self._device)
        if self._epoch_start is not None:
            set_random_state(self._epoch_start, self._device)
        source: Iterator[Any] = iter(loader)
        for _ in range(self.num_batches):
            next(source, None)
        set_random_state(now, self._device)
        return source


class CheckpointHook(Hook):
    """Saves every so many steps or minutes, and when training ends: after the last step, at SIGTERM and at Ctrl-C.

    On as many ranks training goes on with the same bits.

    Args:
        directory: of the training's checkpoints.
        every_steps: optimizer steps between two saves. None: no such saves.
        every_minutes: minutes of rank 0's clock between two saves. None: no such saves.
        keep: how many of the newest stay, or a `Keep`. None: all.
        asynchronous: whether training goes on while a checkpoint is written.
        resume: "latest" goes on with the newest checkpoint, if there is one; a tag with that one. None begins anew.

    Raises ValueError for numbers that are not above 0.
    """

    priority = 90  # after all that measures and logs the step

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_minutes: float | None = None,
        keep: int | Keep | None = 3,
        asynchronous: bool = False,
        resume: str | None = None,
    ) -> None:
        for name, value in (("every_steps", every_steps), ("every_minutes", every_minutes)):
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be more than 0, found {value!r}")
        self.directory = Path(directory)
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.keep = keep
        self.asynchronous = asynchronous
        self.resume = resume
        self._saved_step = -1
        self._saved_at = time.monotonic()

    def before_train(self, trainer: Trainer) -> None:
        """Go on with a checkpoint, if one is asked for and there. Collective."""
        if self.resume is None or (self.resume == "latest" and not Directory(self.directory).has_any()):
            return
        engine = trainer.engine
        tag = None if self.resume == "latest" else self.resume
        path, state = engine.load_checkpoint(self.directory, tag, data=trainer.position)
        trainer.position.resume(state["position"], state["ranks"], engine.model.world_size)
        self._saved_step = engine.global_steps
        get_dist_logger().info(f"going on after step {engine.global_steps}, from {path}", ranks=[0])

    def after_step(self, trainer: Trainer) -> None:
        """Save, if it is time. Collective."""
        step = trainer.engine.global_steps
        if (self.every_steps and step % self.every_steps == 0) or self._minutes_are_over(trainer):
            self._save(trainer, self.asynchronous)

    def after_train(self, trainer: Trainer) -> None:
        """Save the end of the training, unless the last step was saved. Collective."""
        trainer.engine.finish_saving()
        if trainer.engine.global_steps != self._saved_step:
            self._save(trainer, asynchronous=False)

    def _minutes_are_over(self, trainer: Trainer) -> bool:
        if self.every_minutes is None:
            return False
        over = time.monotonic() - self._saved_at >= 60 * self.every_minutes
        communicator = trainer.engine.communicator
        # One clock decides: a rank whose clock is a little ahead would save alone.
        flag = torch.tensor([over and communicator.rank == 0], dtype=torch.int64, device=communicator.device)
        communicator.all_reduce_max_(flag, "whether it is time to save")
        return bool(flag.item())

    def _save(self, trainer: Trainer, asynchronous: bool) -> None:
        engine, position = trainer.engine, trainer.position
        state = {"position": position.counts, "ranks": engine.model.world_size}
        how: dict[str, Any] = {"keep": self.keep, "asynchronous": asynchronous}
        engine.save_checkpoint(self.directory, client_state=state, data=position, **how)
        self._saved_step, self._saved_at = engine.global_steps, time.monotonic()
