"""Live memory statistics: readings over time, and what others take beside the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from gemini.memory.tier import Ledger
from gemini.monitor.device import DeviceSource, PositionPeaks, source_of
from gemini.monitor.readings import DeviceReading, DiskSource, HostReading, HostSource, MemoryReading
from gemini.settings import Device

# -- `MemoryMonitor`: the only reader of live memory.
#
# It only reports. How much of the free memory a model may use is decided in planning (`gemini/model/wrap.py`).


class MemoryMonitor:
    """Reads how much memory the device, the host and a disk have free, and who holds the rest. Needs no model.

    A CUDA device is looked up in NVIDIA's driver by its UUID, so that CUDA_VISIBLE_DEVICES in any form, and MIG
    instances, mean the same as for CUDA. If the driver's library does not work, a warning says so once, and only the
    CUDA runtime is asked. Nothing communicates with other processes or waits for the device. Each rank has its own
    monitor, and readings differ between ranks. Local.

    Args:
        device: "emulated", an int, a string or a torch.device, as in `Settings`, or an `EmulatedDevice`.
            None: the current accelerator, else the emulated device, which has no bound.
        directory: a directory whose file system is read too. It need not exist yet. None: no disk is read.

    Raises TypeError or ValueError for a device that does not exist.

    Example:
        >>> monitor = MemoryMonitor("emulated", directory=".")
        >>> reading = monitor.read()
        >>> 0 < reading.host.available_bytes <= reading.host.total_bytes
        True
        >>> reading.disk.free_bytes <= reading.disk.total_bytes
        True
    """

    def __init__(self, device: Device | DeviceSource = None, *, directory: str | Path | None = None) -> None:
        self._device = source_of(device)
        self._host = HostSource()
        self._disk = None if directory is None else DiskSource(Path(directory))

    def read(self) -> MemoryReading:
        """The present reading. Local; cheap enough for every step (`python -m benchmarks.memory_monitor` times it).

        Raises OSError if the directory's file system does not answer.
        """
        return MemoryReading(self.read_device(), self.read_host(), None if self._disk is None else self._disk.read())

    def read_device(self) -> DeviceReading:
        """The present reading of the device only. Local; raises nothing."""
        return self._device.read()

    def read_host(self) -> HostReading:
        """The present reading of the host only. Local; raises nothing."""
        return self._host.read()

    def record_peaks(self) -> PositionPeaks:
        """A context manager that records the peak of non-model bytes at each position of the code inside. Local.

        On CUDA the allocator's peak is reset at each position, so `torch.cuda.max_memory_allocated()` covers the time
        since the last position. On the emulated device a dispatch mode counts storages. Raises nothing.

            >>> with MemoryMonitor("emulated").record_peaks() as peaks:
            ...     peaks.at("first")
            ...     kept = torch.zeros(1000).sum()
            ...     peaks.at("second")
            ...     kept = torch.zeros(500)
            >>> peaks.by_position["first"] >= 4000 > peaks.by_position["second"] >= 2000
            True
        """
        return PositionPeaks(self._device.peak_meter())


# -- The device memory that one model may use while it is trained: read by every rank at each step, and agreed on.
#
# Readings differ between ranks, but the plans made from them must not. So the readings travel in the all-reduce that a
# step makes anyway, each rank's in a place of its own. All ranks use the least free bytes and the most activations.


# Each rank has three words: free bytes, the peak of activations in bytes, and new out-of-memory failures.
_NUM_FIGURES = 3
# Known figures are at least 0, so that this one loses against each of them in a maximum over ranks.
_UNKNOWN = -1
_UNBOUNDED = 1  # stands for negated free bytes, which are at most 0: the maximum over ranks is then unbounded


def _negated(free: int) -> int:
    """Free bytes, or `_UNKNOWN`, such that the maximum over ranks is that of the rank with the fewest."""
    return _UNBOUNDED if free == _UNKNOWN else -free


def _free_of(negated: int) -> int | None:
    """The inverse of `_negated`. None: there is no bound."""
    return None if negated == _UNBOUNDED else -negated


@dataclass(frozen=True)
class LiveBytes:
    """The device's memory, as all ranks agreed on it at a step.

    Args:
        free: bytes for model data, including those that it holds already. None: the device has no bound.
        activations: peak of non-model bytes in a step. None: unknown.
        is_short: the device of some rank ran out of memory since the step before.
    """

    free: int | None
    activations: int | None
    is_short: bool = False


_WINDOW = 100
"""Steps in a window. A peak is forgotten one window after its own has ended: after 100 to 200 steps."""


class MostSeen:
    """The peak of activations over the last 100 to 200 steps.

    Batches of several sizes take turns, and evaluation runs between steps. The memory of a large batch must still be
    free when the next large one comes, although smaller ones came in between.
    """

    def __init__(self) -> None:
        self._windows: list[int | None] = [None, None]  # peaks of the last full window and of the present one
        self._num_steps = 0

    @property
    def bytes(self) -> int | None:
        """The peak, in bytes. None: nothing was measured."""
        return _greatest(*self._windows)

    def note(self, num_bytes: int | None) -> None:
        """Record the peak since the last call."""
        self._windows[1] = _greatest(self._windows[1], num_bytes)

    def step(self) -> bool:
        """Count a step. Returns whether it was the last of a window."""
        self._num_steps += 1
        if self._num_steps < _WINDOW:
            return False
        self._windows, self._num_steps = [self._windows[1], None], 0
        return True


def _greatest(*figures: int | None) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)


class LiveMemory:
    """One model's readings of its device."""

    def __init__(self, source: DeviceSource, ledger: Ledger) -> None:
        """ledger: the ledger of the model's data on that device."""
        self._source = source
        self._ledger = ledger
        self._agreed: LiveBytes | None = None
        self._most = MostSeen()
        # Failures that all ranks have handled, and those of the last reading: the difference is new.
        self._num_ooms = self._read_ooms = self._ooms(source.read())
        # What this process took before is no activation of this model.
        source.reset_peak()

    def words(self, rank: int, world_size: int) -> list[int]:
        """This rank's readings in its own places, and zeros elsewhere. A sum over ranks yields all readings. Local."""
        words, figures = [0] * (_NUM_FIGURES * world_size), self._figures(self._source.read())
        # The ledger may count evaded shortages that the source does not count, as on the emulated device. The
        # difference is below 0 then.
        words[_NUM_FIGURES * rank : _NUM_FIGURES * (rank + 1)] = [*figures, max(0, self._read_ooms - self._num_ooms)]
        # Without a reset the source would report the peak of all steps for ever.
        if self._most.step():
            self._source.reset_peak()
        return words

    def shortage(self) -> list[int]:
        """Return [new out-of-memory failures, activations, negated free bytes] of this rank. Local.

        `agree_on_shortage` takes the maximum of each over all ranks.
        """
        before, (free, activations) = self._num_ooms, self._figures(self._source.read())
        self.forgive()
        return [self._num_ooms - before, activations, _negated(free)]

    def forgive(self) -> None:
        """Count the out-of-memory failures up to the last reading as handled by all ranks. Local."""
        self._num_ooms = self._read_ooms

    def agree_on_shortage(self, words: list[int]) -> None:
        """Adopt the figures of a shortage. words: maxima over ranks. Local, and equal on all ranks."""
        ooms, activations, negated = words
        self._agreed = LiveBytes(_free_of(negated), None if activations == _UNKNOWN else activations, ooms > 0)

    def bound(self, most_activations: int | None) -> list[int]:
        """Return [whether this rank lacks activations or a bound, the bound, negated free bytes] of this rank. Local.

        `agree_on_bound` takes the maximum of each over all ranks. most_activations: the bound for the batch at hand.
        """
        free, activations = self._figures(self._source.read())
        is_unknown = activations == _UNKNOWN or most_activations is None
        return [int(is_unknown), most_activations or 0, _negated(free)]

    def agree_on_bound(self, words: list[int]) -> LiveBytes | None:
        """The agreed bound, as `activations`. None: some rank has none. words: maxima over ranks. Local."""
        is_unknown, most_activations, negated = words
        return None if is_unknown else LiveBytes(_free_of(negated), most_activations)

    def _figures(self, reading: DeviceReading) -> tuple[int, int]:
        """Return (free bytes, including the model's own; peak of activations of the last steps)."""
        self._read_ooms = self._ooms(reading)
        free, peak = reading.available_bytes, reading.peak_bytes
        # Memory that is allocated between backward and update outlives steps, so it is no activation: model data,
        # buffers, the user's own tensors.
        self._most.note(None if peak is None else max(0, peak - reading.allocated_bytes))
        most_bytes = self._most.bytes
        return (
            # Other processes alone may hold more than an emulated device has, if its capacity was lowered.
            _UNKNOWN if free is None else max(0, free + self._ledger.total_bytes),
            _UNKNOWN if most_bytes is None else most_bytes,
        )

    def _ooms(self, reading: DeviceReading) -> int:
        """The number of out-of-memory failures, without those of model data that was put on the host instead."""
        return reading.num_ooms - self._ledger.num_evaded

    def agree(self, words: list[int]) -> None:
        """Adopt the readings of all ranks at a step. words: sums over ranks. Local, and equal on all ranks."""
        free, activations, ooms = (words[each::_NUM_FIGURES] for each in range(_NUM_FIGURES))
        self._agreed = LiveBytes(
            None if _UNKNOWN in free else min(free),
            None if _UNKNOWN in activations else max(activations),
            any(ooms),
        )

    def pop_agreed(self) -> LiveBytes | None:
        """Return what the last step has agreed on, once. None: it was taken already."""
        agreed, self._agreed = self._agreed, None
        return agreed

    @contextmanager
    def moving(self) -> Iterator[None]:
        """A context for moves of model data, whose temporary memory would look like activations. Local.

        Earlier peaks are kept, and measuring starts again at the end of the block.
        """
        # The call records the peak so far, which the reset below would lose.
        self._figures(self._source.read())
        try:
            yield
        finally:
            self._source.reset_peak()
