"""A small set of combinations in which every pair of values of any two options occurs at least once."""

import heapq
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
    pairs = [_pairs(combination) for combination in every]
    missing = set().union(*pairs)
    chosen = []
    # What a combination covers becomes fewer pairs with each one that is chosen, never more. So most need no look: an
    # old number that is not the largest cannot become it.
    best_first = [(-len(its), place) for place, its in enumerate(pairs)]
    heapq.heapify(best_first)
    while missing:
        _, place = heapq.heappop(best_first)
        now = -len(missing & pairs[place]), place
        if best_first and now > best_first[0]:
            heapq.heappush(best_first, now)
            continue
        missing -= pairs[place]
        chosen.append(every[place])
    return chosen


def sampled_pairs(
    options: dict[str, Sequence[Any]],
    allowed: Any = lambda combination: True,
    seeds: Sequence[dict[str, Any]] = (),
    tries: int = 300,
) -> list[dict[str, Any]]:
    """The same for options of which there are too many combinations to list: each is grown from a missing pair.

    seeds: values of some options that must occur together, too. What has these values, or a pair, is left out if none
    of `tries` random combinations of it is allowed.
    """
    names, chance = list(options), random.Random(0)
    values = [(name, value) for name in names for value in options[name]]
    missing = dict.fromkeys(p for p in itertools.combinations(values, 2) if p[0][0] != p[1][0])
    chosen: list[dict[str, Any]] = []

    def grow(wanted: dict[str, Any]) -> None:
        drawn = ({name: wanted.get(name, chance.choice(options[name])) for name in names} for _ in range(tries))
        combination = next((each for each in drawn if allowed(each)), None)
        if combination is None:
            return
        for name in chance.sample(names, len(names)):
            if name not in wanted:
                others = [combination | {name: value} for value in chance.sample(options[name], len(options[name]))]
                others = [each for each in others if allowed(each)]
                combination = max(others, key=lambda each: len(missing.keys() & _pairs(each)))
        for pair in _pairs(combination):
            missing.pop(pair, None)
        chosen.append(combination)

    for seed in seeds:
        grow(seed)
    while missing:
        pair = next(iter(missing))
        grow(dict(pair))
        missing.pop(pair, None)
    return chosen


def _pairs(combination: dict[str, Any]) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(itertools.combinations(combination.items(), 2))
