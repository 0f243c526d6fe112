"""The user's post-accumulate hooks on wrapped parameters, on several ranks."""

from tests import user_hooks
from tests.dist.part_cases import several
from tests.dist.ranks import RankPool


def test_hooks_see_and_may_change_this_ranks_gradients(ranks: RankPool) -> None:
    ranks(2).run(several, user_hooks.reads_and_changes, user_hooks.WRAPS)


def test_hooks_that_would_train_ranks_apart_are_refused(ranks: RankPool) -> None:
    for wrap in user_hooks.WRAPS[:2]:
        ranks(2).run(user_hooks.refused, wrap)
