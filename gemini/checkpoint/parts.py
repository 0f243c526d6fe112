"""Schedulers, samplers and loaders of a script: anything with `state_dict()`, alone, in a list or in a dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gemini.errors import CheckpointError


def states_of(part: Any, what: str) -> Any:
    """The states of `part`. Raises TypeError for an object without `state_dict()`."""
    if part is None:
        return None
    if isinstance(part, (list, tuple)):
        return [states_of(each, f"{what}[{number}]") for number, each in enumerate(part)]
    if isinstance(part, Mapping):
        return {str(name): states_of(each, f"{what}[{name!r}]") for name, each in part.items()}
    if not callable(getattr(part, "state_dict", None)):
        raise TypeError(f"{what} is a {type(part).__name__} without state_dict(): give what has one, or a list or dict")
    return part.state_dict()


def load_into(part: Any, state: Any, what: str) -> None:
    """Load what `states_of` returned. Raises what `load_state_dict` raises."""
    for each, its in pairs(part, state, what):
        each.load_state_dict(its)


def pairs(part: Any, state: Any, what: str) -> list[tuple[Any, Any]]:
    """Each object with its state. Raises CheckpointError if the checkpoint has other ones."""
    if part is None:
        return []
    if state is None:
        raise CheckpointError(f"the checkpoint has no state of {what}: leave it out, and it begins anew")
    if isinstance(part, (list, tuple)):
        if not isinstance(state, list) or len(state) != len(part):
            number = len(state) if isinstance(state, list) else "no list of them"
            raise CheckpointError(f"{what} has {len(part)} objects, the checkpoint has {number}")
        return [
            pair
            for number, (each, its) in enumerate(zip(part, state, strict=True))
            for pair in pairs(each, its, f"{what}[{number}]")
        ]
    if isinstance(part, Mapping):
        names = [str(name) for name in part]
        if not isinstance(state, Mapping) or sorted(names) != sorted(state):
            there = sorted(state) if isinstance(state, Mapping) else "no dict of them"
            raise CheckpointError(f"{what} has {sorted(names)}, the checkpoint has {there}")
        return [
            pair
            for (_, each), name in zip(part.items(), names, strict=True)
            for pair in pairs(each, state[name], f"{what}[{name!r}]")
        ]
    if not callable(getattr(part, "load_state_dict", None)):
        raise TypeError(f"{what} is a {type(part).__name__} without load_state_dict()")
    return [(part, state)]
