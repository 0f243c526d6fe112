"""Trainers on several ranks train a sharded model as it is."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.dist import trainer_cases
from tests.dist.ranks import RankPool

pytest.importorskip("accelerate")


@pytest.mark.parametrize(
    "case",
    [
        trainer_cases.accelerate_trains_the_model_as_it_is,
        trainer_cases.mixed_precision_of_accelerate_is_refused,
        trainer_cases.a_trainer_trains_the_model_as_it_is,
    ],
    ids=lambda case: case.__name__,
)
def test_two_ranks(ranks: RankPool, case: Callable[..., Any]) -> None:
    ranks(2).run(case)
