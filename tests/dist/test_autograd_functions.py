"""`torch.autograd.grad` on several ranks."""

from typing import Any

import pytest

from tests.dist import autograd_cases as cases
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("wrap", [{"stage": 3, "model_data_memory": "smallest"}, {"stage": 3}, {"stage": 1}])
def test_a_rank_gets_the_gradients_of_its_own_batch(ranks: RankPool, wrap: dict[str, Any]) -> None:
    ranks(2).run(cases.gradients_of_own_batch, wrap)


@pytest.mark.parametrize("stage", [1, 3])
def test_transforms_work_on_weights_that_stay(ranks: RankPool, stage: int) -> None:
    ranks(2).run(cases.transforms, stage)
