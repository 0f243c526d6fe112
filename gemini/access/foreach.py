"""Functions on lists (`torch._foreach_*`) of tensors that fetch themselves: called for a part of the lists at a time.

A single call would need the chunks of all its parameters at once, which the slots of a small budget cannot hold, or all
gradients of a model whole. The functions work element by element, so one is called for each run of elements that need
the same chunk or gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, groupby
from typing import Any


def for_each_run(
    use: Callable[[tuple[Any, ...], dict[str, Any]], Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    need_of: Callable[[Any], object],
) -> Any:
    """The result of `use(args, kwargs)`, a call of the function `name`. Raises RuntimeError if list lengths differ.

    need_of: a key for what an element of a list needs; elements in a row with one key are used together. None: nothing.
    """
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    lengths = [len(value) for value in lists]
    # torch would raise this itself, but it is given runs only, which have equal lengths.
    if min(lengths) != max(lengths):
        raise RuntimeError(f"{name} takes lists of the same length, found {lengths}")

    results: list[Any] = []
    # A run ends where one of the lists needs another chunk or gradient.
    for _, run in groupby(range(lengths[0]), lambda position: [need_of(each[position]) for each in lists]):
        positions = list(run)
        part = slice(positions[0], positions[-1] + 1)

        def cut(value: Any, part: slice = part) -> Any:
            return value[part] if isinstance(value, (list, tuple)) else value

        results.append(use(tuple(map(cut, args)), {key: cut(value) for key, value in kwargs.items()}))
    # Functions in place return None, others a list or tuple of tensors.
    return None if results[0] is None else type(results[0])(chain.from_iterable(results))
