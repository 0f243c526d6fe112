"""The path of backends that order a stream and do not hold up the host (NCCL), on the CPU with a stand-in."""

import pytest
import torch

from tests.dist import stream_cases as cases
from tests.harness.ranks import RankPool


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stage", "dtype"), [(3, None), (3, torch.bfloat16), (1, None)], ids=str)
def test_training_has_the_bits_that_it_has_on_gloo(ranks: RankPool, stage: int, dtype: torch.dtype | None) -> None:
    for found, wanted, launched in ranks(2).run(cases.trains_as_on_gloo, stage, dtype, timeout_s=60):
        assert found == wanted
        assert launched == {"coalesced"}


def test_a_failed_rank_is_reported_and_left_behind_before_training_goes_on(ranks: RankPool) -> None:
    (message, took_s, aborted, same), (own, _, its_aborted, its_same) = ranks(2).run(
        cases.a_failed_rank_is_heard_of, timeout_s=60
    )
    assert message.startswith("RemoteRankError: rank 1 failed: Boom")
    assert own.startswith("Boom")
    assert took_s < 30
    assert aborted == its_aborted == ["abort"]
    assert same
    assert its_same
