"""What an optimizer's state dict must have to be this optimizer's: checked before anything is changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from torch import Tensor

from gemini.chunks.chunk import ManagedParameter
from gemini.optimizer.runs import EntryNames

_HYPERPARAMETERS = ("lr", "betas", "eps", "weight_decay", "momentum", "alpha", "rho", "etas")
"""Hyperparameters by which optimizers are told apart: a param group that lacks one of this optimizer's is foreign."""


def check_state(
    groups: list[dict[str, Any]],
    saved: Mapping[str, Any],
    by_number: Mapping[int, ManagedParameter],
    names_of: Callable[[ManagedParameter], EntryNames],
) -> None:
    """Raises ValueError unless `saved` fits the param groups and parameters of this optimizer, and names what is wrong.

    by_number: the parameters by their number in the state dict. names_of: what an entry of a parameter has.
    """
    for key in ("state", "param_groups"):
        if key not in saved:
            raise ValueError(
                f"this is not an optimizer state dict: it has no {key!r} (found {sorted(map(str, saved))})"
            )
    sizes, loaded = ([len(group["params"]) for group in each] for each in (groups, saved["param_groups"]))
    if sizes != loaded:
        raise ValueError(f"the state dict has param groups of {loaded} parameters, this optimizer of {sizes}")
    for group, loaded_group in zip(groups, saved["param_groups"], strict=True):
        missing = [name for name in _HYPERPARAMETERS if name in group and name not in loaded_group]
        if missing:
            raise ValueError(
                f"a param group of the state dict has no {', '.join(missing)}, found "
                f"{sorted(name for name in loaded_group if name != 'params')}: it is another optimizer's"
            )
    for part in ("state", "masters"):
        if not isinstance(saved.get(part, {}), Mapping):
            raise ValueError(f"{part!r} of an optimizer state dict must be a dict, found {type(saved[part]).__name__}")
        for number, entry in saved.get(part, {}).items():
            if number not in by_number:
                raise ValueError(f"{part} of parameter {number}: this optimizer has no such parameter")
            who = f"parameter {number} ({by_number[number].name})"
            if part == "masters":
                _check_tensor("master", entry, who, by_number[number])
            elif not isinstance(entry, Mapping):
                raise ValueError(f"state of {who} is a {type(entry).__name__}, not a dict")
            else:
                _check_entry(entry, who, by_number[number], names_of(by_number[number]))


def _check_entry(entry: Mapping[str, Any], who: str, managed: ManagedParameter, names: EntryNames) -> None:
    """Raises ValueError unless the entry has the keys and shapes of this optimizer's for a stepped parameter."""
    for name, value in entry.items():
        if name == "step" and not (_is_number(value) and 0 <= float(value) < math.inf):
            raise ValueError(f"step of {who} is not a number of steps: {value!r}")
        is_flat = name in names.flat or (isinstance(value, Tensor) and value.dim() > 0 and name != "step")
        if is_flat and value is not None:
            _check_tensor(name, value, who, managed)
    missing = [name for name in names.needed if entry.get(name) is None]
    foreign = [str(name) for name in entry if names.known is not None and name not in names.known]
    if missing or foreign:
        keeps = ", ".join(names.known or names.needed)
        raise ValueError(
            f"state of {who} has {', '.join(map(str, entry)) or 'nothing'}; of a parameter that was stepped this "
            f"optimizer keeps {keeps}. Either the state dict is another optimizer's, or a part of it is missing. To "
            "start a parameter from fresh state, leave it out of 'state'"
        )


def _check_tensor(name: str, value: Any, who: str, managed: ManagedParameter) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} of {who} is a {type(value).__name__}, not a tensor")
    if value.shape != managed.shape:
        raise ValueError(f"{name} of {who} has shape {tuple(value.shape)}, expected {tuple(managed.shape)}")


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, Real)
