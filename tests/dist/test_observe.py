"""Moves between ranks, as a listener sees them."""

from tests.harness.ranks import RankPool
from tests.test_observe import watched
from tests.zoo.mlp import LAYERS


def test_gathers_that_were_started_ahead_and_reductions_are_seen(ranks: RankPool) -> None:
    for counts, sources in ranks(2).run(watched):
        assert counts["prefetch"] > 0
        assert counts["reduce"] == 3 * LAYERS
        assert sources == {"fetch": ["host"], "prefetch": ["host"], "reduce": ["gradient slot"]}
