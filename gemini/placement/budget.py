"""Budgets: the bytes that a model's chunks may take on each tier of one rank, given by the user or read live."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.settings import Settings

ACTIVATION_FRACTION = 0.3
"""Of `device_memory`, left to activations and workspace until a step has shown what they need."""

MORE_ACTIVATIONS = 0.1
"""Of the activations that were seen: the next batch may be a little larger."""

_SHARES_OF_ACTIVATIONS = (0.0, 0.06, 0.12, 0.18, 0.24, 0.3, 0.36)
"""Of the device, for which a chunk size is judged before a step has shown its activations."""

RESERVE = 0.03
"""Of the device, left to what an allocator cannot use of it."""


@dataclass(frozen=True)
class FreeBytes:
    """What the tiers of a rank have free, as ranks agreed on it.

    Args:
        device: bytes, those of parameters that wrapping frees included. None: no bound, or settings name a budget.
        host: bytes. None: likewise.
        activations: the most bytes on the device that a step took besides model data. None: no step has shown it.
        most_activations: before a step has shown it, what the batch at hand takes at most. None: nobody knows.
    """

    device: int | None = None
    host: int | None = None
    activations: int | None = None
    most_activations: int | None = None

    @property
    def are_activations_unknown(self) -> bool:
        """So that `ACTIVATION_FRACTION` of the device is left to them."""
        return self.activations is None and self.most_activations is None


@dataclass(frozen=True)
class Budget:
    """Bytes of model data that a rank may hold. None: no bound."""

    device: int | None
    host: int | None

    @staticmethod
    def of(settings: Settings, free: FreeBytes) -> Budget:
        """What `settings` give, and what is free where they do not."""
        device = settings.budget_bytes("model_data_memory")
        if device is None:
            whole = _whole(settings, free)
            device = None if whole is None else whole - _left_out(whole, free)
        host = settings.budget_bytes("host_memory")
        return Budget(device, free.host if host is None else host)

    def wider(self, other: Budget) -> Budget:
        """What keeps to one of the two keeps to this."""
        return Budget(_greater(self.device, other.device), _greater(self.host, other.host))


def later_device_bytes(settings: Settings, free: FreeBytes) -> tuple[int, ...]:
    """Budgets of the device that may follow when a step has shown its activations, from the largest on.

    Some of all that there may be. None where the user gave the budget, where there is no bound, or where activations
    are known.
    """
    whole = _whole(settings, free)
    if settings.model_data_memory is not None or whole is None or free.activations is not None:
        return ()
    return tuple(int(whole * (1 - RESERVE - share)) for share in _SHARES_OF_ACTIVATIONS)


def _whole(settings: Settings, free: FreeBytes) -> int | None:
    """Of the device, for model data and activations. Others may have a part of what the user allows."""
    return _smaller(settings.budget_bytes("device_memory"), free.device)


def _left_out(whole: int, free: FreeBytes) -> int:
    """Of `whole` bytes: what is not for model data."""
    if free.activations is not None:
        return min(whole, int(free.activations * (1 + MORE_ACTIVATIONS) + whole * RESERVE))
    by_default = whole - int(whole * (1 - ACTIVATION_FRACTION))
    if free.most_activations is None or free.most_activations <= by_default:
        return by_default  # a bound may be far too large: what it does not need is for a step to show
    return min(whole, int(free.most_activations + whole * RESERVE))


def device_memory_for(model_data_bytes: int) -> int:
    """The least `device_memory` that leaves so many bytes to model data before a step has shown its activations."""
    whole = int(model_data_bytes / (1 - ACTIVATION_FRACTION))
    while whole - _left_out(whole, FreeBytes()) < model_data_bytes:
        whole += 1
    return whole


def is_less(one: int | None, other: int | None) -> bool:
    """Bytes of a budget. None is no bound."""
    return one is not None and (other is None or one < other)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min((each for each in (one, other) if each is not None), default=None)


def _greater(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
