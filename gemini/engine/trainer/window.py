"""The micro-batches of one optimizer step, which are trained once more where the device ran out of memory.

A forward, backward or step that finds no memory loses the gradients since the last step, and model data makes room at
the next forward (gemini/access/free_memory.py). A script has to catch that and to bring the batches again; `Trainer`
does both. What has moved on besides gradients goes back to where the window began, so that the step has the bits of one
that found its memory at once: the generators of random numbers, and buffers, such as the statistics of a batch norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from gemini.dist_logger import get_dist_logger
from gemini.engine.engine import Engine
from gemini.engine.trainer.batches import Outcome, run
from gemini.errors import BudgetError, GeminiError, RemoteRankError
from gemini.placement.demand import Tier

_OF_RANKS = torch.OutOfMemoryError.__name__, f"{BudgetError.__name__}: {Tier.DEVICE}: no memory for "
"""How the error of another rank begins whose device has no memory: for activations, or for model data."""


class Window:
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
