"""State dicts of the wrapped module, copies and averages, on several ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import plain_copies, state_dicts
from tests.dist.part_cases import several
from tests.dist.ranks import RankPool

WRAPS: list[dict[str, Any]] = [{}, {"stage": 1, "shard_strategy": "tensor"}]
CASES = [*state_dicts.CASES, plain_copies.copies_are_plain, plain_copies.averages]
PARTS = [plain_copies.copies_of_parts_are_plain, plain_copies.averages_of_parts]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_ranks_have_whole_copies(ranks: RankPool, case: Callable[[int, int, dict[str, Any]], None]) -> None:
    wraps = WRAPS[:1] if case is state_dicts.libraries_save_whole_files else WRAPS
    ranks(2).run(several, case, wraps, timeout_s=90)


@pytest.mark.parametrize("case", PARTS, ids=lambda case: case.__name__)
def test_two_ranks_have_whole_copies_of_parts(
    ranks: RankPool, case: Callable[[int, int, dict[str, Any]], None]
) -> None:
    ranks(2).run(several, case, WRAPS, timeout_s=90)
