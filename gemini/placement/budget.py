"""Budgets: the bytes that a model's chunks may take on each tier of one rank, given by the user or read live."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.settings import Settings

ACTIVATION_FRACTION = 0.3
"""Fraction of `device_memory` left to activations and workspace until a step has measured them."""

MORE_ACTIVATIONS = 0.1
"""Margin added to the measured activations, because the next batch may be slightly larger."""

_SHARES_OF_ACTIVATIONS = (0.0, 0.06, 0.12, 0.18, 0.24, 0.3, 0.36)
"""Fractions of the device that activations may turn out to need; a chunk size is judged for each of them."""

RESERVE = 0.03
"""Fraction of the device that is never planned: fragmentation makes it unusable for the allocator."""


@dataclass(frozen=True)
class FreeBytes:
    """The free bytes of one rank's tiers, agreed on by all ranks.

    Args:
        device: free bytes, with those of parameters that wrapping frees. None: no bound, or settings name a budget.
        host: free bytes, likewise. None: likewise.
        activations: the peak of non-model bytes that a step has measured on the device. None: not measured yet.
        most_activations: an upper bound of them for the batch at hand, until a step has measured. None: unknown.
    """

    device: int | None = None
    host: int | None = None
    activations: int | None = None
    most_activations: int | None = None

    @property
    def are_activations_unknown(self) -> bool:
        """Whether activations are unknown, so that `ACTIVATION_FRACTION` of the device is left to them."""
        return self.activations is None and self.most_activations is None


@dataclass(frozen=True)
class Budget:
    """Bytes of model data that a rank may hold. None: no bound."""

    device: int | None
    host: int | None

    @staticmethod
    def of(settings: Settings, free: FreeBytes) -> Budget:
        """The budgets that `settings` name; for a tier without one, what is free there."""
        # `model_data_memory` is for chunks alone. `device_memory` includes activations, which are left out of it below.
        device = settings.budget_bytes("model_data_memory")
        if device is None:
            whole = _whole(settings, free)
            device = None if whole is None else whole - _left_out(whole, free)
        host = settings.budget_bytes("host_memory")
        return Budget(device, free.host if host is None else host)

    def wider(self, other: Budget) -> Budget:
        """The larger of the two budgets on each tier, so that data within either budget is within this one."""
        return Budget(_greater(self.device, other.device), _greater(self.host, other.host))


def later_device_bytes(settings: Settings, free: FreeBytes) -> tuple[int, ...]:
    """Sample device budgets that may apply once a step has measured the activations, largest first, in bytes.

    Empty if the user fixed the budget, if there is no bound, or if the activations are already measured: the budget
    does not change then.
    """
    whole = _whole(settings, free)
    if settings.model_data_memory is not None or whole is None or free.activations is not None:
        return ()
    return tuple(int(whole * (1 - RESERVE - share)) for share in _SHARES_OF_ACTIVATIONS)


def _whole(settings: Settings, free: FreeBytes) -> int | None:
    """Device bytes for model data and activations: what the user allows, or less if other processes hold some of it."""
    return _smaller(settings.budget_bytes("device_memory"), free.device)


def _left_out(whole: int, free: FreeBytes) -> int:
    """The part of `whole` bytes that is withheld from model data."""
    if free.activations is not None:
        # At most all of it: other processes may by now have taken what the measured activations need.
        return min(whole, int(free.activations * (1 + MORE_ACTIVATIONS) + whole * RESERVE))
    by_default = whole - int(whole * (1 - ACTIVATION_FRACTION))
    # The bound may be twice the true peak or more. It may only take room from model data: granting room before a step
    # has measured the peak risks running out of memory in that very step.
    if free.most_activations is None or free.most_activations <= by_default:
        return by_default
    # An upper bound needs no margin for a larger batch, only the reserve.
    return min(whole, int(free.most_activations + whole * RESERVE))


def device_memory_for(model_data_bytes: int) -> int:
    """The least `device_memory` that leaves so many bytes to model data until a step has measured its activations."""
    # The error message quotes this number as sufficient, so correct the rounding that `_left_out` applies.
    whole = int(model_data_bytes / (1 - ACTIVATION_FRACTION))
    while whole - _left_out(whole, FreeBytes()) < model_data_bytes:
        whole += 1
    return whole


def is_less(one: int | None, other: int | None) -> bool:
    """Whether budget `one` is smaller than `other`, in bytes. None is no bound, which nothing exceeds."""
    return one is not None and (other is None or one < other)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _greater(one: int | None, other: int | None) -> int | None:
    # None is no bound, which is more than any number.
    return None if one is None or other is None else max(one, other)
