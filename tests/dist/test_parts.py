"""Parts that are frozen, unfrozen, added to the optimizer later, unused, or not sharded at all: several ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import parts
from tests.dist import part_cases
from tests.harness.ranks import RankPool
from tests.zoo import lora


@pytest.mark.parametrize("case", parts.PARITY, ids=lambda case: case.__name__)
def test_two_ranks_equal_plain(ranks: RankPool, case: Callable[[int, int, dict[str, Any]], None]) -> None:
    ranks(2).run(part_cases.several, case, part_cases.WRAPS)


@pytest.mark.parametrize("case", [parts.unfreezes, parts.beside], ids=lambda case: case.__name__)
def test_three_ranks_equal_plain(ranks: RankPool, case: Callable[[int, int, dict[str, Any]], None]) -> None:
    ranks(3).run(part_cases.several, case, part_cases.WRAPS[:3])


@pytest.mark.parametrize("case", parts.REFUSALS, ids=lambda case: case.__name__)
def test_what_is_refused_on_two_ranks(ranks: RankPool, case: Callable[[int, int, dict[str, Any]], None]) -> None:
    ranks(2).run(part_cases.several, case, part_cases.WRAPS[:2])


@pytest.mark.parametrize("wrap", [{}, {"stage": 2, "tensor_placement_policy": "cpu"}], ids=str)
def test_adapters_train_as_on_the_plain_model(ranks: RankPool, wrap: dict[str, Any]) -> None:
    ranks(2).run(lora.trains_like_plain, wrap)


def test_what_does_not_fit_when_it_is_unfrozen_changes_nothing_on_any_rank(ranks: RankPool) -> None:
    ranks(2).run(parts.too_tight)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_parameter_that_one_rank_uses_is_used(ranks: RankPool, stage: int) -> None:
    ranks(2).run(part_cases.unused_on_some, stage)


@pytest.mark.parametrize(
    ("what", "stage", "said"),
    [
        ("one", 3, "change of what is trained"),
        ("one", 0, "change of what is trained"),
        ("first", 3, "change of what is trained"),
        ("other", 2, "unfrozen: layers.2.weight"),
        ("group", 3, "new param group"),
    ],
)
def test_ranks_that_do_not_do_alike_are_told(ranks: RankPool, what: str, stage: int, said: str) -> None:
    exits = ranks(2).run(part_cases.diverges, what, {"stage": stage}, fresh=True, timeout_s=60)
    assert all(said in one.result for one in exits), exits


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_largest_gradient_is_that_of_all_ranks(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(parts.largest_gradients)


@pytest.mark.parametrize("stage", [0, 3])
def test_settings_that_differ_by_rank_are_refused_before_the_step(ranks: RankPool, stage: int) -> None:
    for told in ranks(2).run(part_cases.settings_differ, stage):
        assert len(told) == 3, told
        assert all("the optimizer's settings differs between rank 0 and rank 1" in one for one in told)
        assert "'lr': 0.01" in told[0] and "'lr': 0.5" in told[0], told[0]
        assert "'weight_decay': 0.5" in told[1] and "'lr': 0.25" in told[2]
