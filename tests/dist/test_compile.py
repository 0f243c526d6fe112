"""`torch.compile` on several ranks."""

import pytest

from tests.compiled import WAYS
from tests.dist import compile_cases as cases
from tests.harness.ranks import RankPool


@pytest.mark.parametrize(
    ("way", "when", "stage", "tight"),
    [("in place", "after", 3, True), ("whole", "after", 3, False), ("blocks", "before", 2, True)],
)
def test_compiled_models_on_ranks_equal_the_compiled_plain_module(
    ranks: RankPool, way: str, when: str, stage: int, tight: bool
) -> None:
    ranks(2).run(cases.trains, way, when, stage, "eager", tight)


def test_ranks_whose_batches_choose_other_graphs_stay_together(ranks: RankPool) -> None:
    for evictions in ranks(2).run(cases.trains, "blocks", "before", 3, "eager", True, True):
        assert evictions > 0


def test_nothing_is_compiled_again_when_chunks_move_between_slots(ranks: RankPool) -> None:
    for counts in ranks(2).run(cases.recompiles):
        assert counts[0] > 0
        assert len(set(counts)) == 1


def test_ranks_may_use_other_branches_inside_a_compiled_module(ranks: RankPool) -> None:
    ranks(2).run(cases.compiled_switch)


def test_ranks_that_compile_other_modules_are_told(ranks: RankPool) -> None:
    for said in ranks(2).run(cases.ranks_compile_others, False):
        assert "compiled: h.0" in said, said
        assert "compiled: h.1" in said, said


@pytest.mark.soak
def test_a_rank_that_compiles_alone_is_told_to_all(ranks: RankPool) -> None:
    for said in ranks(2).run(cases.ranks_compile_others, True, fresh=True):
        assert "ranks took different ways" in said.result, said


@pytest.mark.soak
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_stages_and_backends_on_ranks(
    ranks: RankPool, way: str, when: str, stage: int, backend: str, ragged: bool
) -> None:
    ranks(2).run(cases.trains, way, when, stage, backend, "whole" not in way, ragged, timeout_s=300)
