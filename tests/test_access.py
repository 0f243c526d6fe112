"""Reading and setting whole parameters, gradients and states on one rank; what is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gemini
from gemini import GatheredParameters, GeminiError
from gemini.placement.demand import Demand, Placement, Tier
from gemini.placement.policy import slots_for
from tests import access, mlp


@pytest.mark.parametrize("wrap", access.WRAPS, ids=str)
@pytest.mark.parametrize("case", access.CASES, ids=lambda case: case.__name__)
def test_one_rank(case: Callable[[int, int, dict[str, Any]], None], wrap: dict[str, Any]) -> None:
    case(0, 1, wrap)


def test_masters_keep_what_was_not_changed() -> None:
    access.masters(0, 1)


def test_what_is_not_there_is_named() -> None:
    model = mlp.wrap("cuda")
    weight = model.layers[0].weight
    with pytest.raises(ValueError, match="no optimizer state 'exp_avg': the model has no ShardedOptimizer"):
        gemini.safe_get_full_optimizer_state(weight, "exp_avg")
    model, optimizer = mlp.sharded("cuda")
    weight = model.layers[0].weight
    with pytest.raises(ValueError, match=r"'layers.0.weight' has no optimizer state 'v': it has \['exp_avg', "):
        gemini.safe_get_local_optimizer_state(weight, "v")
    with pytest.raises(GeminiError, match="has no gradient: no backward"):
        gemini.safe_set_full_grad(weight, torch.zeros(16, 16))
    for call in (gemini.safe_set_full_fp32_param, gemini.safe_set_local_fp32_param):
        for bad in (torch.zeros(3), 1.0):
            with pytest.raises(ValueError, match="must be a tensor of shape"):
                call(weight, bad)  # type: ignore[arg-type]
    for thing in (torch.nn.Parameter(torch.zeros(2)), "weight"):
        with pytest.raises(TypeError, match=r"safe_get_full_grad\(\) takes a parameter of a ShardedModel"):
            gemini.safe_get_full_grad(thing)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="params must be parameters or a module, found int"):
        GatheredParameters([3])  # type: ignore[list-item]
    mlp.train_step(model, optimizer)


def test_parameters_that_do_not_fit_together_are_an_error_that_leaves_all_as_it_was() -> None:
    model, optimizer = mlp.sharded("smallest")
    before = mlp.weights_of(model)
    with (
        pytest.raises(gemini.SlotError, match=r"slots of.*Allow [0-9]+ bytes more with model_data_memory= or"),
        GatheredParameters(model),
    ):
        raise AssertionError("unreachable")
    mlp.assert_same(mlp.weights_of(model), before)
    mlp.train_step(model, optimizer)


class FewSlots:
    """A policy of the user's own, which gives the fewest slots that work."""

    name = "few slots"

    def place(self, demand: Demand, budget_bytes: int | None) -> Placement:
        return slots_for(demand, tuple(dict.fromkeys(chunk.home_bytes, Tier.HOST) for chunk in demand.chunks))


def test_where_no_budget_was_given_the_advice_is_not_to_raise_it() -> None:
    model = gemini.ShardedModel(
        mlp.build(), device="emulated", chunk_size=mlp.CHUNK_NUMEL, tensor_placement_policy=FewSlots()
    )
    with pytest.raises(gemini.SlotError, match=r"slots of.*num_slots") as raised, GatheredParameters(model):
        raise AssertionError("unreachable")
    assert "model_data_memory" not in str(raised.value)
