"""Memory and traffic: the formulas of ZeRO per stage, open gradients, budgets over live storages, the steady state."""

import pytest

from tests.dist import memory_cases as cases
from tests.harness.on_ranks import in_soak
from tests.harness.ranks import RankPool

FP32 = 4


@pytest.mark.sampled(2)
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_per_rank_equal_the_formulas(ranks: RankPool, stage: int, world_size: int) -> None:
    """ZeRO (Rajbhandari et al., 2020), table 1: 4 + 4 + 8 bytes a parameter for fp32 Adam, over N when sharded."""
    for facts in ranks(world_size).run(cases.ledger_after_a_step, {"stage": stage, "chunk_size": 12288}):
        numel, kinds = facts["numel"], facts["kinds"]
        padding = numel - facts["num_parameters"]
        assert 0 <= padding <= facts["num_chunks"] * (256 * world_size + 256 * 2), "a chunk is padded at its end only"
        assert kinds["param"] == FP32 * numel // (world_size if stage == 3 else 1)
        assert kinds["grad"] == FP32 * numel // (world_size if stage >= 2 else 1)
        assert kinds["optim"] == 2 * FP32 * numel // (world_size if stage >= 1 else 1)
        assert kinds["master"] == 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_traffic_per_step_equals_the_formulas(ranks: RankPool, world_size: int) -> None:
    """2 Psi (N-1)/N elements at stages 0 to 2, 3 Psi (N-1)/N at stage 3 when released, beside words for each rank."""
    words = 1024 * (world_size - 1)
    for stage in (0, 1, 2, 3):
        wrap = {"stage": stage, "chunk_size": 8192, "tensor_placement_policy": "cpu"}
        if stage == 3:
            wrap["model_data_memory"] = 8 * 8192 * FP32
        for facts in ranks(world_size).run(cases.ledger_after_a_step, wrap):
            expected = (3 if stage == 3 else 2) * facts["numel"] * FP32 * (world_size - 1) // world_size
            control = facts["sent_per_step"] - expected
            if stage == 3:  # what forward used last stays in its slots for backward
                kept = 3 * 8192 * FP32
                assert -2 * kept <= control <= words, (stage, control)
            else:
                assert 0 <= control <= words, (stage, control)


def test_stage_3_has_no_final_all_gather(ranks: RankPool) -> None:
    """B3: an all-gather a chunk and use, none after the step."""
    wrap = {"stage": 3, "chunk_size": 8192}
    facts = ranks(2).run(cases.ledger_after_a_step, wrap)[0]
    assert facts["calls"]["all_gather"] == 3 * facts["num_chunks"], "everything fits: one gather a chunk and step"
    assert facts["calls"]["reduce_scatter"] == 3 * facts["num_chunks"]


@pytest.mark.parametrize("stage", [2, 3])
def test_at_most_two_gradients_are_open_in_a_sequential_model(ranks: RankPool, stage: int) -> None:
    facts = ranks(2).run(cases.ledger_after_a_step, {"stage": stage, "chunk_size": 8192})[0]
    assert facts["num_chunks"] >= 4
    assert facts["peak_open"] <= 2
    assert facts["kinds"]["gradient slots"] <= 2 * 8192 * FP32


@pytest.mark.parametrize("world_size", [1, 2])
def test_budgets_hold_over_live_storages(ranks: RankPool, world_size: int) -> None:
    budget = 170_000 if world_size == 1 else 260_000
    for facts in ranks(world_size).run(cases.live_tensors_within_budget, budget):
        assert facts["storages"] <= budget
        assert facts["ledger"] <= budget
        assert facts["storages"] == facts["ledger"], "the ledger counts what is there"
        assert facts["evictions"] > 0


def test_no_model_data_is_allocated_after_the_first_steps(ranks: RankPool) -> None:
    for before, after in ranks(2).run(cases.steady_state_allocations):
        assert before == after


@pytest.mark.parametrize("world_size", [2, *in_soak(3)])
def test_the_estimate_is_what_each_rank_takes(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(cases.estimates_equal_ledgers)
