"""`Trainer`: epochs over a loader, evaluation between them, hooks around both."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column
from torch import Tensor, nn

from gemini.engine.engine import Engine
from gemini.engine.initialize import length_of, tell_epoch
from gemini.engine.schedules import moves_by_metric
from gemini.engine.trainer.checkpoints import Position, Together
from gemini.engine.trainer.hooks import Hook, LearningRate, Metrics, Outcome, forward, moved, run
from gemini.errors import BudgetError, GeminiError, RemoteRankError, UnsupportedError
from gemini.log import get_dist_logger
from gemini.placement.demand import Tier, format_bytes
from gemini.progress import the_only_bar
from gemini.settings import check_count

# -- The micro-batches of one optimizer step, which are trained once more where the device ran out of memory.
#
# A forward, backward or step that finds no memory loses the gradients since the last step, and model data makes room at
# the next forward (gemini/replan/live_plan.py). A script has to catch that and to bring the batches again; `Trainer`
# does both. What has moved on besides gradients goes back to where the window began, so that the step has the bits of
# one that found its memory at once: the generators of random numbers, and buffers, such as the statistics of a batch
# norm.


_OF_RANKS = torch.OutOfMemoryError.__name__, f"{BudgetError.__name__}: {Tier.DEVICE}: no memory for "
"""How the error of another rank begins whose device has no memory: for activations, or for model data."""


class BatchWindow:
    """The micro-batches since the last update, from which a step can be made again. Every rank makes the same calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._model = engine.model
        self._batches: list[Any] = []
        self._start = _Start(engine.module, engine.device)
        self._failed_bytes: int | None = None  # of model data on the device, when the last try found no memory

    def train(self, batch: Any) -> Outcome:
        """Forward and backward of one more micro-batch. Collective.

        Raises GeminiError if the model returns no loss, and what the model raises. A torch.OutOfMemoryError, or a
        BudgetError of a device without memory, of this or another rank is raised only if model data has made no room
        since the last one.
        """
        # What to go back to is saved before the first forward of a window, which moves on random numbers and buffers.
        if not self._engine.is_window_open():
            self._batches, self._failed_bytes = [], None
            self._start.save()
        self._batches.append(batch)
        return self._train([batch])

    def step(self, last: bool = False) -> None:
        """`Engine.step`, which ends the window if it updates the weights. Collective.

        Raises what that raises, shortages as for `train`.
        """
        while True:
            try:
                self._engine.step(last=last)
                break
            # The shortage may be one of this step, or of a backward of another rank, which this rank hears of here.
            except (torch.OutOfMemoryError, BudgetError, RemoteRankError) as error:
                self._begin_again(error)
            # Gradients of the whole window are gone. Hooks have seen its micro-batches, so the outcome is not used.
            self._train(self._batches)
        if not self._engine.is_window_open():
            # Batches on the device that nothing uses any more would take memory of an evaluation.
            self._batches = []

    def _train(self, batches: list[Any]) -> Outcome:
        while True:
            try:
                # The error is published before it is caught below. Otherwise the other ranks would not hear of one that
                # was raised outside the model, such as in the criterion.
                with self._engine.communicator.publishing():
                    # Outcomes of all micro-batches but the last are dropped at once: while the device is short of
                    # memory, their outputs would take what later micro-batches need. Hooks have seen them before.
                    for each in batches[:-1]:
                        self._micro_batch(each)
                    return self._micro_batch(batches[-1])
            except (torch.OutOfMemoryError, BudgetError, RemoteRankError) as error:
                self._begin_again(error)
            # The gradients of all micro-batches were dropped, so each is trained again.
            batches = self._batches

    def _micro_batch(self, batch: Any) -> Outcome:
        outcome = run(self._engine, batch)
        if outcome.loss is None:
            raise GeminiError("the model returned no loss: give the batch labels, or the engine a criterion")
        self._engine.backward(outcome.loss)
        return outcome

    def _begin_again(self, error: Exception) -> None:
        """Put everything back to before the window's first micro-batch. Collective.

        Raises the error if it is no shortage, or no room was made, and GeminiError if an update failed half way.
        """
        # Each further try needs a plan with less on the device than the last one had: a batch that never fits would be
        # tried for ever otherwise. All ranks have the same plan, so this answer is equal on all of them.
        num_bytes = self._model.plan.device_bytes
        has_room = self._failed_bytes is None or num_bytes < self._failed_bytes
        if not (_is_shortage(error) and has_room):
            raise error
        # The frames of the traceback hold the activations of the failed try for as long as anybody holds the error.
        error.__traceback__ = None
        self._failed_bytes = num_bytes
        # Ranks start together first, because whatever follows may be collective. Model data gives up its room in the
        # next forward.
        self._engine.recover()
        self._engine.discard_window()
        self._start.restore()
        words = f"{len(self._batches)} micro-batch{'es' * (len(self._batches) > 1)}"
        step = self._engine.global_steps + 1
        get_dist_logger().warning(
            f"a device ran out of memory in step {step}, which is made once more: {words} again", ranks=[0]
        )


def _is_shortage(error: Exception) -> bool:
    if isinstance(error, RemoteRankError):
        # Of another rank's error only the text is known, which begins with the name of its class.
        return error.message.startswith(_OF_RANKS)
    if isinstance(error, BudgetError):
        return error.is_shortage and error.tier == Tier.DEVICE
    return isinstance(error, torch.OutOfMemoryError)


class _Start:
    """Random numbers and buffers as they are when a window begins.

    All buffers are copied, in one call: a batch norm changes its statistics without a new version of them.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        # Buffers that are None or not persistent are among these, as a forward may set and use them, too.
        self._owners = [(each, name) for each in module.modules() for name in each._buffers]
        # An emulated device is the CPU, whose generator is saved in any case.
        self._device = None if device.type == "cpu" else device
        # These are the buffers themselves, not only copies of their values: a forward may put another tensor in their
        # place, as `self.mean = 0.5 * self.mean + ...` does.
        self._buffers: list[Tensor | None] = []
        self._copies: list[Tensor] = []
        self._random: list[Tensor] = []

    def save(self) -> None:
        """Copy what a window begins with. Local."""
        self._buffers = [owner._buffers.get(name) for owner, name in self._owners]
        found = self._found()
        # The copies of the last window are written over: a window takes new memory only if a buffer has changed its
        # shape, dtype or device.
        if [_kind_of(copy) for copy in self._copies] == [_kind_of(buffer) for buffer in found]:
            _copy(self._copies, found)
        else:
            self._copies = [buffer.detach().clone() for buffer in found]
        self._random = [torch.get_rng_state()]
        if self._device is not None:
            self._random.append(torch.get_device_module(self._device).get_rng_state(self._device))

    def restore(self) -> None:
        """Put back what the window began with. Local."""
        # Values go into the tensors that the modules had, because views and other references may see these.
        for (owner, name), buffer in zip(self._owners, self._buffers, strict=True):
            owner._buffers[name] = buffer
        _copy(self._found(), self._copies)
        torch.set_rng_state(self._random[0])
        if self._device is not None:
            torch.get_device_module(self._device).set_rng_state(self._random[1], self._device)

    def _found(self) -> list[Tensor]:
        return [buffer for buffer in self._buffers if buffer is not None]


def _copy(to: list[Tensor], source: list[Tensor]) -> None:
    if to:
        with torch.no_grad():
            # All buffers are copied in one call, at each window: a model of many batch norms has hundreds of them.
            torch._foreach_copy_(to, source)


def _kind_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


# -- The hook that moves a schedule which is the script's.


class LRSchedulerHook(LearningRate):
    """Moves a schedule, under Colossal-AI's name: after every optimizer step that was not skipped, or every epoch.

    `Trainer.fit` makes one itself, by step, for a schedule that was given to `initialize` as an object.

    Args:
        lr_scheduler: of the engine's optimizer.
        by_epoch: whether it counts epochs. False: optimizer steps.
        store_lr_in_state: whether the rate of each step is put into `trainer.metrics` as `lr`.
        priority: see `Hook`.

    Raises UnsupportedError for a schedule that moves by a metric.
    """

    def __init__(
        self, lr_scheduler: Any, by_epoch: bool, store_lr_in_state: bool = True, priority: int = LearningRate.priority
    ) -> None:
        super().__init__()
        if moves_by_metric(lr_scheduler):
            raise UnsupportedError(
                "ReduceLROnPlateau moves by a metric: call its step(metric) in the after_test() of a hook of your own"
            )
        self.schedule, self.by_epoch, self.priority = lr_scheduler, by_epoch, priority
        self._stores = store_lr_in_state

    def before_train(self, trainer: Trainer) -> None:
        """Raises UnsupportedError if the engine moves the schedule already."""
        # Both would call `step()`, and the schedule would move twice for each update.
        if trainer.engine.moves_schedule and trainer.engine.lr_scheduler is self.schedule:
            raise UnsupportedError(
                "LRSchedulerHook: the engine moves this schedule after every optimizer step, since the config or a "
                "callable made it: leave the hook out, or give initialize(lr_scheduler=...) a schedule"
            )

    def after_step(self, trainer: Trainer) -> None:
        if self._stores:
            super().after_step(trainer)
        # A schedule that was given to the hook as it is, not as `initialize` returned it, does not know of skipped
        # steps.
        report = trainer.optimizer.last_step
        if not self.by_epoch and (report is None or report.skipped is None):
            self.schedule.step()

    def after_epoch(self, trainer: Trainer) -> None:
        if self.by_epoch:
            self.schedule.step()


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
        self._window = BatchWindow(engine)
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
        display_progress: bool | None = None,
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
            display_progress: whether rank 0 shows a bar: steps, times, its loss, what hooks measure, and the model's
                bytes on the device. None: where its output is a terminal.

        Raises ValueError for numbers that are not valid, GeminiError if any rank's loader is empty, and what the model,
        its criterion or a hook raises; the other ranks then raise RemoteRankError.
        """
        for name, value in (("epochs", epochs), ("max_steps", max_steps), ("test_interval", test_interval)):
            if value is not None or name != "max_steps":
                check_count(name, value)
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
                advance(outcome)
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
            advance()
        self._tell("after_epoch")
        return stops or (last_step is not None and engine.global_steps >= last_step)

    def evaluate(
        self,
        test_dataloader: Iterable[Any],
        hooks: Sequence[Hook] | None = None,
        display_progress: bool | None = None,
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
                    advance()
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
    def _bar(self, shows: bool | None, what: str, total: int | None) -> Iterator[Any]:
        """Yields what is called after every step, with the outcome of its last micro-batch where there is one."""
        # Ranks of one terminal would overwrite each other's bars.
        if not (sys.stdout.isatty() if shows is None else shows) or self.engine.model.rank != 0:
            yield lambda outcome=None: None
            return
        columns = (TextColumn(what), BarColumn(16), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        # In a narrow terminal the metrics go on in the next line. Otherwise rich cuts off the other columns first.
        words_column = TextColumn("{task.fields[words]}", table_column=Column())
        with the_only_bar(), Progress(*columns, words_column) as progress:
            task = progress.add_task(what, total=total, words="")
            shown_at = float("-inf")

            loss: Tensor | None = None

            def advance(outcome: Outcome | None = None) -> None:
                nonlocal shown_at, loss
                progress.advance(task)
                if outcome is not None and outcome.loss is not None:
                    loss = outcome.loss.detach()
                if time.monotonic() - shown_at >= _SHOWN_EVERY_S:
                    progress.update(task, words=self._in_words(loss))
                    shown_at = time.monotonic()

            yield advance
            # The bar ends with the last step's numbers, which may have come too soon after those that it shows.
            progress.update(task, words=self._in_words(loss))

    def _in_words(self, loss: Tensor | None) -> str:
        """The metrics of hooks, or this rank's last loss, and the bytes of model data on the device."""
        words = [f"{name} {value:.4g}" for name, value in self.metrics.items() if not name.endswith("_bytes")]
        if loss is not None and "loss" not in self.metrics:
            words.insert(0, f"loss {float(loss.mean()):.4g}")
        memory = self.engine.chunk_manager.memory
        return "  ".join([*words, f"device {format_bytes(memory.device.ledger.total_bytes)}"])


def _in_order(hooks: Iterable[Any]) -> list[Hook]:
    """Sort hooks by priority. Raises TypeError for anything but hooks."""
    for hook in hooks:
        if not isinstance(hook, Hook):
            name = f"the class {hook.__name__}: make one" if isinstance(hook, type) else repr(hook)
            raise TypeError(f"hooks must be objects of classes of gemini.engine.trainer.Hook, found {name}")
    return sorted(hooks, key=lambda hook: hook.priority)


def _total_steps(loader: Any, epochs: int, window: int, max_steps: int | None) -> int | None:
    num_batches = length_of(loader)
    if num_batches is None:
        return max_steps
    # Windows go on over the ends of epochs, so only the last one of the training may be shorter.
    total = math.ceil(num_batches * epochs / window)
    return total if max_steps is None else min(total, max_steps)
