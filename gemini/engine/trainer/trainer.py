"""`Trainer`: epochs over a loader, evaluation between them, hooks around both."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor

from gemini.dist_logger import get_dist_logger
from gemini.engine.engine import Engine
from gemini.engine.loaders import length_of, tell_epoch
from gemini.engine.moving import moves_by_metric
from gemini.engine.trainer.batches import Outcome, forward, moved, run
from gemini.engine.trainer.checkpoints import Position
from gemini.engine.trainer.hook import Hook
from gemini.engine.trainer.metrics import Metrics
from gemini.engine.trainer.schedule import LRSchedulerHook
from gemini.engine.trainer.together import Together
from gemini.engine.trainer.window import Window
from gemini.errors import GeminiError

# To show a metric the host reads it from the device, and waits for all that the device has been given to do. At every
# step that would leave the device without work.
_SHOWN_EVERY_S = 0.1


class Trainer:
    """Trains an engine's model on the batches of a loader. Collective: every rank makes and calls one alike.

    A batch is a mapping, which the model takes by keyword and returns `loss` of, or a pair of data and label for the
    engine's criterion. Ranks begin every micro-batch together: an epoch ends where the shortest rank's loader does.

    Args:
        engine: from `initialize`.

    Raises TypeError for anything else.

    Example:
        >>> engine, *_ = initialize(
        ...     torch.nn.Linear(8, 1), criterion=torch.nn.MSELoss(), config={"optimizer": {"type": "HybridAdam"}}
        ... )
        >>> Trainer(engine).fit([(torch.ones(4, 8), torch.ones(4, 1))], epochs=2)
    """

    def __init__(self, engine: Engine) -> None:
        if not isinstance(engine, Engine):
            raise TypeError(f"Trainer() takes an Engine, found {type(engine).__name__}: make one with initialize()")
        self.engine = engine
        self.metrics = Metrics()
        """What hooks have measured last, by name. Reading a number waits for the device, if it is there."""
        self.epoch = 0
        """The epoch that runs, from 0. Another `fit` of this trainer goes on counting; a new trainer begins at 0."""
        self._num_epochs = 0  # that have begun
        self.position = Position(engine.device)
        """Where the training is in its epochs and data, as checkpoints have it."""
        self._together = Together(engine)
        self._window = Window(engine)
        self._hooks: list[Hook] = []

    @property
    def optimizer(self) -> Any:
        """The engine's optimizer."""
        return self.engine.optimizer

    @property
    def stopped_by(self) -> str | None:
        """The signal that ended the last `fit` early on this rank, such as "SIGTERM"."""
        return self._together.stopped_by

    def fit(
        self,
        train_dataloader: Iterable[Any],
        epochs: int,
        max_steps: int | None = None,
        test_dataloader: Iterable[Any] | None = None,
        test_interval: int = 1,
        hooks: Sequence[Hook] | None = None,
        display_progress: bool = False,
    ) -> None:
        """Train. Collective.

        Ctrl-C and SIGTERM, on any rank, end it after the optimizer step that runs, with all of its micro-batches; hooks
        then see its end as always. A window of micro-batches that an epoch leaves open goes on with the next one. After
        the last epoch a step is made of those that are there, and their sum is divided by a whole window's number.

        Where a device runs out of memory in a forward or backward, model data gives up a part of it and the step is
        made once more, with the same batches, random numbers and buffers: its bits are those of a step that had the
        memory. Hooks see each micro-batch once. The error is raised where model data cannot be less.

        A schedule that `initialize` was given as an object moves after every optimizer step, unless an
        `LRSchedulerHook` is there.

        Args:
            train_dataloader: iterated once per epoch. Before it `set_epoch` of its samplers and its dataset is called,
                with numbers that go on from those of an earlier `fit` of this trainer: no shuffle is repeated.
            epochs: how often, in this call.
            max_steps: optimizer steps after which training ends. None: only epochs count.
            test_dataloader: for an evaluation after every `test_interval` epochs, and after the last.
            test_interval: epochs.
            hooks: called in the order of their `priority`, then of this list.
            display_progress: whether rank 0 shows a progress bar.

        Raises ValueError for numbers that are not valid, GeminiError if any rank's loader is empty, and what the model,
        its criterion or a hook raises; the other ranks then raise RemoteRankError.
        """
        for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
            if (value is not None or name != "max_steps") and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of at least 1, found {value!r}")
        self._hooks = _in_order([*(hooks or ()), *self._schedule_hooks(hooks or ())])
        # `max_steps` counts the steps of this call: the engine may have made some before.
        position = self.position
        total = _total_steps(train_dataloader, epochs, self.engine.batch_sizes.accumulation, max_steps)
        # `publishing` is outermost, so that it also hears of a hook, a loader or a second Ctrl-C that raises. The other
        # ranks would wait for this one in their next collective otherwise.
        with (
            self.engine.communicator.publishing(),
            self._together.listening(),
            self._bar(display_progress, "train", total) as advance,
        ):
            # After a training that has failed, the ranks start together again here. A forward would do so, too, but
            # hooks and Together's all-reduce come before the first one.
            self.engine.recover()
            self._discard_window()
            position.begin(self._num_epochs, self.engine.global_steps, train_dataloader)
            self._tell("before_train")
            # A hook may have gone on with a checkpoint.
            begun = position.first_epoch
            for self.epoch in range(position.epoch, begun + epochs):
                last = None if max_steps is None else position.first_step + max_steps
                num_epochs = self.epoch + 1 - begun  # of this call
                is_over = self._epoch(train_dataloader, last, advance, num_epochs == epochs)
                is_last = is_over or num_epochs == epochs
                # `_stops` is a collective: whatever is asked before it, here and below, is equal on all ranks.
                if test_dataloader is not None and not self._stops():
                    if is_last or num_epochs % test_interval == 0:
                        self._evaluate(test_dataloader)
                # A signal during the evaluation begins no epoch without a batch, for which a schedule would move.
                if is_last or self._stops():
                    break
            self._tell("after_train")
        if self.stopped_by is not None:
            get_dist_logger().warning(f"training stopped after step {self.engine.global_steps}: {self.stopped_by}")

    def _discard_window(self) -> None:
        """Drop backwards that no step has used, such as those of a failed training: the first step would count them."""
        if self.engine.is_window_open():
            self.engine.discard_window()
            get_dist_logger().warning(
                "fit() drops the gradients of backwards before it, which no step has used", ranks=[0]
            )

    def _epoch(self, loader: Iterable[Any], last_step: int | None, advance: Any, is_last: bool) -> bool:
        """Train one epoch. Returns True if training is over."""
        engine = self.engine
        tell_epoch(loader, self.epoch)
        self._num_epochs = self.epoch + 1
        engine.train()
        self._tell("before_epoch")
        position = self.position
        # All ranks get equally many batches from here, so their number and the steps below are equal on all of them.
        for batch in self._together.batches(position.batches(self.epoch, loader), fills_windows=True):
            position.num_batches += 1
            outcome = self._window.train(batch)
            self._tell("after_micro_batch", batch, outcome)
            # The answer is read before the step, which empties the window.
            steps = engine.is_gradient_accumulation_boundary()
            self._window.step()
            if steps:
                self._tell("after_step")
                advance(self.metrics)
                if last_step is not None and engine.global_steps >= last_step:
                    break
        # A signal before the first micro-batch also ends the epoch without a batch, and is no error of the loader's.
        if position.num_batches == 0 and not self._stops():
            once = ". A generator gives its batches once: give a list or a DataLoader" if self.epoch else ""
            raise GeminiError(f"the training loader of a rank is empty: every rank needs a batch{once}")
        stops = self._stops()
        # No further epoch fills this window. Its gradients would be in no step, and a later `fit` would drop them.
        if (is_last or stops) and engine.is_window_open():
            self._window.step(last=True)
            self._tell("after_step")
            advance(self.metrics)
        self._tell("after_epoch")
        return stops or (last_step is not None and engine.global_steps >= last_step)

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[Hook] | None = None,
        display_progress: bool = False,
    ) -> dict[str, float]:
        """Run forwards without gradients over a loader; returns the metrics that hooks made of them. Collective.

        test_dataloader, display_progress: as in `fit`.
        hooks: of this evaluation. None: those of the last `fit`, or of the one that runs.

        Raises GeminiError if any rank's loader is empty, and what the model or a hook raises.
        """
        others = self._hooks
        if hooks is not None:
            self._hooks = _in_order(hooks)
        try:
            with (
                self.engine.communicator.publishing(),
                self._bar(display_progress, "evaluate", length_of(test_dataloader)) as advance,
            ):
                # A forward would recover by itself, but Together's all-reduce comes first, which fails after a failure.
                self.engine.recover()
                self._evaluate(test_dataloader, advance)
        finally:
            self._hooks = others  # a hook of `fit` may have called this
        return dict(self.metrics)

    def _evaluate(self, loader: Iterable[Any], advance: Any = None) -> None:
        num_batches = 0
        self._tell("before_test")
        with self._evaluating():
            for batch in self._together.batches(loader):
                num_batches += 1
                self._tell("after_test_batch", batch, run(self.engine, batch))
                if advance is not None:
                    advance(self.metrics)
        if num_batches == 0 and not self._stops():
            raise GeminiError("the test loader of a rank is empty: every rank needs a batch")
        self._tell("after_test")

    def predict(self, data: Any) -> Any:
        """Return the model's output for data without labels, in evaluation mode and without gradients. Collective.

        data: a mapping for keyword arguments, a tuple or list for positional ones, or one tensor. Raises what the model
        raises.
        """
        # The data are moved inside: a batch that does not fit this rank's device alone must be told to the other ranks.
        with self._evaluating(), self.engine.communicator.publishing():
            return forward(self.engine, moved(data, self.engine.device))

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """A context in evaluation mode and without gradients, after which every module has the mode that it had."""
        modes = [(module, module.training) for module in self.engine.model.modules()]
        self.engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            # A script may keep parts in evaluation mode, such as batch norms. Each module comes after the one around
            # it, whose `train` changes all modules inside.
            for module, was_training in modes:
                if module.training != was_training:
                    module.train(was_training)

    def sum_over_ranks(self, numbers: Tensor) -> Tensor:
        """`numbers` added over all ranks, in rank order, as a new tensor, for hooks. Collective. Raises nothing."""
        communicator = self.engine.communicator
        # An all-reduce adds in an order of the backend's, on which the last bits of a metric would depend. The numbers
        # are few, so to gather all of them costs little.
        rows = communicator.all_gather_bytes(numbers.cpu().numpy().tobytes(), "a metric")
        # torch warns of bytes, since a write to the tensor would change them; a `bytearray` is a copy.
        every = [torch.frombuffer(bytearray(row), dtype=numbers.dtype).view(numbers.shape) for row in rows]
        return torch.stack(every).sum(0)

    def _schedule_hooks(self, hooks: Sequence[Hook]) -> list[Hook]:
        """The hook that moves the schedule if neither the engine nor a hook of the user's does: the rate would stay."""
        engine = self.engine
        if engine.lr_scheduler is None or engine.moves_schedule:
            return []
        if any(isinstance(hook, LRSchedulerHook) for hook in hooks) or moves_by_metric(engine.lr_scheduler):
            return []
        return [LRSchedulerHook(engine.lr_scheduler, by_epoch=False, store_lr_in_state=False)]

    def _tell(self, name: str, batch: Any = None, outcome: Outcome | None = None) -> None:
        # Only hooks of a micro-batch or a batch of an evaluation are given these two.
        given = () if outcome is None else (batch, outcome)
        for hook in self._hooks:
            getattr(hook, name)(self, *given)

    def _stops(self) -> bool:
        """A rank was told to stop. Collective."""
        return self._together.agree(has_batch=True)[1]

    @contextmanager
    def _bar(self, shows: bool, what: str, total: int | None) -> Iterator[Any]:
        """Yields what is called with the metrics after every step."""
        # Ranks of one terminal would overwrite each other's bars.
        if not shows or self.engine.model.rank != 0:
            yield lambda metrics: None
            return
        columns = (TextColumn(what), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # In a narrow terminal the metrics go on in the next line. Otherwise rich cuts off the other columns first.
        words_column = TextColumn("{task.fields[words]}", table_column=Column())
        with Progress(*columns, words_column) as progress:
            task = progress.add_task(what, total=total, words="")
            shown_at = float("-inf")

            def advance(metrics: Mapping[str, float]) -> None:
                nonlocal shown_at
                progress.advance(task)
                if time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                    progress.update(task, words=_in_words(metrics))
                    shown_at = time.monotonic()

            yield advance
            # The bar ends with the last step's numbers, which may have come too soon after those that it shows.
            progress.update(task, words=_in_words(self.metrics))


def _in_order(hooks: Iterable[Any]) -> list[Hook]:
    """Sort hooks by priority. Raises TypeError for anything but hooks."""
    for hook in hooks:
        if not isinstance(hook, Hook):
            name = f"the class {hook.__name__}: make one" if isinstance(hook, type) else repr(hook)
            raise TypeError(f"hooks must be objects of classes of gemini.engine.trainer.Hook, found {name}")
    return sorted(hooks, key=lambda hook: hook.priority)


def _in_words(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in metrics.items() if not name.endswith("_bytes"))


def _total_steps(loader: Any, epochs: int, window: int, max_steps: int | None) -> int | None:
    num_batches = length_of(loader)
    if num_batches is None:
        return max_steps
    # Windows go on over the ends of epochs, so only the last one of the training may be shorter.
    total = math.ceil(num_batches * epochs / window)
    return total if max_steps is None else min(total, max_steps)
