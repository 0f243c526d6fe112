"""Bits do not depend on when copies between host and device happen, only on what waits for them. Several ranks."""

from typing import Any

import pytest
import torch

from tests import parts
from tests.harness import late_copies
from tests.harness.ranks import RankPool

PLACES: dict[str, dict[str, Any]] = {
    "host": {"tensor_placement_policy": "cpu"},
    "smallest": {"model_data_memory": "smallest"},
}
BF16 = torch.bfloat16
SAMPLE = ["saves", "reads_gradients", "adds_before_reducing", "sets_weights", "edits"]


@pytest.mark.parametrize(("stage", "place", "dtype"), [(1, "host", None), (2, "smallest", BF16), (3, "host", BF16)])
def test_detours_between_backward_and_step(ranks: RankPool, stage: int, place: str, dtype: torch.dtype | None) -> None:
    wrap = {"stage": stage, "dtype": dtype, **PLACES[place]}
    assert all(ranks(2).run(late_copies.detours, wrap, False, SAMPLE))


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("place", PLACES)
def test_every_detour(
    ranks: RankPool, place: str, stage: int, dtype: torch.dtype | None, reuse: bool, world_size: int
) -> None:
    wrap = {"stage": stage, "dtype": dtype, **PLACES[place]}
    assert all(ranks(world_size).run(late_copies.detours, wrap, reuse, timeout_s=600))


def test_what_is_trained_changes(ranks: RankPool) -> None:
    ranks(2).run(changes, {"stage": 2, "tensor_placement_policy": "cpu"})


def changes(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    with late_copies.installed():
        parts.unfreezes(rank, world_size, wrap)
