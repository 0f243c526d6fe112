"""Measures what else is on the device while a step runs: the most bytes beside the model data, by event.

The step says which event begins (`StepPosition.set`); the peak until the next one is that event's. On CUDA the first
training pass is recorded, and each one with a larger batch than all before: the allocator counts on the host, so
nothing waits for the device. Other passes cost nothing. On the emulated device each operation has to be followed,
which is done where `recording()` surrounds a step, or `EmulatedDevice.holding_activations()` a training.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager

from torch.utils._python_dispatch import TorchDispatchMode

from gemini.memory.tier import Ledger
from gemini.monitor.device import DeviceSource, PositionPeaks
from gemini.placement.next_use import StepEvent
from gemini.ranks.communicator import StepPosition

# After this many recorded passes without a backward, as of a script that evaluates with gradients, none is recorded.
_MOST_IN_VAIN = 3


class EventPeaks:
    """A recording that runs."""

    def __init__(self, peaks: PositionPeaks, ledger: Ledger) -> None:
        self._peaks = peaks
        self._ledger = ledger

    def reached(self, event: StepEvent) -> None:
        """`event` begins: the peak from here on is its own. Local."""
        self._peaks.at(event, self._ledger.total_bytes)


class Recorder:
    """The recordings of one model on this rank; their figures are in `model.chunk_manager.trace`.

    Args:
        source: of the device's readings.
        ledger: of the model data on the device.
        position: of the model's steps.
    """

    def __init__(self, source: DeviceSource, ledger: Ledger, position: StepPosition) -> None:
        self.non_model_bytes: dict[StepEvent, int] = {}  # by event: the most of all recordings
        self._source = source
        self._ledger = ledger
        self._position = position
        self._batch_bytes = 0  # of the running call of the model
        # At -1 the first pass is recorded whatever its batch is, also one without tensors, of 0 bytes.
        self._largest_batch = -1  # bytes of the largest batch that was recorded
        self._num_in_vain = 0  # recorded passes that no backward followed
        self._running: PositionPeaks | None = None  # of a pass that is recorded without `recording()`

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context manager around a training step that is recorded, on any device. Local, and need not be on all ranks.

        Raises nothing of its own. The user's dispatch modes are entered before it, or ended inside it.
        """
        self._running = None  # one that a failed step has left
        with PositionPeaks(self._source.peak_meter()) as peaks:
            self._position.begin_recording(EventPeaks(peaks, self._ledger))
            try:
                yield
            finally:
                self._position.end_recording()
        self._learn(peaks)

    def note_batch(self, num_bytes: int) -> None:
        """The model is called with tensors of `num_bytes` in total. Local."""
        self._batch_bytes = num_bytes

    def begin_events(self) -> None:
        """A training pass begins. Local."""
        # The last recorded pass had no backward: a script that never calls one must not be recorded at each forward.
        if self._running is not None:
            self._running = None
            self._position.end_recording()
            self._num_in_vain += 1
        # A step inside of `recording()` is measured already: the position tells one recording only.
        is_free = not self._position.is_recorded and self._num_in_vain < _MOST_IN_VAIN
        if is_free and self._batch_bytes > self._largest_batch:
            meter = self._source.peak_meter()
            # A dispatch mode would have to be entered around the whole step.
            if not isinstance(meter, TorchDispatchMode):
                self._running = PositionPeaks(meter).__enter__()
                self._position.begin_recording(EventPeaks(self._running, self._ledger))

    def end_events(self) -> None:
        """The pass's backward is over. Local."""
        peaks, self._running = self._running, None
        if peaks is not None:
            self._position.end_recording()
            peaks.__exit__(None, None, None)
            self._learn(peaks)
            self._num_in_vain = 0
            # The batch counts as recorded only now: a pass that fails is recorded again.
            self._largest_batch = max(self._largest_batch, self._batch_bytes)

    def find_peak(self, *, has_failed: bool) -> StepEvent | None:
        """The event with the most non-model bytes; None without any. Local.

        has_failed: the last pass failed. If it was recorded, it ended at the event for whose bytes the device had no
            room, and that event is returned. It does not count as recorded in vain, so the next pass is recorded.
        """
        found: Iterable[tuple[Hashable, int]] = self.non_model_bytes.items()
        if has_failed and self._running is not None:
            failed, self._running = self._running, None
            self._position.end_recording()
            failed.__exit__(None, None, None)
            found = failed.by_position.items()
        event, _ = max(found, key=lambda pair: pair[1], default=(None, 0))
        return event if isinstance(event, StepEvent) else None

    def _learn(self, peaks: PositionPeaks) -> None:
        for event, num_bytes in peaks.by_position.items():
            assert isinstance(event, StepEvent)
            self.non_model_bytes[event] = max(num_bytes, self.non_model_bytes.get(event, 0))
