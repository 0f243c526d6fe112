"""Parametrizations on several ranks, whose random numbers differ."""

import pytest

from tests import parametrizations
from tests.dist.ranks import RankPool


@pytest.mark.parametrize("kind", ["spectral_norm", "old spectral_norm", "prune"])
def test_before_wrapping_their_buffers_are_rank_0s(ranks: RankPool, kind: str) -> None:
    assert len(set(ranks(2).run(parametrizations.before_wrapping, kind))) == 1


@pytest.mark.parametrize("kind", ["spectral_norm", "old spectral_norm", "prune"])
def test_after_wrapping_they_are_refused_on_all_ranks(ranks: RankPool, kind: str) -> None:
    for message in ranks(2).run(parametrizations.after_wrapping, kind):
        assert "'layers.1.weight' became 'layers.1." in message
        assert "before it is wrapped" in message
