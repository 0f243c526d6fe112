"""The peak of non-model bytes (activations, workspace) at each position of a run.

The run reports its positions, and the peak until the next report belongs to the position. On CUDA it is the allocated
bytes less the model data. On the emulated device it is the live storages that the user's operations have made;
operations on chunks do not count, see [Note: Modes] in memory/modes.py. Nothing waits for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMeter(Protocol):
    """Measures peaks of memory while it is entered."""

    counts_model_data: bool

    def __enter__(self) -> Any: ...

    def __exit__(self, *error: Any) -> Any: ...

    def pop_peak(self) -> int:
        """The peak since the last call, or since the meter was entered, in bytes."""


class PositionPeaks(AbstractContextManager["PositionPeaks"]):
    """A context manager that finds the peak of non-model bytes at each position of the code inside.

    `MemoryMonitor.record_peaks` makes it. `by_position` has the bytes by the positions that were passed to `at`.
    Local; raises nothing.

    Args:
        meter: measures the device.

    Example:
        >>> with MemoryMonitor("emulated").record_peaks() as peaks:
        ...     peaks.at("forward")
        ...     output = torch.zeros(1000).sum()
        >>> peaks.by_position["forward"] >= 4000
        True
    """

    def __init__(self, meter: PeakMeter) -> None:
        self.by_position: dict[Hashable, int] = {}
        self._meter = meter
        self._position: Hashable = None
        self._model_bytes = 0
        self._is_somewhere = False

    def at(self, position: Hashable, model_bytes: int = 0) -> None:
        """Begin `position`. The peak up to the next call belongs to it. Local; raises nothing.

        position: any key. A repeated position keeps its greatest peak.
        model_bytes: bytes of model data on the device now. Between two calls the smaller of both figures counts, so
            that a peak is never too small. It is exact if positions are reported around each allocation of model data.
        """
        peak, least = self._meter.pop_peak(), min(self._model_bytes, model_bytes)
        # What came before the first position, or after the block, belongs to none.
        if self._is_somewhere:
            bytes_here = max(0, peak - least if self._meter.counts_model_data else peak)
            self.by_position[self._position] = max(bytes_here, self.by_position.get(self._position, 0))
        self._position, self._model_bytes, self._is_somewhere = position, model_bytes, True

    def __enter__(self) -> PositionPeaks:
        self._meter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_somewhere:
            self.at(None, self._model_bytes)
            # The call of `at` has begun another position, to which nothing belongs.
            self._is_somewhere = False
        self._meter.__exit__(*error)


class Emulated(Protocol):
    """A device whose activations are measured and not bounded."""

    activation_bytes: int | None


class StorageMeter(TorchDispatchMode):
    """Measures the live storages that the user's operations have made since the meter was entered.

    Views of older memory, such as weights in a slot, are no new storage. Copies and collectives on chunks are not seen,
    because this mode follows only the user's operations.
    """

    counts_model_data = False

    def __init__(self, device: Emulated | None) -> None:
        """device: receives the overall peak as `activation_bytes` when this mode is left. None: no device does."""
        super().__init__()
        self._device = device
        self._most = 0
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}  # by the storage's address in C++
        self._now = self._peak = 0

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Follow only the user's operations, see [Note: Modes] in memory/modes.py."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Results alone are counted: memory that an operation takes and gives back inside, such as a workspace, is not
        # seen.
        result = func(*args, **(kwargs or {}))
        given: set[int] | None = None
        for storage in _storages(result):
            known = self._alive.get(storage._cdata)
            num_bytes = storage.nbytes()
            if known is not None:
                # It may have been resized. It is noted first, for the same reason as below.
                self._alive[storage._cdata] = known[0], num_bytes
                self._count(num_bytes - known[1])
                continue
            # A storage of an argument is not new: the operation returned a view, or wrote in place.
            if given is None:
                given = {each._cdata for each in _storages((args, kwargs))}
            if storage._cdata not in given:
                # torch keeps the Python object of a storage while its memory lives, so the reference ends with the
                # memory.
                self._alive[storage._cdata] = (
                    weakref.ref(storage, partial(self._remove_dead, storage._cdata)),
                    num_bytes,
                )
                # The storage is counted last, because a `BoundedMeter` may raise here: a refused storage is then known,
                # and is uncounted when it dies.
                self._count(num_bytes)
        return result

    def pop_peak(self) -> int:
        """The peak since the last call, in bytes."""
        # The next peak starts from what is alive now, and not from 0.
        peak, self._peak = self._peak, self._now
        self._most = max(self._most, peak)
        return peak

    def __exit__(self, *error: Any) -> None:
        self.pop_peak()
        if self._device is not None:
            self._device.activation_bytes = self._most
        super().__exit__(*error)

    def _count(self, num_bytes: int) -> None:
        self._now += num_bytes
        self._peak = max(self._peak, self._now)

    def _remove_dead(self, key: int, dead: weakref.ref[Any]) -> None:
        """Uncount a storage that was freed, unless its address belongs to another one by now."""
        known = self._alive.get(key)
        if known is not None and known[0] is dead:
            del self._alive[key]
            self._now -= known[1]


class BoundedMeter(StorageMeter):
    """A `StorageMeter` that raises when live storages exceed a bound."""

    def __init__(self, refuse: Callable[[int], None]) -> None:
        """refuse: a function of the live bytes that raises if they do not fit."""
        super().__init__(None)
        self._refuse = refuse
        self._peak_of_part = 0

    @property
    def peak_bytes(self) -> int:
        """The peak since the last `pop_peak`, in bytes, including a refused storage."""
        return self._peak

    def pop_part_peak(self) -> int:
        """The peak since the last call of this method, in bytes. It leaves `peak_bytes` as it is."""
        peak, self._peak_of_part = self._peak_of_part, self._now
        return peak

    def _count(self, num_bytes: int) -> None:
        super()._count(num_bytes)
        self._peak_of_part = max(self._peak_of_part, self._now)
        # A storage that shrinks is never refused, although others may have taken the device's room meanwhile.
        if num_bytes > 0:
            self._refuse(self._now)


class PartMeter:
    """Measures peaks between calls, on top of a `BoundedMeter` that is entered already."""

    counts_model_data = False

    def __init__(self, whole: BoundedMeter) -> None:
        self._whole = whole

    def __enter__(self) -> PartMeter:
        self._whole.pop_part_peak()
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def pop_peak(self) -> int:
        """The peak since the last call, in bytes."""
        return self._whole.pop_part_peak()


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        # A sparse tensor raises when it is asked for its storage, and a meta tensor has no memory.
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta":
            yield leaf.untyped_storage()
