"""`ZeroInitContext` on several ranks."""

from pathlib import Path
from typing import Any

import all_minilm_l6_v2
import pytest

from tests import building
from tests.dist import build_cases as cases
from tests.harness.ranks import RankPool

FP32 = 4


@pytest.mark.parametrize("world_size", [2, 3])
def test_weights_are_rank_0s_whatever_the_seeds(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(cases.rank_0s_values_win, list(building.MODELS))


@pytest.mark.parametrize(
    "wrap",
    [
        {},
        {"stage": 0},
        {"stage": 1, "shard_strategy": "tensor"},
        {"stage": 2, "tensor_placement_policy": "cpu"},
        {"shard_strategy": "bucket", "tensor_placement_policy": "cpu"},
        {"dtype": "bf16", "tensor_placement_policy": "cpu"},
    ],
)
def test_training_after_it_is_that_of_a_plain_build(ranks: RankPool, wrap: dict[str, Any]) -> None:
    ranks(2).run(cases.training_after_it_equals_plain_wrapping, wrap)


@pytest.mark.parametrize(("world_size", "name"), [(2, "deep"), (2, "top heavy"), (4, "deep"), (3, "top heavy")])
def test_no_rank_holds_more_than_its_shards_an_operator_and_a_chunk(
    ranks: RankPool, world_size: int, name: str
) -> None:
    """Shards: of parameters after the context, of gradients too after wrapping, of all after the optimizer."""
    for facts in ranks(world_size).run(cases.memory_while_building, name, None):
        padding = 256 * FP32 * (facts["num_parameters"] + 2)
        room = facts["operator"] + facts["chunk"] + 4096
        shards = facts["numel"] * FP32 // world_size + padding
        assert facts["context peak"] <= shards + room, facts
        assert facts["wrap rest"] <= 2 * shards, facts
        assert facts["wrap peak"] <= facts["wrap rest"] + room, facts
        assert facts["rest"] <= 4 * shards, facts
        assert facts["peak"] <= facts["rest"] + room, facts


@pytest.mark.parametrize("world_size", [2, 3])
def test_one_rank_may_initialise_gathered_parameters(ranks: RankPool, world_size: int) -> None:
    ranks(world_size).run(cases.gathered_while_building)


def test_errors_of_the_user_and_the_users_memory_stay_the_users(ranks: RankPool) -> None:
    ranks(2).run(cases.caught_errors_and_the_users_memory)
    assert ranks(2).run(cases.caught_error_between_micro_batches) == [2.0, 2.0]


def test_a_model_of_some_ranks_may_come_before_one_of_all(ranks: RankPool) -> None:
    ranks(3).run(cases.a_model_of_some_ranks_then_of_all)


def test_an_exception_on_one_rank_ends_all(ranks: RankPool) -> None:
    said = [found.result for found in ranks(2).run(cases.one_raises, fresh=True, timeout_s=60)]
    assert said[1] == "ValueError: no such layer on rank 1"
    assert said[0].startswith("RemoteRankError: rank 1") and "no such layer" in said[0]


@pytest.mark.parametrize(
    ("case", "words"), [(cases.another_operator, "Linear 0"), (cases.another_use, "use of a parameter of Linear")]
)
def test_ranks_that_build_otherwise_are_told(ranks: RankPool, case: Any, words: str) -> None:
    for found in ranks(2).run(case, fresh=True, timeout_s=60):
        assert words in found.result, found


def test_a_write_through_a_view_that_comes_too_late_is_an_error(ranks: RankPool) -> None:
    for said in ranks(2).run(cases.a_late_write):
        assert "Linear 0.weight" in said and "take the view anew" in said


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a real model, all-MiniLM-L6-v2, as its package ships it."""
    return str(all_minilm_l6_v2.extract_model(str(tmp_path_factory.mktemp("minilm"))))


def test_a_real_model_is_streamed_from_its_file(ranks: RankPool, sentence_encoder: str) -> None:
    for facts in ranks(2).run(cases.memory_while_building, "pretrained", sentence_encoder):
        room = facts["operator"] + facts["chunk"] + 2 * facts["buffers"] + 65536
        assert facts["numel"] > 20e6
        assert facts["context peak"] <= facts["numel"] * FP32 // 2 + room, facts
        assert facts["wrap peak"] <= facts["wrap rest"] + room, facts
        assert facts["peak"] <= facts["rest"] + room, facts
        assert facts["rest"] <= 1.02 * 4 * facts["numel"] * FP32 // 2, facts


def test_a_real_model_is_fine_tuned_on_two_ranks(ranks: RankPool, sentence_encoder: str) -> None:
    for facts in ranks(2).run(cases.tuned_sentence_encoder, sentence_encoder):
        assert facts["losses"][-1] < facts["losses"][0], facts
        assert facts["fetches"] > 0


def test_a_saved_model_is_streamed(ranks: RankPool, tmp_path: Path) -> None:
    building.gpt2().save_pretrained(tmp_path, max_shard_size="20KB")
    for facts in ranks(2).run(cases.pretrained, str(tmp_path)):
        assert sum(name.endswith(".safetensors") for name in facts["files"]) > 1
