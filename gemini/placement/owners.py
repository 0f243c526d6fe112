"""Which rank updates which whole tensor, in numbers: tensors in windows, and in each window an owner for every tensor.

An optimizer of whole tensors, such as Muon, works on one rank at a time for each tensor. All ranks work at once only if
tensors of similar work in all are exchanged together: a window. Its memory is bounded, because a rank holds the whole
gradient, weight and states of what it owns in it. Everything here follows from shapes, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

WINDOW_NUMEL = 2**22
"""Elements that a rank owns in a window, on average, unless one tensor has more: 16 MiB of each state in fp32."""


def work_of(shape: Sequence[int]) -> int:
    """The work of a tensor's update, for comparison: of matrices n * m * min(n, m), of a batch of them for each."""
    # Of an optimizer that makes no products of matrices this is no measure of time. Its work is as good as none then,
    # and large tensors are divided evenly by it all the same.
    return prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


def windows(numels: Sequence[int], largest: int, num_ranks: int) -> list[range]:
    """Consecutive chunks in windows.

    Args:
        numels: elements of the whole tensors of each chunk.
        largest: elements of the largest tensor of all.
        num_ranks: that share the work.
    """
    most = num_ranks * max(WINDOW_NUMEL, largest)
    found: list[range] = []
    start = held = 0
    for number, numel in enumerate(numels):
        if held and held + numel > most:
            found.append(range(start, number))
            start, held = number, 0
        held += numel
    if start < len(numels):
        found.append(range(start, len(numels)))
    return found


def owners(works: Sequence[int], num_ranks: int) -> list[int]:
    """The rank that updates each tensor: the largest work first, to the rank with the least so far (Graham 1969)."""
    loads = [0] * num_ranks
    found = [0] * len(works)
    for number in sorted(range(len(works)), key=lambda each: (-works[each], each)):
        rank = min(range(num_ranks), key=lambda each: (loads[each], each))
        found[number] = rank
        # A tensor without elements is work, too: its step is counted.
        loads[rank] += max(1, works[number])
    return found
