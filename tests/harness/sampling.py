"""`@pytest.mark.sampled(3)`: of a test's cases about one in three runs in `make test`, all of them in `make soak`.

    @pytest.mark.sampled(3)
    @on_ranks(1, 2, soak=(3,))
    @pytest.mark.parametrize("stage", [0, 1, 2, 3])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_what_a_user_does(rank: int, world_size: int, stage: int, dtype: torch.dtype) -> None: ...

Every value of a parameter is in the sample, if there is room for all of them, and of pairs of values as many as there
is room for. What is left out is marked as `soak`, which is done before pytest looks for `-m`. A case that is asked for
by its id runs.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest


def mark_what_is_left_out(items: Sequence[pytest.Item]) -> None:
    """The cases of tests with the mark `sampled` that are in no sample become soak tests."""
    matrices: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            if not hasattr(item, "callspec"):
                raise pytest.UsageError(f"{item.nodeid} has the mark sampled and no parameters")
            if not item.get_closest_marker("soak"):
                matrices.setdefault((str(item.path), item.originalname), []).append(item)
    for cases in matrices.values():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        chosen = sample([_values_of(case) for case in cases], mark.args[0])
        for place, case in enumerate(cases):
            if place not in chosen:
                case.add_marker(pytest.mark.soak)


def _values_of(case: pytest.Function) -> dict[str, str]:
    """What its parameters are, in words, as not all values can be hashed."""
    return {name: repr(value) for name, value in case.callspec.params.items()}


def sample(cases: Sequence[Mapping[str, Hashable]], every: int) -> frozenset[int]:
    """Places of one case in `every`, or of some more, so that no value is missing of a parameter that has few.

    Greedy: next comes what has most values that were not there yet; of equal ones what has most new pairs of values,
    then the first. So a matrix gives the same sample in every process.
    """
    if all(len(case) == 1 for case in cases):  # at equal distances
        return frozenset(range(0, len(cases), every))
    least = -(-len(cases) // every)
    values = [frozenset(case.items()) for case in cases]
    pairs = [frozenset(combinations(sorted(case.items()), 2)) for case in cases]
    new = set().union(*pairs)
    missing = set().union(*values)
    numbers = Counter(name for name, _ in missing)
    missing = {(name, value) for name, value in missing if numbers[name] <= least}
    left, chosen = list(range(len(cases))), []
    while left and (missing or len(chosen) < least):
        place = max(left, key=lambda each: (len(missing & values[each]), len(new & pairs[each])))
        left.remove(place)
        chosen.append(place)
        missing -= values[place]
        new -= pairs[place]
    return frozenset(chosen)
