"""Trainers on several ranks train a sharded model as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.dist import trainer_cases
from tests.dist.ranks import RankPool
from tests.mlp import both_dtypes

pytest.importorskip("accelerate")


@pytest.mark.parametrize(
    "case",
    [
        trainer_cases.accelerate_trains_the_model_as_it_is,
        trainer_cases.mixed_precision_of_accelerate_is_refused,
        trainer_cases.what_would_save_the_model_by_another_librarys_functions_is_refused,
        trainer_cases.a_trainer_trains_the_model_as_it_is,
    ],
    ids=lambda case: case.__name__,
)
def test_two_ranks(ranks: RankPool, case: Callable[..., Any]) -> None:
    ranks(2).run(case)


@both_dtypes
def test_training_goes_on_from_a_state_that_accelerate_saved(ranks: RankPool, dtype: torch.dtype | None) -> None:
    ranks(2).run(trainer_cases.accelerate_saves_a_state_from_which_training_goes_on, dtype)
