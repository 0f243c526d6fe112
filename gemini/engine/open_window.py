"""The window of an engine that is open: how many backwards no optimizer step has used yet.

[Note: Windows] A window is the `gradient_accumulation_steps` micro-batches of one optimizer step. `Engine.backward`
divides the loss by their number and counts them. `Engine.step` updates only when the window is full, so a loop calls it
after every backward, like loops for Colossal-AI and DeepSpeed. A window that is open at the end of an epoch continues
in the next one, unless `step(last=True)` closes it.

A micro-batch is a backward that reaches the model and that an engine has called, this one or another whose model comes
behind it in the graph, as in `B(A(x))` with `B.backward(loss)`. The loss is divided once, by the engine that is called,
so both must have windows of one size: else A's gradients would not be the mean over A's window.
"""

from __future__ import annotations

from gemini.engine.step_log import StepLog
from gemini.errors import GeminiError
from gemini.manager.chunk_manager import ChunkManager


class OpenWindow:
    """The micro-batches since the last update. They are void when their gradients are dropped."""

    def __init__(self, manager: ChunkManager, log: StepLog) -> None:
        self.num_backwards = 0  # since the last optimizer step
        self.is_complete = False  # the script has said that no other micro-batch belongs to it
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
        self._num_failed = self._manager.grads.num_failed

    def begin_at(self, num_backwards: int) -> None:
        """A micro-batch is about to come, after this number of backwards in all: the window begins if it is empty."""
        if not self.num_backwards:
            self.begins = num_backwards

    def count(self, other_divisor: int | None = None) -> None:
        """One more micro-batch has ended its backward.

        other_divisor: by which another engine has divided its loss. None: it was this one, or the script divides.
        """
        self.num_backwards += 1
        if other_divisor is not None:
            self._other_divisors.add(other_divisor)

    def is_full(self, size: int) -> bool:
        """Whether a step may use the window: it has `size` micro-batches, or the script wants no others in it."""
        # More backwards than a window has may have come: a script need not call `step()` after each of them.
        return self.is_complete or self.num_backwards >= size

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

    def _begin_anew(self) -> None:
        self.num_backwards = self._num_asked = 0
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
            self._manager.step.check_idle("step()")
        if self._manager.grads.num_backwards:
            raise GeminiError(
                "step() has gradients that engine.backward(loss) did not make: call it in place of loss.backward(), as "
                "it counts micro-batches, or engine.optimizer.step() in place of engine.step()"
            )
