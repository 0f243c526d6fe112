"""The window of an engine that is open: how many backwards no optimizer step has used yet.

[Note: Windows] A window is the `gradient_accumulation_steps` micro-batches of one optimizer step. `Engine.backward`
divides the loss by their number and counts them. `Engine.step` updates only when the window is full, so a loop calls it
after every backward, like loops for Colossal-AI and DeepSpeed. A window that is open at the end of an epoch continues
in the next one, unless `step(last=True)` closes it.
"""

from __future__ import annotations

from gemini.engine.step_log import StepLog
from gemini.errors import GeminiError
from gemini.manager.chunk_manager import ChunkManager


class OpenWindow:
    """The micro-batches since the last update. They are void when their gradients are dropped."""

    def __init__(self, manager: ChunkManager, log: StepLog) -> None:
        self.num_backwards = 0  # since the last optimizer step
        self.begins = 0  # number of backwards before the window
        self._manager = manager
        self._log = log
        # A model that was wrapped before may have failed already: only later failures end a window of this engine.
        self._num_failed = manager.grads.num_failed

    def begin_at(self, num_backwards: int) -> None:
        """A micro-batch is about to come, after this number of backwards in all: the window begins if it is empty."""
        if not self.num_backwards:
            self.begins = num_backwards

    def count(self) -> None:
        """One more micro-batch has ended its backward."""
        self.num_backwards += 1

    def end(self, num_backwards: int) -> None:
        """An optimizer step has used the window, after this number of backwards in all."""
        self.num_backwards, self.begins = 0, num_backwards

    def empty(self) -> None:
        """The micro-batches so far are in no step: their gradients are dropped, and their losses must not be logged."""
        self.num_backwards = 0
        self._log.discard()

    def follow_failures(self) -> None:
        """Begin another window if a forward or backward has failed, which dropped the gradients of the present one."""
        # The model counts, not the engine: a script may also call the model itself, as `generate` does, and fail in
        # there.
        failed = self._manager.grads.num_failed
        if failed != self._num_failed:
            self._num_failed = failed
            self.empty()

    def refuse_foreign_gradients(self) -> None:
        """Raises GeminiError if there are gradients though the window is empty: a step would silently ignore them.

        Gradients of `loss.backward()` can be told from those of `Engine.backward` only while no window is open: the
        model counts both alike.
        """
        if self.num_backwards:
            return
        if self._manager.grads.num_backwards:
            # A backward that failed may have left its count: the check recovers from it, and drops what came of it.
            self._manager.step.check_idle("step()")
        if self._manager.grads.num_backwards:
            raise GeminiError(
                "step() has gradients that engine.backward(loss) did not make: call it in place of loss.backward(), as "
                "it counts micro-batches, or engine.optimizer.step() in place of engine.step()"
            )
