"""Handles failures of a forward, a backward or a step: whom to tell, what to drop, and how training goes on."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from gemini.errors import GeminiError, UpdatedInBackwardError, closed, torn
from gemini.log import warn_at_script
from gemini.memory.disk import DiskFailure
from gemini.ranks.communicator import Communicator
from gemini.ranks.exit_report import words_of
from gemini.runtime.calls import Underway, backward_runs
from gemini.runtime.grads import NOT_ENDED, GradStore
from gemini.runtime.params import ParamStore

# Functions in these files may lose their locals. contextlib is one of them, because the frame of a context manager that
# is a generator would keep ours open.
_PACKAGES = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent), contextlib.__file__
_graph_task_id = torch._C._current_graph_task_id
_DROPPED = (
    "the gradients since the last step are incomplete and were dropped. Weights and optimizer state are as after "
    "that step"
)


class Failures:
    """The failures of one model. With several ranks the Watchdog tells the others."""

    def __init__(self, underway: Underway, params: ParamStore, grads: GradStore, communicator: Communicator) -> None:
        self._underway = underway
        self._params = params
        self._grads = grads
        self._communicator = communicator
        self._has_failed = False
        self._is_disturbed = False  # on one rank: an exception may have left slots, pins or plain parameters behind
        self._torn_by = ""  # on one rank: the error that left weights half updated
        self.is_closed = False  # slots, process group and disk were given back

    def note_close(self) -> None:
        """The model gives its slots and its process group back: several ranks cannot start together again."""
        self.is_closed = True

    def pop_failure(self) -> bool:
        """Whether a forward, backward or step may have failed since the last call. Local, and equal on all ranks.

        Several ranks know of it once they have started together again, see `recover`. One rank also counts a forward
        that no backward followed: the loss or its backward may have failed in the script's own code.
        """
        had, self._has_failed = self._has_failed, False
        return had or (self._communicator.watch is None and self._underway.awaits_backward)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """What leaves this block as an exception is told to the other ranks.

        One rank alone notes it for `pop_failure`, and cleans up at its next use: an interrupt, or an error of the
        machine's, may have come in the middle of a fetch or a release. Several ranks start together, see `recover`.
        """
        builds_graph = torch.is_grad_enabled()
        try:
            yield
        except BaseException as error:
            self.publish(error, builds_graph)
            raise

    def publish(self, error: BaseException, builds_graph: bool) -> None:
        """Do what `publishing` does with an exception, for hooks that run too often for a context of their own.

        builds_graph: whether autograd recorded before.
        """
        # Noted first: a second interrupt may come in here. A refusal of ours comes before anything has changed.
        is_refusal = isinstance(error, GeminiError) and not isinstance(error, DiskFailure)
        self._is_disturbed |= self._communicator.watch is None and not is_refusal
        self._communicator.publish(error)
        self._has_failed |= self._communicator.watch is None and not isinstance(error, UpdatedInBackwardError)
        self._find_loss()
        # The exit of a torch.no_grad() may have been interrupted.
        torch.set_grad_enabled(builds_graph)

    def forward_failed(self, error: BaseException) -> None:
        """A forward ended with an exception, and its hooks have ended its calls. Local.

        One rank goes on with the traces of earlier passes. Several ranks forget theirs, see `recover`: a rank that had
        ended a pass by then, and others that had not, would evict different chunks from then on.
        """
        self._communicator.publish(error)
        if self._communicator.watch is not None:
            return
        self._has_failed = True
        # The forward around it goes on, or fails in turn.
        if self._underway.calls.num_forwards:
            return
        num_forwards = self._underway.fail_forward()
        # The pass's only forward has failed: its trace stays as it was. A pass with earlier forwards, which a backward
        # may still follow, goes on without a prediction.
        if num_forwards == 1:
            self._params.next_use.drop_pass()
        elif num_forwards:
            self._params.next_use.break_pass()

    @contextmanager
    def ending_calls(self) -> Iterator[None]:
        """Around a call of the model: an exception that leaves it ends the calls inside. See [Note: Ended calls]."""
        calls = self._underway.calls
        depth = calls.depth()
        builds_graph = torch.is_grad_enabled()
        try:
            yield
        except BaseException as error:
            # Inside a backward it is the backward that has failed. `find` drops what has, once it no longer runs.
            if calls.end_above(depth) and _graph_task_id() == -1:
                self._communicator.publish(error)
                # The exit of a torch.no_grad() may have been interrupted.
                torch.set_grad_enabled(builds_graph)
            raise

    def find(self) -> None:
        """Find a forward or backward that ended with an exception which the script caught. See [Note: Ended calls]."""
        calls = self._underway.calls
        # Nothing can be dropped inside a backward: its nodes use the slots.
        if _graph_task_id() != -1:
            return
        if (calls.by_thread or self._params.in_step) and not calls.still_run():
            calls.end_all()
            self._communicator.publish(_caught("forward"))
            # Several ranks start together, in `recover`.
            if self._communicator.watch is None:
                self._has_failed = self._is_disturbed = True
                self._communicator.position.reset()
        # Inside an `except` block: a function whose frame is in the traceback alone is over.
        clear_our_frames()
        is_disturbed = self._is_disturbed or self._underway.has_lost_touch
        if is_disturbed and not (calls.by_thread or self._grads.in_backward or self._underway.is_touched):
            # No code of ours runs now, so slots, pins and classes can be put back to what they are between two uses.
            if self._grads.is_ending:
                warn_at_script(f"discarding gradients ended with an exception: {_DROPPED}")
                self._grads.reset()
            self._underway.forget_forward()
            self._params.reset()
            self._is_disturbed = False  # last: what is interrupted in here is done again
        if self._grads.in_backward and not backward_runs():
            self._communicator.publish(_caught("backward"))
            # Several ranks drop the step together, in `recover`.
            if self._communicator.watch is None:
                if not self._grads.are_used:
                    warn_at_script(f"a backward ended with an exception: {_DROPPED}")
                self.abandon()

    def abandon(self) -> None:
        """Forget a step that failed half way: nothing stays pinned, open or expected."""
        self._has_failed = True
        # The backward updates weights, and has not come to all of them. Where it has, the step has nothing left to do.
        if self._grads.are_used and (self._grads.in_backward or self._grads.are_any_left):
            self._tear(GeminiError(NOT_ENDED))
        clear_our_frames()
        self._underway.reset()
        self._grads.reset()
        self._communicator.position.reset()
        self._params.reset()
        # Written last: after an interrupt in this method the next use abandons the step again.
        self._grads.abandon_backward()

    @contextmanager
    def tearing(self) -> Iterator[None]:
        """Around an update: an exception would leave weights half updated, and no rank may go on with these."""
        try:
            yield
        except BaseException as error:
            self._tear(error)
            raise

    def _find_loss(self) -> None:
        """Where the disk has lost what was to be written there no rank may go on, as behind half an update."""
        disk = self._params.memory.disk
        if disk is not None and disk.lost and not self._torn_by:
            self._tear(DiskFailure(disk.lost))

    def _tear(self, error: BaseException) -> None:
        """No rank may go on with these weights, because of `error`."""
        if self._communicator.watch is not None:
            self._communicator.watch.tear(error)
        else:
            self._torn_by = words_of(error)

    def recover(self) -> None:
        """After a failure that every rank caught, forget that step and start together again. Collective in that case.

        Raises GeminiError if the failure left weights half updated, and on several ranks if the model is closed.
        """
        disk = self._params.memory.disk
        if disk is not None and disk.lost:
            self._find_loss()
            self._communicator.publish(DiskFailure(disk.lost))
        if self._torn_by:
            raise torn(self._torn_by)
        watch = self._communicator.watch
        # What one rank still has, such as weights at home, it may read.
        if watch is not None and self.is_closed:
            raise closed()
        # `failed` is set by a failure of this rank and by one that this rank has heard of.
        if watch is not None and watch.failed:
            if self._grads.num_backwards and not self._grads.are_used:
                warn_at_script(f"a forward, backward or step ended with an exception: {_DROPPED}")
            self.abandon()
            self._communicator.restart()


def clear_our_frames() -> None:
    """Drop the locals of our own and torch's functions from the traceback of the exception that is being handled.

    An interrupt in one of these functions leaves a view of a slot there, and a script that saves the model inside its
    `except` block would find that slot held; or a guard of torch, whose end changes the grad mode. Functions of the
    user keep their locals, for debuggers.
    """
    error = sys.exc_info()[1]
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_filename.startswith(_PACKAGES):
                # A frame that still runs cannot be cleared.
                with suppress(RuntimeError):
                    frame.clear()
        # An exception that was raised while another one was handled refers to that one, whose frames count as well.
        error = error.__context__


def _caught(what: str) -> GeminiError:
    """The error to publish for a forward or backward whose exception the script caught."""
    return GeminiError(f"its last {what} ended with an exception, which its script caught")
