"""`.to()`, `.float()` and the like: a conversion that changes nothing does nothing, any other is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini import UnsupportedError
from tests.zoo.mlp import Mlp, assert_same, build, plain, sharded, train_step, weights_of, wrap
from tests.zoo.plain_copies import Parts

CHANGE_NOTHING: dict[str, Callable[[Any], Any]] = {
    "to device": lambda m: m.to("cpu"),
    "to dtype": lambda m: m.to(torch.float32),
    "to both": lambda m: m.to("cpu", torch.float32, non_blocking=True),
    "like a tensor": lambda m: m.to(torch.zeros(3)),
    "cpu": lambda m: m.cpu(),
    "float": lambda m: m.float(),
}


@pytest.mark.parametrize("kind", CHANGE_NOTHING)
def test_a_conversion_that_changes_nothing_does_nothing(kind: str) -> None:
    model, optimizer = sharded(make=Parts)
    assert CHANGE_NOTHING[kind](model) is model
    parameter = model.layers[0].weight
    assert CHANGE_NOTHING[kind](parameter) is parameter
    outer = nn.ModuleList([model])
    assert CHANGE_NOTHING[kind](outer)[0] is model
    reference, plain_optimizer = plain(make=Parts)
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    assert_same(weights_of(model), weights_of(reference))


@pytest.mark.parametrize(
    "convert",
    [
        lambda m: m.half(),
        lambda m: m.to("meta"),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.cuda(),
        lambda m: m.share_memory(),
    ],
    ids=range(6),
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda() is no error there")
def test_a_conversion_that_changes_something_is_refused(convert: Callable[[Any], Any]) -> None:
    class Convolves(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(2, 2, 3)

    model = wrap(make=Convolves)
    with pytest.raises(UnsupportedError, match=r"copy\.deepcopy\(model\)"):
        convert(model)
    assert_same(weights_of(model), dict(build(Convolves).state_dict()))


def to_empty(module: nn.Module) -> None:
    module.to_empty(device="cpu")


def one_by_one(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.empty_like(parameter)


EMPTIES: dict[str, Callable[[nn.Module], object]] = {
    "to_empty": to_empty,
    "to_empty of a part": lambda module: to_empty(module.layers[1]),  # type: ignore[index, union-attr]
    "one by one": one_by_one,
}


@pytest.mark.parametrize("kind", EMPTIES)
@pytest.mark.parametrize("place", ["smallest", "cuda"])
def test_a_wrapped_module_cannot_be_emptied(kind: str, place: str) -> None:
    emptied_is_refused(0, 1, kind, place)


def emptied_is_refused(rank: int, world_size: int, kind: str, place: str) -> None:
    model, optimizer = sharded(place)
    reference, plain_optimizer = plain()
    with pytest.raises(UnsupportedError, match=r"would lose its values.*copy\.deepcopy\(model\)"):
        EMPTIES[kind](model.module)
    assert_same(weights_of(model), weights_of(reference))
    for each in (model, reference):
        with torch.no_grad():
            for parameter in each.parameters():
                parameter.data = torch.empty_like(parameter).fill_(0.5)  # written to, it has values
    train_step(model, optimizer)
    train_step(reference, plain_optimizer)
    for name, value in weights_of(model).items():
        torch.testing.assert_close(value, reference.state_dict()[name], rtol=0, atol=1e-4)
    model.close()


def test_a_tensor_converted_to_be_like_a_parameter_fetches_nothing() -> None:
    model = wrap(dtype=torch.bfloat16)
    before = model.chunk_manager.params.next_use.num_touches
    assert torch.zeros(2).to(model.layers[0].weight).dtype is torch.bfloat16
    assert model.chunk_manager.params.next_use.num_touches == before
    assert model.layers[0].weight.to(torch.float32).dtype is torch.float32
