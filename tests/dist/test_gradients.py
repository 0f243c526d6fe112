"""What a user does with `.grad`, on several ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests import gradient_writes, gradients
from tests.dist.ranks import RankPool
from tests.dist.test_access import all_wraps


@pytest.mark.parametrize(("world_size", "wraps"), [(2, gradients.WRAPS[::5]), (3, gradients.WRAPS[2:3])])
def test_a_parameter_without_a_gradient_on_any_rank_has_none_on_every_rank(
    ranks: RankPool, world_size: int, wraps: list[dict[str, Any]]
) -> None:
    ranks(world_size).run(all_wraps, gradients.idle, wraps)


def test_one_rank_may_ask_what_a_gradient_is_without_reading_it(ranks: RankPool) -> None:
    ranks(2).run(gradients.asked_on_one_rank)


WRITES = [gradient_writes.writes, gradient_writes.micro_batches, gradient_writes.clips, gradient_writes.after_our_clip]
CASES = [*WRITES, gradients.reads]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_writes_reach_every_ranks_part(ranks: RankPool, case: Callable[[int, int, dict[str, Any]], None]) -> None:
    ranks(2).run(all_wraps, case, [gradients.WRAPS[0], gradients.WRAPS[5]])


def test_three_ranks(ranks: RankPool) -> None:
    for case in CASES[1:4]:
        ranks(3).run(all_wraps, case, gradients.WRAPS[3:4])


@pytest.mark.soak
@pytest.mark.parametrize("world_size", [2, 3])
def test_every_case_everywhere(ranks: RankPool, world_size: int) -> None:
    for case in [*CASES, gradients.idle]:
        ranks(world_size).run(all_wraps, case, [*gradients.WRAPS, {"chunk_size": 2048}], timeout_s=600)


def test_torchs_clipping_holds_one_gradient_at_a_time(ranks: RankPool) -> None:
    ranks(2).run(gradient_writes.one_at_a_time)


def test_ranks_that_write_different_values_keep_one_model(ranks: RankPool) -> None:
    everywhere = [ranks(2).run(gradient_writes.each_rank_its_own, wrap) for wrap in gradients.STAGES[:4]]
    for weights in (weights for every in everywhere for weights in every):
        for name, weight in weights.items():
            assert torch.equal(weight, everywhere[0][0][name]), "equal on all ranks, and at all stages"


def test_fp16_gradients_are_seen_and_set_without_the_loss_scale(ranks: RankPool) -> None:
    ranks(2).run(all_wraps, gradients.unscaled, gradients.FP16)


def test_a_gradient_that_one_rank_alone_gives_is_an_error_on_all(ranks: RankPool) -> None:
    for words in ranks(2).run(gradients.one_gives_a_gradient):
        assert "ranks took different ways" in words
