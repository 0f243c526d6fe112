"""What all ranks must have alike in an optimizer, as text that they compare.

The text is exact: torch prints four digits of a tensor, so that learning rates of two ranks could differ unseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from gemini.chunks.chunk import ManagedParameter


def in_words(value: Any) -> str:
    """`repr(value)`, with all digits of tensors in it."""
    if isinstance(value, Tensor):
        if value.is_meta:  # of a state that is read from a file later
            return f"tensor of {tuple(value.shape)}, {value.dtype}"
        # Every step comes here: for a learning rate that is a tensor on the device the host waits.
        return f"tensor({value.tolist()}, {value.dtype})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(in_words, value))})"
    return repr(value)


def settings_in_words(group: Mapping[str, Any]) -> str:
    """The hyperparameters of a param group."""
    return ", ".join(
        f"{name}={in_words(value)}" for name, value in group.items() if name not in ("params", "param_names")
    )


def group_in_words(number: int, members: Sequence[ManagedParameter], group: Mapping[str, Any]) -> str:
    """A param group with the names of its members."""
    return f"param group {number} of {', '.join(each.name for each in members)} with {settings_in_words(group)}"


def state_in_words(saved: Mapping[str, Any]) -> str:
    """Which entries an optimizer's state dict has, with everything but the values of whole tensors."""
    return "\n".join(_lines_of(saved))


def _lines_of(saved: Mapping[str, Any]) -> Iterator[str]:
    for number, group in enumerate(saved["param_groups"]):
        yield f"param group {number} with {settings_in_words(group)}"
    for number, entry in sorted(saved["state"].items()):
        # Step counts and other tensors without dimensions are shown with their values, by which updates would differ.
        names = (
            name if isinstance(its, Tensor) and its.dim() else f"{name}={in_words(its)}" for name, its in entry.items()
        )
        yield f"state of parameter {number}: {', '.join(names)}"
    yield f"masters of parameters {sorted(saved.get('masters', {}))}"
