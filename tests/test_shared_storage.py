"""Parameters, buffers and plain tensors that share memory: tied, or refused by their names, and never torn apart."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import GatheredParameters, ReleasedParameterError, ZeroInitContext
from tests.mlp import WIDTH, assert_same, build, plain, sharded, train_step, weights_of, wrap

# ---- between a wrapped parameter and a plain one ---------------------------------------------------------------


def test_a_plain_parameter_cannot_take_a_wrapped_ones_memory_and_keeps_its_own() -> None:
    """The wrapped one's memory moves; a plain one would be left with placeholders."""
    model, other = wrap(), nn.Linear(WIDTH, WIDTH)
    before = other.weight.detach().clone()
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        other.weight.data = model.layers[0].weight.data
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.*clone\(\)"):
        other.weight = nn.Parameter(model.layers[0].weight.data)
    assert torch.equal(other.weight, before)
    other.weight.data = model.layers[0].weight.data.clone()
    other.bias.data.copy_(model.layers[0].bias.data)
    assert torch.equal(other.weight, build().layers[0].weight)
    assert torch.equal(other.bias, build().layers[0].bias)
    assert nn.Parameter(model.layers[0].weight.data.clone()).requires_grad


def test_what_was_detached_answers_for_its_place_without_memory() -> None:
    model = wrap()
    lazy = model.layers[0].weight.detach()
    assert (lazy.device.type, lazy.is_cpu, lazy.is_meta, lazy.get_device()) == ("cpu", True, False, -1)
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.*clone\(\)"):
        lazy.requires_grad_()
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(ReleasedParameterError, match=r"layers\.0\.weight"):
        lazy + 1  # as a function in C++ would reach for its memory


# ---- between wrapped parameters --------------------------------------------------------------------------------

SHARES: dict[str, Callable[[Any], Any]] = {
    "data": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight.data),
    "detach": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight.detach()),
    "itself": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight),
    "view": lambda m: setattr(m.layers[0].weight, "data", m.layers[2].weight.data.t()),
    "part": lambda m: setattr(m.layers[0].bias, "data", m.layers[2].weight.data[3]),
}


@pytest.mark.parametrize("kind", SHARES)
@pytest.mark.parametrize("place", ["smallest", "cuda"])
def test_a_wrapped_parameter_cannot_take_anothers_memory(kind: str, place: str) -> None:
    model, optimizer = sharded(place)
    with pytest.raises(ReleasedParameterError, match=r"'layers\.0\.\w+'.* memory of 'layers\.2\.weight'"):
        SHARES[kind](model)
    reference, plain_optimizer = plain()
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


def test_gathered_parameters_cannot_take_one_anothers_memory() -> None:
    model = wrap()
    layers = model.layers
    with (
        pytest.raises(ReleasedParameterError, match=r"'layers\.0\.weight'.* memory of 'layers\.2\.weight'"),
        GatheredParameters([layers[0].weight, layers[2].weight], modifier_rank=0),
    ):
        layers[0].weight.data = layers[2].weight.data
    assert_same(weights_of(model), dict(build().state_dict()))


def test_a_parameter_takes_values_and_its_own_memory() -> None:
    model, reference = wrap(), build()
    for each in (model, reference):
        first, third = each.layers[0].weight, each.layers[2].weight
        first.data = first.data
        first.data = third.data.clone()
        third.data = third.data * 2
        each.layers[1].bias.data = each.layers[1].bias.data.to(torch.float32)
    assert_same(weights_of(model), dict(reference.state_dict()))


def test_parameters_of_a_model_that_is_built_cannot_take_one_anothers_memory() -> None:
    with ZeroInitContext():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        with pytest.raises(ReleasedParameterError, match=r"a\.weight = b\.weight"):
            model[0].weight.data = model[1].weight.data
