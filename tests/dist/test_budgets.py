"""Budgets on several ranks: readings are agreed, what a user gives must be equal."""

import pytest

from tests.dist import budget_cases as cases
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("is_built", [False, True])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_read_different_free_memory_go_by_the_least(
    ranks: RankPool, world_size: int, is_built: bool
) -> None:
    found = ranks(world_size).run(cases.readings_that_differ, 7_000, is_built)
    assert all(each[:3] == found[0][:3] for each in found), "one budget, one plan"
    budget, host_bytes, _, own_bytes = found[0]
    assert host_bytes == cases.HOST_BYTES
    if not is_built:
        assert budget == int((cases.FREE_BYTES + own_bytes) * 0.7)


@pytest.mark.parametrize("argument", ["model_data_memory", "device_memory", "host_memory"])
def test_given_budgets_that_differ_are_refused_by_name(ranks: RankPool, argument: str) -> None:
    for words in ranks(2).run(cases.given_budgets_that_differ, argument):
        assert f"{argument}=" in words and "differs between rank 0 and rank 1" in words


@pytest.mark.parametrize("policy", ["auto", "cuda"])
def test_ranks_at_the_least_budget_have_the_bits_of_ranks_without_one(ranks: RankPool, policy: str) -> None:
    ranks(2).run(cases.at_the_least_budget, policy)
