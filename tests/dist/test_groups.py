"""Models on sub-groups of the ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import group_cases
from tests.harness.ranks import RankPool


@pytest.mark.parametrize(
    "case",
    [
        group_cases.pairs_make_models_again,
        group_cases.three_of_four_make_models_again,
        group_cases.two_models_of_which_one_is_closed,
        group_cases.one_rank_has_another_group_more,
    ],
    ids=lambda case: case.__name__,
)
def test_sub_groups_of_four_ranks(ranks: RankPool, case: Callable[..., Any]) -> None:
    ranks(4).run(case)
