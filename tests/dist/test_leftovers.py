"""What is left of gradients after a step and zero_grad(), on several ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from tests import leftovers
from tests.dist.part_cases import several
from tests.dist.ranks import RankPool

Case = Callable[[int, int, dict[str, Any]], None]


@pytest.mark.parametrize("case", [leftovers.zeros, leftovers.others], ids=lambda case: case.__name__)
def test_zeros_and_gradients_that_stay(ranks: RankPool, case: Case) -> None:
    ranks(2).run(several, case, leftovers.WRAPS)


CASES = [leftovers.nothing, leftovers.bad_others, leftovers.clipped, leftovers.zeros_of_unsynced]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_steps_with_nothing_to_do_or_beside_a_bad_gradient(ranks: RankPool, case: Case) -> None:
    ranks(2).run(several, case, leftovers.WRAPS[:2])


@pytest.mark.soak
@pytest.mark.parametrize("case", [leftovers.zeros, leftovers.others], ids=lambda case: case.__name__)
def test_everywhere(ranks: RankPool, case: Case) -> None:
    ranks(2).run(several, case, leftovers.MORE, timeout_s=120)
    ranks(3).run(several, case, leftovers.WRAPS, timeout_s=120)
