"""`Engine`: a sharded model, its optimizer, criterion and learning rate schedule, stepped together.

Which backwards make an optimizer step: [Note: Windows] in this file.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gemini.checkpoint.directory import Keep
from gemini.checkpoint.loading import load_checkpoint
from gemini.checkpoint.saving import PendingCheckpoint, save_checkpoint
from gemini.engine.config import Config
from gemini.engine.config.config import BatchSizes
from gemini.engine.schedules import MovedByEngine, MovedByScript, MovingSchedule
from gemini.engine.step_log import StepLog
from gemini.errors import CheckpointError, GeminiError, UnsupportedError
from gemini.log import warn_at_script
from gemini.memory.modes import methods_never_traced
from gemini.model.operators import cast_tensors
from gemini.model.plain import GatheredParameters
from gemini.model.sharded_model import ShardedModel
from gemini.optimizer.sharded_optimizer import ShardedOptimizer
from gemini.runtime.manager import ChunkManager
from gemini.settings import CASTABLE_DTYPES

# -- Saves whole weights as one file, atomically: the file is complete or does not exist.


def save_weights(model: ShardedModel, path: Path) -> None:
    """Write `model.state_dict()` on rank 0. Collective, between steps.

    path: the file, in the safetensors format if it ends in .safetensors, else in torch's. Its folder is created. Raises
    OSError on rank 0 and RemoteRankError on the others if it cannot be written; an existing file is unchanged then.
    """
    communicator = model.chunk_manager.communicator
    # Every rank takes part, as parameters may have to be gathered. Only rank 0 keeps the result, in host memory.
    state = model.state_dict(rank0_only=True)
    with communicator.publishing():
        if communicator.rank == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            # It lies beside the file, since `os.replace` is atomic inside one file system only.
            partial = path.with_name(f"{path.name}.partial")
            try:
                if path.suffix == ".safetensors":
                    # safetensors refuses tensors that share memory, as tied weights do, or that are not contiguous.
                    save_file({name: tensor.contiguous().clone() for name, tensor in state.items()}, partial)
                else:
                    torch.save(state, partial)
                os.replace(partial, path)
            finally:
                # After a success it has become the file. After a failure, such as a full disk, it would take space for
                # nothing.
                partial.unlink(missing_ok=True)
    # Another rank may read the file as soon as this function has returned there.
    communicator.wait_for_all("weights are saved")


# -- The window of an engine that is open: how many backwards no optimizer step has used yet.
#
# [Note: Windows] A window is the `gradient_accumulation_steps` micro-batches of one optimizer step. `Engine.backward`
# divides the loss by their number and counts them. `Engine.step` updates only when the window is full, so a loop calls
# it after every backward, like loops for Colossal-AI and DeepSpeed. A window that is open at the end of an epoch
# continues in the next one, unless `step(last=True)` closes it.
#
# A micro-batch is a backward that reaches the model and that an engine has called, this one or another whose model
# comes behind it in the graph, as in `B(A(x))` with `B.backward(loss)`. The loss is divided once, by the engine that is
# called, so both must have windows of one size: else A's gradients would not be the mean over A's window.


class OpenWindow:
    """The micro-batches since the last update. They are void when their gradients are dropped."""

    def __init__(self, manager: ChunkManager, log: StepLog) -> None:
        self.num_backwards = 0  # since the last optimizer step
        self.is_complete = False  # the script has said that no other micro-batch belongs to it
        self._num_own = 0  # of them, those that this engine's backward has made
        self._num_asked = 0  # of them, those that had come at the last call of `step()`
        self._other_divisors: set[int] = set()  # by which other engines have divided losses of this window
        self.begins = 0  # number of backwards before the window
        self._manager = manager
        self._log = log
        # A model that was wrapped before may have failed already: only later failures end a window of this engine.
        self._num_failed = manager.grads.num_failed

    @property
    def counts(self) -> tuple[int, int]:
        """What a checkpoint has of the window, for `resume`."""
        return self.num_backwards, self.begins

    def resume(self, num_backwards: int, begins: int) -> None:
        """Go on with a window that another process has begun, whose gradients are loaded."""
        self.num_backwards, self.begins = num_backwards, begins
        self._num_own = num_backwards  # a checkpoint is of a loop that goes on with them
        self._num_failed = self._manager.grads.num_failed

    def begin_at(self, num_backwards: int) -> None:
        """A micro-batch is about to come, after this number of backwards in all: the window begins if it is empty."""
        if not self.num_backwards:
            self.begins = num_backwards

    def count(self, other_divisor: int | None = None, *, is_own: bool = True) -> None:
        """One more micro-batch has ended its backward.

        other_divisor: by which another engine has divided its loss. None: it was this one, or the script divides.
        is_own: whether this engine's backward was called, and not another's.
        """
        self.num_backwards += 1
        self._num_own += is_own
        if other_divisor is not None:
            self._other_divisors.add(other_divisor)

    def is_full(self, size: int) -> bool:
        """Whether a step may use the window: it has `size` micro-batches, or the script wants no others in it."""
        # More backwards than a window has may have come: a script need not call `step()` after each of them.
        return self.is_complete or self.num_backwards >= size

    @property
    def is_wanted(self) -> bool:
        """Whether a step is to use the micro-batches so far.

        Those that only came through other engines are wanted once the script has called `step()`: before that they may
        be what the loss of a generator leaves in its discriminator.
        """
        return self._num_own > 0 or 0 < self.num_backwards == self._num_asked

    def complete(self) -> None:
        """No other micro-batch belongs to the window, if it has one."""
        self.is_complete = self.num_backwards > 0

    def note_step(self) -> None:
        """`step()` was called and updated nothing: the next micro-batch begins."""
        self._num_asked = self.num_backwards

    @property
    def current(self) -> int:
        """The number, from 1, of the micro-batch that a loop is at: it ends with a call of `step()`."""
        return self.num_backwards + (self.num_backwards == self._num_asked)

    def end(self, num_backwards: int) -> None:
        """An optimizer step has used the window, after this number of backwards in all."""
        self._begin_anew()
        self.begins = num_backwards

    def empty(self) -> None:
        """The micro-batches so far are in no step: their gradients are dropped, and their losses must not be logged."""
        self._begin_anew()
        self._log.discard()

    def drop(self, num_backwards: int) -> None:
        """The script has dropped the micro-batches, and repeats none, after this number of backwards in all."""
        self.empty()
        self.begins = num_backwards

    def _begin_anew(self) -> None:
        self.num_backwards = self._num_own = self._num_asked = 0
        self.is_complete = False
        self._other_divisors.clear()

    def follow_failures(self) -> None:
        """Begin another window if a forward or backward has failed, which dropped the gradients of the present one."""
        # The model counts, not the engine: a script may also call the model itself, as `generate` does, and fail in
        # there.
        failed = self._manager.grads.num_failed
        if failed != self._num_failed:
            self._num_failed = failed
            self.empty()

    def refuse_foreign_gradients(self, size: int) -> None:
        """Raises GeminiError for gradients that are no mean over a window of `size` micro-batches.

        Gradients of `loss.backward()` can be told from those of `Engine.backward` only while no window is open: the
        model counts both alike. A step would silently ignore them. Those that come through another engine count as
        micro-batches, but the other one has divided its loss by the size of its own window.
        """
        others = self._other_divisors - {size}
        if others:
            raise GeminiError(
                f"step() has gradients of another engine's backward(), whose loss was divided by {min(others)}, for a "
                f"window of {size}: give both engines the same gradient_accumulation_steps. discard_window() drops them"
            )
        if self.num_backwards:
            return
        if self._manager.grads.num_backwards:
            # A backward that failed may have left its count: the check recovers from it, and drops what came of it.
            self._manager.step.check_idle("step()", after_updates=True)
        if self._manager.grads.num_backwards:
            raise GeminiError(
                "step() has gradients that engine.backward(loss) did not make: call it in place of loss.backward(), as "
                "it counts micro-batches, or engine.optimizer.step() in place of engine.step()"
            )


# All engines of this process that train: the backward of one may go on into the models of others, as in `B(A(x))`.
_ENGINES: WeakSet[Engine] = WeakSet()


_COUNTS = ("global_steps", "skipped_steps", "micro_steps")


@methods_never_traced("gradients and states move in it", "backward", "step", "zero_grad")
class Engine:
    """Trains a model: call it for a forward, then `backward(loss)` and `step()`. Made by `initialize`.

    Every method that runs the model is collective: all ranks call it alike.

    Args:
        model: the sharded model.
        optimizer: the model's optimizer. None: the engine only evaluates.
        criterion: a function of outputs and labels, for `engine.criterion(...)`. None: the model returns its loss.
        lr_scheduler: a schedule of the optimizer. None: the learning rate stays.
        config: the config that the engine was made from.
        moves_schedule: whether the engine moves the schedule after every optimizer step that was not skipped. False:
            the script does. See `lr_scheduler`.

    Raises ValueError if the config's batch sizes do not fit the number of ranks.

    Example:
        >>> engine, *_ = initialize(torch.nn.Linear(8, 1), config={"optimizer": {"type": "HybridAdam"}})
        >>> loss = engine(torch.ones(4, 8, device=engine.device)).square().mean()
        >>> _ = engine.backward(loss)
        >>> engine.step()
    """

    def __init__(
        self,
        model: ShardedModel,
        optimizer: ShardedOptimizer | None = None,
        criterion: Callable[..., Any] | None = None,
        lr_scheduler: Any = None,
        *,
        config: Config | None = None,
        moves_schedule: bool = True,
    ) -> None:
        self.model = model
        self.chunk_manager = manager = model.chunk_manager
        self.communicator = manager.communicator
        self.device: torch.device = manager.memory.device.device
        """The device on which this rank's model runs."""
        self.optimizer = optimizer
        self.moves_schedule = moves_schedule
        """Whether the engine moves the schedule. False: the script calls `lr_scheduler.step()`."""
        moving = MovedByEngine if moves_schedule else MovedByScript
        self._moving: MovingSchedule | None = None if lr_scheduler is None else moving(lr_scheduler)
        self.config = config or Config()
        self._criterion = criterion
        self.batch_sizes: BatchSizes = self.config.batch_sizes(model.world_size)
        self.global_steps = 0
        """Number of optimizer steps, including skipped ones."""
        self.skipped_steps = 0
        """Number of optimizer steps that changed nothing, because a gradient was not finite."""
        self.micro_steps = 0
        """Number of backwards."""
        self._log = StepLog(self.config, model.rank)
        self._window = OpenWindow(manager, self._log)
        self._is_closed = False
        self._has_kept = False  # `zero_grad()` has kept the gradients of a window, and has said so
        self._reached: WeakSet[Engine] = WeakSet()  # other engines, by backwards of the window
        weights = model.settings.dtype  # not the config's: the model may have been wrapped with another one
        # Where the config gives dtypes by module, the modules cast their own inputs: see gemini/model/operators.py.
        self._input_dtype = weights if self.config.cast_inputs and isinstance(weights, torch.dtype) else None
        if optimizer is not None:
            _ENGINES.add(self)

    # -- a step

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, with floating-point inputs in the dtype of the weights if the config casts them."""
        self._refuse_closed("a forward")
        if self._input_dtype is not None:
            args, kwargs = cast_tensors((args, kwargs), CASTABLE_DTYPES, self._input_dtype)
        if self.config.autocast is None:
            return self.model(*args, **kwargs)
        with torch.autocast(self.device.type, self.config.autocast):
            return self.model(*args, **kwargs)

    @property
    def criterion(self) -> Callable[..., Any]:
        """The function of outputs and labels that `initialize` was given. Raises UnsupportedError if there is none."""
        if self._criterion is None:
            raise UnsupportedError("the engine has no criterion: give initialize(criterion=...) one")
        return self._criterion

    def backward(self, loss: Tensor, retain_graph: bool = False, *, divide: bool = True) -> Tensor:
        """Run backward on the loss, divided by the number of micro-batches and scaled in fp16 training. Collective.

        Args:
            loss: a tensor of one element. Where the graph goes on into the models of other engines, as in `B(A(x))`, it
                is a micro-batch of theirs too.
            retain_graph: whether another backward of the same graph follows. It counts as another micro-batch.
            divide: False leaves the loss as it is: the script has divided it.

        Returns the divided loss. Raises UnsupportedError without an optimizer, TypeError for anything but a tensor, and
        what backward raises; the gradients of the window are dropped then, and another window begins.
        """
        optimizer = self._needs_optimizer("backward()")
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward() takes the loss, a tensor of one element, found {type(loss).__name__}")
        self._window.follow_failures()
        self._window.begin_at(self.micro_steps)
        whole, divisor = loss, self.batch_sizes.accumulation if divide else None
        others = [
            (engine, engine._num_arrived) for engine in _ENGINES if engine.chunk_manager is not self.chunk_manager
        ]
        try:
            # The script's part of the graph may fail on this rank alone, and the model would not hear of it.
            with self.communicator.publishing():
                if divisor is not None and divisor > 1:
                    loss = loss / divisor
                optimizer.backward(loss, retain_graph)
        except BaseException:
            # Drop the whole window: with the remaining micro-batches the next step would use a part of it.
            for engine in (self, *self._reached):
                engine._drop()
            self._reached.clear()
            raise
        self._count(whole)
        for engine, before in others:
            if engine._num_arrived > before:
                self._reached.add(engine)
                engine._count(whole, divisor, is_own=False)
        return loss.detach()

    def _drop(self) -> None:
        """Drop the window after a backward that failed."""
        self._window.empty()
        # A backward that has reached the model drops the gradients itself, and reports it.
        if self.optimizer is not None and not self.chunk_manager.grads.in_backward:
            self.optimizer.zero_grad()

    @property
    def _num_arrived(self) -> int:
        """The backwards that have reached the model since its last step, whoever called them."""
        return self.chunk_manager.grads.num_backwards

    def _count(self, whole: Tensor, other_divisor: int | None = None, *, is_own: bool = True) -> None:
        """A backward of this loss has reached the model: one more micro-batch of the window.

        other_divisor: by which another engine, whose backward it was, has divided the loss. is_own: it was this one's.
        """
        self._window.follow_failures()
        self._window.begin_at(self.micro_steps)
        self._log.add(whole)
        if self._moving is not None:
            self._moving.after_backward()
        self.micro_steps += 1
        self._window.count(other_divisor, is_own=is_own)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights. Raises nothing. Local."""
        return self._is_full()

    def _is_full(self) -> bool:
        self._window.follow_failures()
        return self._window.is_full(self.batch_sizes.accumulation)

    def is_window_open(self) -> bool:
        """Whether there are backwards that no `step()` has used yet. Raises nothing. Local."""
        self._window.follow_failures()
        return self._window.num_backwards > 0

    def step(self, *, last: bool = False) -> None:
        """Update the weights and move the schedule, if the window is full. Collective.

        last: update with the micro-batches so far, as at the end of a training. Their losses are still divided by the
            size of a whole window.

        Raises UnsupportedError without an optimizer, GeminiError for gradients that `loss.backward()` has made, or the
        backward of another engine which divides losses by another number, and what `ShardedOptimizer.step` raises.
        """
        optimizer = self._needs_optimizer("step()")
        self._window.refuse_foreign_gradients(self.batch_sizes.accumulation)
        # Asked first: a failure that the window has not followed yet leaves nothing to step on, also not at the end.
        is_due = self._is_full() or last
        if not (is_due and self._window.num_backwards):
            self._window.note_step()
            return
        # Every step that ends leaves another report, also if it then raises: `last_step` tells whether it has ended.
        rate, before = optimizer.param_groups[0]["lr"], optimizer.last_step
        try:
            optimizer.step()
        finally:
            # One skipped step too many is an error of a step that is over. Its gradients are gone: if the window stayed
            # full, the next step would come after a single micro-batch.
            if optimizer.last_step is not before:
                self._end_window(optimizer, rate)

    def _end_window(self, optimizer: ShardedOptimizer, rate: float) -> None:
        """Count the optimizer's last step, which had this learning rate, move the schedule, and log the step."""
        self._window.end(self.micro_steps)
        self._reached.clear()
        self.global_steps += 1
        report = optimizer.last_step
        assert report is not None
        # One rank alone may fail in here, as on a full disk, and the others are in no collective that would tell them.
        with self.communicator.publishing():
            try:
                # A skipped step does not move the schedule, as in DeepSpeed: no weight was updated at its rate.
                if report.skipped is not None:
                    self.skipped_steps += 1
                elif self._moving is not None:
                    self._moving.after_update()
            finally:
                # The log comes last: whoever catches its error has a step that is over, as on the other ranks. Where
                # the schedule raises, the losses of this step would else count in the mean of the next one.
                if self._log.is_on:
                    self._log.after_step(self.global_steps, rate, report)

    def zero_grad(self) -> None:
        """Discard gradients, and with them the window. Local, alike on every rank.

        A window of several micro-batches that still lacks some keeps its gradients, and a warning says so once: loops
        for DeepSpeed call this after every micro-batch. `discard_window()` drops them there, too. Gradients that only
        the backward of another engine has left are dropped unless `step()` was called since then.

        Raises what `ShardedOptimizer.zero_grad` raises.
        """
        if self.optimizer is None:
            return
        self._window.follow_failures()
        if self._window.is_wanted and not self._is_full():
            if not self._has_kept:
                self._has_kept = True
                warn_at_script(
                    "zero_grad() keeps the gradients of a window that lacks micro-batches, here and from now on: a "
                    f"step is to use those so far ({self._window.num_backwards}) with the next ones "
                    f"(gradient_accumulation_steps={self.batch_sizes.accumulation}). discard_window() drops them"
                )
            return
        self.optimizer.zero_grad()
        self._window.drop(self.micro_steps)
        self._reached.clear()

    def recover(self) -> None:
        """Let all ranks restart together after a failed forward or backward. Without one it does nothing. Collective.

        Raises GeminiError inside a forward or backward, and if a step has failed half way.
        """
        # The check also recovers, as at the beginning of a forward or a step.
        self.chunk_manager.step.check_idle("recover()", after_updates=True)

    def discard_window(self) -> None:
        """Drop the micro-batches since the last update, so that they can be repeated. Local, alike on every rank.

        Raises UnsupportedError without an optimizer, GeminiError inside a backward.
        """
        optimizer = self._needs_optimizer("discard_window()")
        self._window.follow_failures()
        optimizer.zero_grad()
        # The micro-batches are counted when they are repeated.
        self.micro_steps = self._window.begins
        self._window.empty()

    def no_sync(self) -> AbstractContextManager[None]:
        """See `ShardedModel.no_sync`. Local, alike on every rank; raises nothing of its own."""
        return self.model.no_sync()

    # -- what there is

    @property
    def lr_scheduler(self) -> Any:
        """The schedule. If the script moves it, its `step()` does nothing until weights have been updated."""
        return None if self._moving is None else self._moving.shown

    @property
    def grad_norm(self) -> float | None:
        """The global L2 norm of the last step's gradients, before clipping; None before the first step. Local."""
        norm = None if self.optimizer is None else self.optimizer.grad_norm
        return None if norm is None else float(norm)

    @property
    def loss_scale(self) -> float:
        """The present factor of losses; 1 without loss scaling."""
        return 1.0 if self.optimizer is None else self.optimizer.loss_scale

    @property
    def module(self) -> nn.Module:
        """The module that was given to `initialize`."""
        return self.model.module

    def train(self, mode: bool = True) -> Engine:
        """`torch.nn.Module.train(mode)` of the model; returns the engine. Local, raises what that raises."""
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """`train(False)`. Local, raises nothing."""
        return self.train(False)

    def __getattr__(self, name: str) -> Any:
        """Forward other attributes to the model: `parameters()`, `state_dict()`, `config` of a Hugging Face model."""
        # `copy` and pickle look attributes up before `model` is set. Forwarding them would recurse for ever.
        if name.startswith("__") or "model" not in vars(self):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        try:
            return getattr(self.model, name)
        except AttributeError as error:
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; its model: {error}"
            ) from None

    # -- checkpoints

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        data: Any = None,
        keep: int | Keep | None = None,
        asynchronous: bool = False,
    ) -> Path | PendingCheckpoint:
        """Save model, optimizer, schedule, counters and an open window of micro-batches. Collective.

        Args:
            save_dir: the directory of this training's checkpoints.
            tag: the checkpoint's name. None: "global_step" and the number of optimizer steps.
            client_state: plain values of the script's, which `load_checkpoint` returns.
            save_latest, exclude_frozen_parameters: DeepSpeed's, which must be as they are.
            data, keep, asynchronous: as of `gemini.save_checkpoint`.

        Returns and raises what `gemini.save_checkpoint` does, and UnsupportedError for other values of the two.
        """
        self._refuse_closed("save_checkpoint()")
        if not save_latest or exclude_frozen_parameters:
            raise UnsupportedError(
                "save_checkpoint(): a checkpoint is whole and becomes the newest: leave out save_latest=False and "
                "exclude_frozen_parameters=True"
            )
        counts = {name: getattr(self, name) for name in _COUNTS}
        extra = {"client_state": dict(client_state or {}), "engine": {**counts, "window": self._window.counts}}
        schedule, name = self.lr_scheduler, f"global_step{self.global_steps}" if tag is None else tag
        return save_checkpoint(
            save_dir,
            self.model,
            self.optimizer,
            scheduler=schedule,
            data=data,
            extra=extra,
            tag=name,
            keep=keep,
            asynchronous=asynchronous,
        )

    def finish_saving(self) -> None:
        """Wait for a checkpoint that is written in the background. Collective. Raises CheckpointError if it failed."""
        failure = self.chunk_manager.background.finish()
        if failure is not None:
            raise CheckpointError(failure)

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        *,
        data: Any = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load what `save_checkpoint` has saved, on any number of ranks, at any stage and budget. Collective.

        Args:
            load_dir: the directory of the checkpoints, or one of them.
            tag: which one. None: the newest that is complete.
            load_module_strict: False passes over parameters that only the model or only the checkpoint has.
            load_optimizer_states: whether the optimizer, random numbers and counters go on, too.
            load_lr_scheduler_states: whether the schedule does.
            load_module_only: weights and buffers alone.
            data: as of `gemini.load_checkpoint`.

        Returns the checkpoint's folder and the `client_state`. Raises what `gemini.load_checkpoint` does.
        """
        self._refuse_closed("load_checkpoint()")
        goes_on = load_optimizer_states and not load_module_only
        schedule = self.lr_scheduler if load_lr_scheduler_states and not load_module_only else None
        loaded = load_checkpoint(
            load_dir,
            self.model,
            self.optimizer if goes_on else None,
            scheduler=schedule,
            data=data,
            tag=tag,
            strict=load_module_strict,
            weights_only=not goes_on,
            masters=self.config.load_from_fp32_weights,
        )
        extra = loaded.extra if isinstance(loaded.extra, dict) else {}
        counts = extra.get("engine", {"global_steps": loaded.step or 0})
        if goes_on:
            for name in _COUNTS:
                setattr(self, name, counts.get(name, 0))
            self._window.resume(*counts.get("window", (0, self.micro_steps)))
            if self._moving is not None:
                self._moving.after_load()
        return str(loaded.path), extra.get("client_state", {})

    # -- memory

    @contextmanager
    def gathered_for_generation(self) -> Iterator[nn.Module]:
        """A context in which all weights are whole, so that `generate` needs no collective per token. Collective.

        Yields the module. Raises SlotError if the weights do not fit into the model's slots together.
        """
        with GatheredParameters(self.model):
            yield self.module

    def empty_partition_cache(self) -> None:
        """Release all gathered chunks, so that each rank holds only shards. Collective.

        Raises GeminiError inside a forward or backward.
        """
        self.chunk_manager.step.check_idle("empty_partition_cache()", after_updates=True)
        self.chunk_manager.params.release_all()

    def offload_states(self, include: Collection[str] | None = None) -> None:
        """Move states to the host between steps: weights, gradients, masters and optimizer state. Collective.

        include: as for `ShardedModel.offload_states`. Raises what that raises.
        """
        self.model.offload_states(include)

    def reload_states(self) -> None:
        """Move the states back; the next forward also does so. Collective. Raises what the model's method raises."""
        self.model.reload_states()

    def close(self) -> None:
        """Close the model, see `ShardedModel.close`, and the files of metrics. Collective.

        The engine cannot be used afterwards. Closing it again does nothing. Raises GeminiError inside a backward.
        """
        if not self._is_closed:
            # The flag is set last: where `model.close()` refuses, as inside a backward, the engine is still open.
            self.model.close()
            self._log.close()
            self._is_closed = True

    def _refuse_closed(self, what: str) -> None:
        if self._is_closed:
            raise GeminiError(f"{what} after close(): make another engine with initialize()")

    def _needs_optimizer(self, what: str) -> ShardedOptimizer:
        self._refuse_closed(what)
        if self.optimizer is None:
            raise UnsupportedError(
                f"{what} needs an optimizer: give initialize(optimizer=...) one, or a config with 'optimizer'"
            )
        return self.optimizer
