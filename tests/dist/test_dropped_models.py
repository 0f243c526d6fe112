"""Models that are dropped without `close()`, and wraps that fail, leave no descriptors and threads."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import dropped_cases
from tests.harness.on_ranks import in_soak
from tests.harness.ranks import RankPool

CASES = [
    dropped_cases.dropped_on_one_rank_first,
    dropped_cases.collected_in_the_middle_of_anything,
    dropped_cases.dropped_after_a_failure,
    dropped_cases.failures_that_every_rank_catches,
]


@pytest.mark.soak
def test_models_made_and_dropped_in_turn_leave_at_most_one_process_group(ranks: RankPool) -> None:
    ranks(2).run(dropped_cases.made_and_dropped, 10)


@pytest.mark.parametrize("case", [*in_soak(*CASES[:2]), *CASES[2:]], ids=lambda case: case.__name__)
def test_models_that_are_dropped_disturb_nobody(ranks: RankPool, case: Callable[..., Any]) -> None:
    ranks(2).run(case)


@pytest.mark.soak
def test_wraps_that_fail_give_their_process_groups_back(ranks: RankPool) -> None:
    ranks(2).run(dropped_cases.wraps_that_fail, 10)


def test_wraps_that_fail_on_one_rank_leave_nothing() -> None:
    dropped_cases.wraps_that_fail(0, 1, 20)


@pytest.mark.soak
def test_three_ranks_too(ranks: RankPool) -> None:
    for case in CASES:
        ranks(3).run(case)
    ranks(3).run(dropped_cases.made_and_dropped, 60)
    ranks(3).run(dropped_cases.wraps_that_fail, 40)
