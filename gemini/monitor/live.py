"""What a device has for one model while it is trained: read by every rank at each step, and agreed.

Readings differ from rank to rank, and plans that follow from them must not. So they travel in the all-reduce that a
step makes anyway, each rank's in a place of its own; every rank takes the least free bytes and the most activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gemini.memory.ledger import Ledger
from gemini.monitor.device import DeviceSource
from gemini.monitor.readings import DeviceReading

_NUM_FIGURES = 3
_UNKNOWN = -1
_UNBOUNDED = 1  # in place of free bytes, which are negative or 0: one rank without a bound decides for all


@dataclass(frozen=True)
class LiveBytes:
    """Of the device, as all ranks agreed on it at a step.

    Args:
        free: bytes that the model's data may take, its own included. None: the device has no bound.
        activations: the most bytes that a step takes besides model data. None: not known.
        is_short: the device of a rank ran out of memory since the step before.
    """

    free: int | None
    activations: int | None
    is_short: bool = False


_WINDOW = 100
"""Steps after which activations that no step has needed since may be forgotten, after twice as many at the latest."""


class MostSeen:
    """The most activations of the last 100 to 200 steps. Batches of several sizes take turns, and evaluation comes
    between steps: what one of them has needed is there for the next one like it, though smaller ones came since.
    """

    def __init__(self) -> None:
        self._windows: list[int | None] = [None, None]  # of the steps before, and since
        self._num_steps = 0

    @property
    def bytes(self) -> int | None:
        """None: nothing was seen."""
        return _greatest(*self._windows)

    def note(self, num_bytes: int | None) -> None:
        """So many were needed since the last call."""
        self._windows[1] = _greatest(self._windows[1], num_bytes)

    def step(self) -> bool:
        """A step is over. Whether it was the last of a window."""
        self._num_steps += 1
        if self._num_steps < _WINDOW:
            return False
        self._windows, self._num_steps = [self._windows[1], None], 0
        return True


def _greatest(*figures: int | None) -> int | None:
    return max((figure for figure in figures if figure is not None), default=None)


class LiveMemory:
    """One model's view of its device."""

    def __init__(self, source: DeviceSource, ledger: Ledger) -> None:
        """ledger: of the model's data on that device."""
        self._source = source
        self._ledger = ledger
        self._agreed: LiveBytes | None = None
        self._most = MostSeen()
        self._num_ooms = self._read_ooms = self._ooms(source.read())
        source.reset_peak()

    def words(self, rank: int, world_size: int) -> list[int]:
        """This rank's readings at its places, zeros at the others': sums over ranks are all readings. Local."""
        words, figures = [0] * (_NUM_FIGURES * world_size), self._figures(self._source.read())
        words[_NUM_FIGURES * rank : _NUM_FIGURES * (rank + 1)] = [*figures, max(0, self._read_ooms - self._num_ooms)]
        if self._most.step():
            self._source.reset_peak()  # it would keep the greatest of all steps
        return words

    def shortage(self) -> list[int]:
        """How often the device ran out of memory since that was known, activations, free bytes, negative. Local.

        The greatest of each over all ranks are for `agree_on_shortage`.
        """
        before, (free, activations) = self._num_ooms, self._figures(self._source.read())
        self.forgive()
        return [self._num_ooms - before, activations, _UNBOUNDED if free == _UNKNOWN else -free]

    def forgive(self) -> None:
        """How often the device had run out of memory by the last reading is known to all ranks. Local."""
        self._num_ooms = self._read_ooms

    def agree_on_shortage(self, words: list[int]) -> None:
        """words: the greatest over ranks. Local, and equal on all of them."""
        ooms, activations, free = words
        self._agreed = LiveBytes(
            None if free == _UNBOUNDED else -free, None if activations == _UNKNOWN else activations, ooms > 0
        )

    def bound(self, most_activations: int | None) -> list[int]:
        """Whether activations are known and the bound is, the bound, free bytes, negative. Local.

        The greatest of each over all ranks are for `agree_on_bound`. most_activations: of the batch at hand.
        """
        free, activations = self._figures(self._source.read())
        is_unknown = activations == _UNKNOWN or most_activations is None
        return [int(is_unknown), most_activations or 0, _UNBOUNDED if free == _UNKNOWN else -free]

    def agree_on_bound(self, words: list[int]) -> LiveBytes | None:
        """The bound is in `activations`. None: a rank does not know it. words: the greatest over ranks. Local."""
        is_unknown, most_activations, free = words
        return None if is_unknown else LiveBytes(None if free == _UNBOUNDED else -free, most_activations)

    def _figures(self, reading: DeviceReading) -> tuple[int, int]:
        """Free bytes, the model's own included, and the most activations of the last steps."""
        self._read_ooms = self._ooms(reading)
        free, peak = reading.available_bytes, reading.peak_bytes
        # what is allocated between backward and update outlives steps: model data, buffers, the user's own tensors
        self._most.note(None if peak is None else max(0, peak - reading.allocated_bytes))
        most = self._most.bytes
        return (
            # others alone may hold more than an emulated device has by now
            _UNKNOWN if free is None else max(0, free + self._ledger.total_bytes),
            _UNKNOWN if most is None else most,
        )

    def _ooms(self, reading: DeviceReading) -> int:
        """Those after which somebody has to make room."""
        return reading.num_ooms - self._ledger.num_evaded

    def agree(self, words: list[int]) -> None:
        """words: sums over ranks. Local, and equal on all of them."""
        free, activations, ooms = (words[each::_NUM_FIGURES] for each in range(_NUM_FIGURES))
        self._agreed = LiveBytes(
            None if _UNKNOWN in free else min(free),
            None if _UNKNOWN in activations else max(activations),
            any(ooms),
        )

    def take(self) -> LiveBytes | None:
        """What the last step has agreed on. None: it was taken already."""
        agreed, self._agreed = self._agreed, None
        return agreed

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Around a change of where model data rests, which would pass for activations otherwise. Local.

        What was seen before counts on, and is measured anew from the end of the block.
        """
        self._figures(self._source.read())
        try:
            yield
        finally:
            self._source.reset_peak()
