"""What a device has for one model while it is trained: read by every rank at each step, and agreed.

Readings differ from rank to rank, and plans that follow from them must not. So they travel in the all-reduce that a
step makes anyway, each rank's in a place of its own; every rank takes the least free bytes and the most activations.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemini.memory.ledger import Ledger
from gemini.monitor.device import DeviceSource

_UNKNOWN = -1


@dataclass(frozen=True)
class LiveBytes:
    """Of the device, as all ranks agreed on it at a step.

    Args:
        free: bytes that the model's data may take, its own included. None: the device has no bound.
        activations: the most bytes that a step takes besides model data. None: not known.
    """

    free: int | None
    activations: int | None


class LiveMemory:
    """One model's view of its device."""

    def __init__(self, source: DeviceSource, ledger: Ledger) -> None:
        """ledger: of the model's data on that device."""
        self._source = source
        self._ledger = ledger
        self._agreed: LiveBytes | None = None
        source.reset_peak()

    def words(self, rank: int, world_size: int) -> list[int]:
        """This rank's readings at its places, zeros at the others': sums over ranks are all readings. Local."""
        reading = self._source.read()
        free, peak = reading.available_bytes, reading.peak_bytes
        words = [0] * (2 * world_size)
        words[2 * rank] = _UNKNOWN if free is None else free + self._ledger.total_bytes
        # what is allocated between backward and update outlives steps: model data, buffers, the user's own tensors
        words[2 * rank + 1] = _UNKNOWN if peak is None else max(0, peak - reading.allocated_bytes)
        return words

    def agree(self, words: list[int]) -> None:
        """words: sums over ranks. Local, and equal on all of them."""
        free, activations = words[::2], words[1::2]
        self._agreed = LiveBytes(
            None if _UNKNOWN in free else min(free), None if _UNKNOWN in activations else max(activations)
        )

    def take(self) -> LiveBytes | None:
        """What the last step has agreed on. None: it was taken already."""
        agreed, self._agreed = self._agreed, None
        return agreed

    def restart(self) -> None:
        """Another plan is in force: activations are measured from here."""
        self._source.reset_peak()
