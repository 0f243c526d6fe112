"""Bits do not depend on when copies between host and device happen, only on what waits for them."""

import itertools
from typing import Any

import pytest
import torch

from tests.features import test_frozen_parts, test_frozen_state, test_plain_parts
from tests.harness import late_copies
from tests.harness.on_ranks import on_ranks, on_ranks_with
from tests.zoo import mlp, parts

CPU, SMALLEST = {"tensor_placement_policy": "cpu"}, {"model_data_memory": "smallest"}
PLACES: dict[str, dict[str, Any]] = {
    "host": CPU,
    "smallest": SMALLEST,
    "half": {"model_data_memory": 8 * mlp.CHUNK_NUMEL * mlp.LAYERS},
    "device": {"tensor_placement_policy": "cuda"},
}
DTYPES = (None, torch.bfloat16, torch.float16)
SOME = ("saves", "reads_gradients", "adds_before_reducing", "sets_weights", "edits")
# (place, dtype, reuse_fp16_shard, stage, detours or none for all)
Setting = tuple[str, torch.dtype | None, bool, int, tuple[str, ...]]
ONE_RANK: list[Setting] = list(itertools.product(PLACES, DTYPES, (False, True), (3,), ((),)))
SAMPLE: dict[int, list[Setting]] = {
    1: [
        ("host", None, False, 3, ()),
        ("smallest", torch.bfloat16, True, 3, ()),
        ("host", torch.float16, True, 3, ()),
    ],
    2: [("host", torch.bfloat16, False, 3, SOME)],
}
TWO_RANKS: list[Setting] = [("host", None, False, 1, SOME), ("smallest", torch.bfloat16, False, 2, SOME)]
EVERY: list[Setting] = list(itertools.product(("host", "smallest"), DTYPES, (False, True), range(4), ((),)))


def _id_of(setting: Setting) -> str:
    place, dtype, reuse, stage, names = setting
    words = (place, dtype, "reuse" * reuse, f"stage {stage}", "some" if names else "all")
    return "-".join(str(word) for word in words if word != "")


@pytest.mark.filterwarnings("ignore:step .* skipped", "ignore:reuse_fp16_shard=True. parameters are used again")
@on_ranks_with("setting", SAMPLE, soak={1: ONE_RANK, 2: [*TWO_RANKS, *EVERY], 3: EVERY}, ids=_id_of, timeout_s=600)
def test_detours_between_backward_and_step(rank: int, world_size: int, setting: Setting) -> None:
    place, dtype, reuse, stage, names = setting
    num_late = late_copies.detours(rank, world_size, {"stage": stage, "dtype": dtype, **PLACES[place]}, reuse, names)
    assert (num_late > 0) == (place != "device")


CHANGES = {
    "unfreezing": test_frozen_parts.test_unfreezing_step_by_step_has_the_bits_of_the_plain_loop,
    "a plain head": test_plain_parts.test_a_plain_head_trains_on_a_sharded_trunk,
    "memory": test_frozen_state.test_what_is_frozen_holds_only_its_weights_once_its_state_is_discarded,
    "nothing": test_frozen_parts.test_for_a_while_nothing_is_trained_but_inputs_have_gradients,
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("change", ["unfreezing", "a plain head"])
@on_ranks_with("wrap", {1: parts.WRAPS, 2: [{"stage": 2, **CPU}]})
def test_what_is_trained_changes(rank: int, world_size: int, wrap: dict[str, Any], change: str) -> None:
    with late_copies.installed():
        CHANGES[change].case(rank, world_size, wrap)  # type: ignore[attr-defined]


@pytest.mark.sampled(2)
@on_ranks_with("wrap", {1: parts.WRAPS, 2: [{"stage": 2, **CPU}]})
def test_gradients_are_given_up_when_their_copies_are_done(rank: int, world_size: int, wrap: dict[str, Any]) -> None:
    with late_copies.installed():
        pair = parts.Pair(rank, world_size, wrap, mlp.Mlp)
        pair.backward(0)
        pair.zero_grad()
        pair.flag(False, "layers.2.", "layers.4.")
        pair.steps(1)
        pair.flag(True, "layers.")
        pair.steps(2)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("change", ["memory", "nothing"])
@on_ranks(1, 2)
def test_states_move_to_the_device_when_others_are_frozen(rank: int, world_size: int, change: str) -> None:
    with late_copies.installed() as late:
        CHANGES[change].case(rank, world_size, dict(SMALLEST))  # type: ignore[attr-defined]
    assert late.num_late > 0
