"""Bits do not depend on when copies between host and device happen, only on what waits for them. One rank."""

from typing import Any

import pytest
import torch

from tests import parts
from tests.harness import late_copies
from tests.zoo import mlp

PLACES: dict[str, dict[str, Any]] = {
    "host": {"tensor_placement_policy": "cpu"},
    "smallest": {"model_data_memory": "smallest"},
    "half": {"model_data_memory": 8 * mlp.CHUNK_NUMEL * mlp.LAYERS},
    "device": {"tensor_placement_policy": "cuda"},
}


@pytest.mark.filterwarnings("ignore:step .* skipped", "ignore:reuse_fp16_shard=True. parameters are used again")
@pytest.mark.parametrize("reuse", [False, True], ids=["", "reuse"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("place", PLACES)
def test_detours_between_backward_and_step(place: str, dtype: torch.dtype | None, reuse: bool) -> None:
    num_late = late_copies.detours(0, 1, {"dtype": dtype, **PLACES[place]}, reuse)
    assert (num_late > 0) == (place != "device")


@pytest.mark.parametrize("case", [parts.unfreezes, parts.beside], ids=lambda case: case.__name__)
@pytest.mark.parametrize("wrap", parts.WRAPS, ids=str)
def test_what_is_trained_changes(case: Any, wrap: dict[str, Any]) -> None:
    with late_copies.installed():
        case(0, 1, wrap)


@pytest.mark.parametrize("wrap", parts.WRAPS, ids=str)
def test_gradients_are_given_up_when_their_copies_are_done(wrap: dict[str, Any]) -> None:
    with late_copies.installed():
        pair = parts.Pair(0, 1, wrap, mlp.Mlp)
        pair.backward(0)
        pair.zero_grad()
        pair.flag(False, "layers.2.", "layers.4.")
        pair.steps(1)
        pair.flag(True, "layers.")
        pair.steps(2)


@pytest.mark.parametrize("case", [parts.memory, parts.nothing], ids=lambda case: case.__name__)
def test_states_move_to_the_device_when_others_are_frozen(case: Any) -> None:
    with late_copies.installed() as late:
        case(0, 1, {"model_data_memory": "smallest"})
    assert late.num_late > 0
