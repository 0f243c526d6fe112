"""Parameters that one module owns and another uses, registered and not."""

import pytest
import torch
from torch import Tensor, nn

from gemini import ShardedModel, ShardedOptimizer, UnsupportedError
from gemini import register_external_parameter as register
from gemini import unregister_external_parameter as unregister
from tests.harness.on_ranks import on_ranks
from tests.zoo import mlp
from tests.zoo.mlp import WIDTH, assert_same, build, weights_of


class Borrower(nn.Module):
    """Uses a weight that it does not own, and one of its own."""

    def __init__(self, lender: nn.Linear) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.lenders = (lender,)  # a tuple: not a submodule
        self.kinds: list[type] = []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.lenders[0].weight
        self.kinds.append(type(weight))
        return nn.functional.linear(x, weight) * self.scale


class Net(nn.Module):
    """The lender is at the end: at the smallest budget it has left when the borrower runs."""

    def __init__(self, registers: bool) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
        self.borrower = Borrower(layers[-1])
        self.layers = nn.Sequential(*layers)
        if registers:
            register(self.borrower, layers[-1].weight)
            register(self.borrower, layers[-1].weight)  # twice is once

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(torch.tanh(self.borrower(x)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("registers", [True, False])
@on_ranks(1, 2)
def test_a_borrowed_weight_trains_as_in_plain_pytorch(rank: int, world_size: int, registers: bool) -> None:
    wrap = {"chunk_size": mlp.CHUNK_NUMEL}
    wrap["model_data_memory"] = mlp.smallest_budget(lambda: Net(registers), **wrap)
    model = ShardedModel(build(lambda: Net(registers)), device="emulated", **wrap)
    optimizer = ShardedOptimizer(model, mlp.adam(model.parameters()))
    reference, its = mlp.plain(make=lambda: Net(False))
    for step in range(4):
        mlp.train_step(model, optimizer, step)
        mlp.train_step(reference, its, step)
    assert_same(weights_of(model), weights_of(reference))
    assert model.observer.counts["evict"] > 0
    plain = [kind is nn.Parameter for kind in model.borrower.kinds]
    assert all(plain) if registers else not any(plain)


def test_registering_is_checked_and_can_be_taken_back() -> None:
    net = Net(True)
    weight = net.layers[5].weight
    unregister(net.borrower, weight)
    with pytest.raises(ValueError, match="not registered with this Borrower"):
        unregister(net.borrower, weight)
    for bad in ((net, 3), (weight, weight)):
        with pytest.raises(TypeError, match="a module and a parameter are needed, found"):
            register(*bad)  # type: ignore[arg-type]
    model = mlp.wrap("cuda")
    with pytest.raises(UnsupportedError, match="before ShardedModel"):
        register(model.module, model.layers[0].weight)
