"""A module whose wrapping fails has its weights, and can be trained or wrapped again."""

import pytest

from tests import failing_wraps
from tests.dist.ranks import RankPool


def test_wrapping_that_runs_out_of_memory_at_any_time_leaves_the_module_as_it_was() -> None:
    failing_wraps.at_every_take(0, 1)


def test_wrapping_that_fails_anywhere_else_does_too() -> None:
    failing_wraps.at_other_places(0, 1)


def test_one_rank_that_runs_out_of_memory_leaves_the_module_of_all_as_it_was(ranks: RankPool) -> None:
    ranks(2).run(failing_wraps.at_every_take, 16)


def test_one_rank_that_fails_anywhere_else_does_too(ranks: RankPool) -> None:
    ranks(2).run(failing_wraps.at_other_places)


def test_one_rank_that_fails_late_leaves_a_module_that_was_built_in_part(ranks: RankPool) -> None:
    ranks(2).run(failing_wraps.partly_built_late, 3)


def test_an_edit_of_a_built_module_survives_a_wrap_that_is_refused(ranks: RankPool) -> None:
    ranks(2).run(failing_wraps.an_edit_before_a_refused_wrap)


def test_ctrl_c_while_weights_move_leaves_them_whole() -> None:
    failing_wraps.interrupted_anywhere(0, 1, 41)


def test_ctrl_c_on_one_rank_leaves_the_weights_of_a_built_module_on_all(ranks: RankPool) -> None:
    ranks(2).run(failing_wraps.interrupted_on_one_rank)


@pytest.mark.soak
def test_ctrl_c_at_any_line_leaves_weights_whole() -> None:
    failing_wraps.interrupted_anywhere(0, 1, 1)


@pytest.mark.soak
def test_one_of_three_ranks_fails_late_with_a_module_that_was_built_in_part(ranks: RankPool) -> None:
    ranks(3).run(failing_wraps.partly_built_late, timeout_s=600.0)


@pytest.mark.soak
def test_one_of_three_ranks_runs_out_of_memory_at_any_time(ranks: RankPool) -> None:
    ranks(3).run(failing_wraps.at_every_take, timeout_s=600.0)
