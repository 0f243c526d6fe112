"""A small set of combinations in which every pair of values of any two options occurs at least once."""

import itertools
import random
from collections.abc import Sequence
from typing import Any


def all_pairs(options: dict[str, Sequence[Any]], allowed: Any = lambda combination: True) -> list[dict[str, Any]]:
    """Greedy: the next combination is the one, of many tried in a fixed order, that covers most new pairs."""
    names = list(options)
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*options.values())]
    every = [combination for combination in every if allowed(combination)]
    random.Random(0).shuffle(every)
    missing = {pair for combination in every for pair in _pairs(combination)}
    chosen = []
    while missing:
        best = max(every, key=lambda combination: len(missing & _pairs(combination)))
        missing -= _pairs(best)
        chosen.append(best)
    return chosen


def _pairs(combination: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(combination.items(), 2))
