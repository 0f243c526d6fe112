"""Activation checkpointing on several ranks."""

from typing import Any

import pytest

from tests.checkpointed import WAYS
from tests.dist import checkpoint_cases as cases
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("budget", ["smallest", None])
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpointing_does_not_change_what_ranks_train(ranks: RankPool, stage: int, budget: str | None) -> None:
    wrap: dict[str, Any] = {"stage": stage, "model_data_memory": budget}
    ranks(2).run(cases.same_as_without, tuple(WAYS), wrap)
